"""The conformance kits over the endpoints of ``s3capture.gym``, with nemo_gym's own records and stamps.

The rule of this module: it imports nemo_gym, so it runs in a process of its own (settings as JSON on its input, the
names of the checks that passed as JSON on its output) and never in that of the tests.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import Any

from nemo_gym.token_id_capture.fingerprint import FINGERPRINT_VERSION
from nemo_gym.token_id_capture.lineage import stamp_continuation
from nemo_gym.token_id_capture.records import TokenEntry
from nemo_gym.token_id_capture.staging.records import CaptureLedgerCommit

from s3capture.gym import GymCaptureLedger, GymLineageResolver, GymTokenSink, GymTokenSource
from s3capture.store.memory import MemoryStore
from s3capture.testing import run_conformance, run_ledger_conformance


async def run_kits(settings: dict[str, Any]) -> dict[str, list[str]]:
    """Run both kits on one store in memory."""
    given = {**settings, "store": MemoryStore()}
    passed = await run_conformance(
        lambda: GymTokenSink(**given),
        lambda: GymTokenSource(**given),
        lambda: GymLineageResolver(**given),
        entry_type=TokenEntry,
        stamp=stamp_continuation,
    )
    ledger = await run_ledger_conformance(
        lambda: GymCaptureLedger(**given), commit_type=CaptureLedgerCommit, fingerprint_version=FINGERPRINT_VERSION
    )
    return {"transport": passed, "ledger": ledger}


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    sys.stdout.write(json.dumps(asyncio.run(run_kits(json.load(sys.stdin)))))
