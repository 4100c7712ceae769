"""nemo_gym's own matcher behind our seam: its hashing, its index, its verdict.

The rule of this module: nothing is hashed here. Agreement with Gym hash for hash is the wire contract, so its own
functions fingerprint requests, stamp entries and decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from s3capture.errors import UnrepresentableHistoryError
from s3capture.gym.upstream import upstream
from s3capture.matching import ParentDecision


class GymMatcher:
    """A ``LineageMatcher`` over the installed nemo_gym's ``RolloutLineage``. Holds no state."""

    def fingerprint(self, request_items: Sequence[dict[str, Any]]) -> str:
        """Gym's ``assistant_fingerprint`` of the request; "" means ROOT."""
        try:
            return str(upstream().assistant_fingerprint(list(request_items)))
        except ValueError as error:
            raise UnrepresentableHistoryError(f"nemo_gym cannot fingerprint the request: {error}") from error

    def decide(self, candidates: Sequence[Any], request_items: Sequence[dict[str, Any]]) -> ParentDecision:
        """Index the candidates without their tokens and let Gym's matcher choose."""
        lineage = upstream().rollout_lineage()
        try:
            for candidate in candidates:
                lineage.add_entry(candidate, store_tokens=False)
            _, node, reason = lineage.resolve_node(list(request_items))
        except ValueError as error:
            raise UnrepresentableHistoryError(f"nemo_gym cannot match the request: {error}") from error
        return ParentDecision(None if node is None else str(node.call_id), str(reason))

    def stamp_continuation(self, entry: Any, request_items: Sequence[dict[str, Any]]) -> Any:
        """Gym's ``stamp_continuation``."""
        try:
            upstream().stamp_continuation(entry, list(request_items))
        except ValueError as error:
            raise UnrepresentableHistoryError(f"nemo_gym cannot fingerprint the request: {error}") from error
        return entry


class GymLedgerMatcher(GymMatcher):
    """``GymMatcher`` for ledger rows, which Gym finds only when the record names the version of fingerprints in use.

    A record that names another version, or none, was made by a worker whose fingerprints may mean something else: Gym
    never resolves it as a parent, so neither does this.
    """

    def decide(self, candidates: Sequence[Any], request_items: Sequence[dict[str, Any]]) -> ParentDecision:
        """See ``GymMatcher.decide``."""
        known = [each for each in candidates if each.recorded_version == each.fingerprint_version]
        return super().decide(known, request_items)
