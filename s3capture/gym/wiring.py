"""What a launcher and a collector call: install the source, and refuse a run that already holds data.

The rule of this module: a run is a namespace that every worker must agree on, and ids repeat in every run. So the run
is checked once, before anything starts, and never invented here.
"""

from __future__ import annotations

from typing import Any, Unpack

from s3capture.endpoint import SettingsKwargs
from s3capture.gym.endpoints import GymTokenSource
from s3capture.gym.upstream import upstream
from s3capture.preflight import check_run
from s3capture.settings import Settings


def install_source(**settings: Unpack[SettingsKwargs]) -> GymTokenSource:
    """Build a ``GymTokenSource`` and install it as nemo_gym's token source of this process.

    nemo_gym has no configuration key for the source: call this once in the process that collects rollouts. Gym does not
    close an installed source; close the returned one when the run is over.
    """
    source = GymTokenSource(**settings)
    upstream().install_token_source(source)
    return source


def preflight(*, resume: bool = False, **settings: Unpack[SettingsKwargs]) -> dict[str, Any]:
    """Check bucket and run before anything starts; return the settings as the flat mapping that goes into the YAML.

    Creates nothing but a scratch key. Raise ``RunInUseError`` when the run holds data and ``resume`` is False,
    ``UnsupportedStoreError`` when the bucket does not honour create-if-absent, other ``StoreError`` kinds when it
    cannot be used.
    """
    upstream()
    check_run(Settings.of(**settings), resume=resume)
    return dict(settings)
