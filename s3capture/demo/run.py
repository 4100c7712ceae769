"""A whole demo, from the options of a person to the outcome, and its end by Ctrl-C or SIGTERM.

The rule of this module: nothing is started before the options and the recording were found good, and a signal at any
moment ends what was started, in order: the play, the workers, the server, the scratch directory.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from s3capture.demo.conductor import Conductor
from s3capture.demo.outcome import Outcome
from s3capture.demo.place import Place, open_place
from s3capture.demo.recording import read_recording
from s3capture.demo.script import Script
from s3capture.demo.show import Show
from s3capture.demo.workload import DEFAULT_SEED, built_in
from s3capture.errors import SettingsError

MAX_WORKERS = 64
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Options:
    """What a person may choose. Without ``url`` an embedded server is started; ``rollouts`` cuts the workload short."""

    recording: Path | None = None
    url: str | None = None
    run: str | None = None
    endpoint_url: str | None = None
    region: str | None = None
    workers: int = 4
    seed: int = DEFAULT_SEED
    rollouts: int | None = None
    keep: bool = False


class Stopped(BaseException):
    """A signal asked us to end; not an Exception, so that nothing on the way takes it for a failure."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


def run_demo(options: Options, show: Show) -> Outcome:
    """Play a demo and return what came of it; call it from the main thread.

    Raise ``RecordingError``, ``SettingsError``, ``LocalServerError`` or a ``StoreError`` when it cannot be played,
    ``WorkerError`` when a worker was lost, ``Stopped`` after a signal. Nothing that was started is left then.
    """
    if not 1 <= options.workers <= MAX_WORKERS:
        raise SettingsError(f"--workers {options.workers} is not between 1 and {MAX_WORKERS}")
    if options.recording is not None and options.rollouts is not None:
        raise SettingsError("--rollouts cuts the built-in workload; a recording is played whole, so leave it out")
    with _stopped_by_signals() as on_signals:
        script = _script(options)
        if options.url is None and options.endpoint_url is None:
            show.event("starting an embedded S3 server")
        with open_place(
            url=options.url, run=options.run, endpoint_url=options.endpoint_url, region=options.region
        ) as place:
            show.opening(script, place, options.workers)
            return _play(script, place, options, show, on_signals)


def _script(options: Options) -> Script:
    if options.recording is not None:
        return read_recording(options.recording)
    return built_in(options.seed, rollouts=options.rollouts, outage=options.url is None)


def _play(script: Script, place: Place, options: Options, show: Show, on_signals: _OnSignals) -> Outcome:
    caught: list[int] = []

    async def main() -> Outcome:
        # On the event loop a signal must not raise wherever it strikes: it cancels, and cancelling cleans up.
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop(number: int) -> None:
            if not caught:
                show.event("stopping")
                task.cancel()
            caught.append(number)

        for number in _SIGNALS:
            loop.add_signal_handler(number, stop, number)
        try:
            conductor = Conductor(
                script, place, workers=options.workers, seed=options.seed, keep=options.keep, show=show
            )
            return await conductor.run()
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
            on_signals.set(ignore=bool(caught))

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        if not caught:
            raise
        raise Stopped(caught[0]) from None


class _OnSignals:
    """What signals do outside of the event loop: raise ``Stopped`` once, and nothing afterwards."""

    def set(self, *, ignore: bool) -> None:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN if ignore else self._stop)

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        self.set(ignore=True)  # a second one must not disturb the cleaning up
        raise Stopped(number)


@contextmanager
def _stopped_by_signals() -> Iterator[_OnSignals]:
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    on_signals = _OnSignals()
    on_signals.set(ignore=False)
    try:
        yield on_signals
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
