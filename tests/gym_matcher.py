"""nemo_gym's own matcher behind our seam, and its public conformance kit run over our endpoints.

The rule of this module: it is the only one of the tests that imports nemo_gym, so it runs in a process of its own
(``python gym_matcher.py '<json>'``) and never in that of the tests. It writes the names of the checks that passed, as
JSON, to its standard output.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Sequence
from typing import Any

from nemo_gym.token_id_capture.conformance import run_conformance
from nemo_gym.token_id_capture.fingerprint import assistant_fingerprint
from nemo_gym.token_id_capture.lineage import RolloutLineage, stamp_continuation

from s3capture import S3LineageResolver, S3TokenSink, S3TokenSource
from s3capture.errors import UnrepresentableHistoryError
from s3capture.matching import ParentDecision
from s3capture.store.memory import MemoryStore


class GymMatcher:
    """A ``LineageMatcher`` that leaves every hash and every decision to nemo_gym."""

    def fingerprint(self, request_items: Sequence[dict[str, Any]]) -> str:
        try:
            return str(assistant_fingerprint(list(request_items)))
        except ValueError as error:
            raise UnrepresentableHistoryError(str(error)) from error

    def decide(self, candidates: Sequence[Any], request_items: Sequence[dict[str, Any]]) -> ParentDecision:
        lineage = RolloutLineage()
        for candidate in candidates:
            lineage.add_entry(candidate, store_tokens=False)
        _, node, reason = lineage.resolve_node(list(request_items))
        return ParentDecision(None if node is None else node.call_id, reason)

    def stamp_continuation(self, entry: Any, request_items: Sequence[dict[str, Any]]) -> Any:
        return stamp_continuation(entry, list(request_items))


def run_kit(settings: dict[str, Any], *, memory: bool, strangers: bool) -> list[str]:
    """Run the kit and return what passed; with ``strangers`` no two endpoints share a runtime."""
    shared: dict[str, Any] = {"store": MemoryStore()} if memory else {}
    number = itertools.count()

    def given() -> dict[str, Any]:
        return {**settings, **shared, "op_timeout_s": 30.0 + (next(number) if strangers else 0)}

    return asyncio.run(
        run_conformance(
            lambda: S3TokenSink(**given()),
            lambda: S3TokenSource(**given()),
            lambda: S3LineageResolver(matcher=GymMatcher(), **given()),
        )
    )


if __name__ == "__main__":
    sys.stdout.write(json.dumps(run_kit(**json.loads(sys.argv[1]))))
