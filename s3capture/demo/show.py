"""How a demo tells a person what is going on; the command line implements it.

The rule of this module: the demo says what happened and knows nothing of terminals.
"""

from __future__ import annotations

from typing import Protocol

from s3capture.demo.place import Place
from s3capture.demo.script import Script


class Show(Protocol):
    """Receives the progress of a demo, on one thread."""

    def opening(self, script: Script, place: Place, workers: int) -> None:
        """What will be played, where, and by how many workers; they are starting now."""
        ...

    def begin(self, calls: int, rollouts: int) -> None:
        """Playing starts: so many calls and rollouts are ahead."""
        ...

    def call_done(self) -> None:
        """One more call was played, whatever became of it."""
        ...

    def rollout_done(self) -> None:
        """One more rollout was frozen and checked."""
        ...

    def event(self, text: str) -> None:
        """Something worth a line happened."""
        ...
