"""How far a command is, shown on stderr.

The rule of this module: only a terminal is shown anything, and nothing of it is left there in the end.
"""

from __future__ import annotations

from typing import Self

from s3capture.cli.common import printable


class Bars:
    """Progress bars, one for each phase; a context manager. ``quiet`` shows none.

    ``what`` begins the first phase, of ``total`` steps where that is known; it may be begun later with ``phase``.
    """

    def __init__(self, what: str = "", total: int | None = None, *, quiet: bool = False) -> None:
        from rich.console import Console  # noqa: PLC0415 - see common.out_table
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

        console = Console(stderr=True, highlight=False)
        columns = (
            TextColumn("{task.description:<18}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)
        self._task = self._progress.add_task(printable(what), total=total) if what else None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._progress.stop()

    def phase(self, what: str, total: int | None = None) -> None:
        """Begin a new bar below the others."""
        self._task = self._progress.add_task(printable(what), total=total)

    def advance(self, steps: int = 1) -> None:
        """Move the newest bar."""
        if self._task is not None:
            self._progress.advance(self._task, steps)

    def show(self, what: str, done: int, total: int) -> None:
        """Set the newest bar to ``done`` of ``total``, and rename it."""
        if self._task is not None:
            self._progress.update(self._task, description=printable(what), completed=done, total=total)
