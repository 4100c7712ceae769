"""Before a run starts: can this bucket be used, and is this run's name still free?

The rule of this module: rollout ids repeat in every run, so a run that holds data must not be written by another run:
fenced rollouts would refuse every call, and open ones would mix two runs.
"""

from __future__ import annotations

from s3capture.errors import SettingsError
from s3capture.reader import Reader
from s3capture.runtime import shared
from s3capture.settings import Settings
from s3capture.store.base import Store


class RunInUseError(SettingsError):
    """The run id holds data already; resume it deliberately, or take another."""


def check_run(settings: Settings, *, resume: bool = False, store: Store | None = None) -> None:
    """Probe the bucket and refuse a run that holds data, unless ``resume`` says that it is meant.

    Two LIST-like requests and the scratch key of the probe. Raise ``RunInUseError`` and the ``StoreError`` kinds.
    """
    runtime = shared(settings, store)
    runtime.check_store()
    if resume:
        return
    root = runtime.keys.root
    with Reader(runtime.store) as reader:
        held = [folder for folder in reader.folders(root) if folder != f"{root}probe/"]
    if held:
        raise RunInUseError(
            f"run {settings.run!r} in {runtime.store.describe()} already holds data ({', '.join(sorted(held))}): "
            "rollout ids repeat in every run, so a second run under this name would meet frozen rollouts and mix "
            "records. Choose another run id, or pass resume=True to go on with this run"
        )
