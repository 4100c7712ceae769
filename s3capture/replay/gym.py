"""Trainable responses, rebuilt by the installed nemo_gym's own builder from a replayed rollout.

The rule of this module: it builds nothing itself. Gym's consumer is handed a source that answers with the replayed
rollout in Gym's own types, deltas as they are stored, so that what comes out is what Gym makes of its own store.
"""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

from s3capture.gym.upstream import GymNotFoundError, upstream
from s3capture.replay.model import ReplayedRollout


class GymBuilder:
    """Builds responses with the installed nemo_gym. Raise ``GymNotFoundError`` when there is none that can."""

    def __init__(self, *, model: str = "") -> None:
        self._gym, self._model = upstream(), model
        try:
            self._build = importlib.import_module(f"{self._gym.package}.consumer").trajectories_from_source
        except (ImportError, AttributeError) as error:
            raise GymNotFoundError(
                f"the installed nemo_gym has no {self._gym.package}.consumer.trajectories_from_source, which rebuilds "
                f"responses ({error}); install nemo-gym 0.7.0"
            ) from error

    def build(self, rollout: ReplayedRollout) -> dict[str, Any]:
        """Return what Gym's ``trajectories_from_source`` returns; an incomplete rollout has ``mask_sample`` True."""
        built: dict[str, Any] = asyncio.run(self._build(rollout.rollout_id, _Source(self, rollout), model=self._model))
        return built

    def snapshot(self, rollout: ReplayedRollout) -> Any:
        """Return the rollout as Gym's own ``TokenCaptureSnapshot``."""
        return self._gym.snapshot(
            rollout_id=rollout.rollout_id,
            entries=tuple(
                self._gym.token_entry.model_validate(call.stored_entry().model_dump(mode="python"))
                for call in rollout.calls
            ),
            incomplete=rollout.incomplete,
            snapshot_id=rollout.snapshot_id or "",
            version=rollout.version or 0,
        )


class _Source:
    """A token source that knows one rollout, and freezes nothing."""

    def __init__(self, builder: GymBuilder, rollout: ReplayedRollout) -> None:
        self._builder, self._rollout = builder, rollout

    async def freeze(self, rollout_id: str) -> Any:
        del rollout_id
        return self._builder.snapshot(self._rollout)
