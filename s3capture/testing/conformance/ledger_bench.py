"""What a check of a ledger works with: fresh ledgers, a rollout id of its own, and commits that any ledger must take.

The rule of this module: as in ``bench``: commits are built from the contract's fields alone, and what every check may
take for granted of a manifest is judged here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from s3capture.testing.conformance.bench import ANSWER, QUESTION, Factory, Items, answer, continuation
from s3capture.testing.conformance.verdicts import Closing, ErrorKinds, expect, refusal_of, refusals_of_all, said


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class LedgerMakers:
    """How to make what is under test, and what it speaks."""

    ledger: Factory
    kinds: ErrorKinds
    commit_type: Any
    fingerprint_version: int


class LedgerCase:
    """One check's own rollout, commits and instances."""

    def __init__(self, makers: LedgerMakers, rollout: str, closing: Closing) -> None:
        self._makers, self._closing = makers, closing
        self.kinds = makers.kinds
        self.rollout = rollout

    def ledger(self) -> Any:
        """A fresh ledger."""
        return self._closing.keep(self._makers.ledger())

    def another(self, suffix: object) -> LedgerCase:
        """A case like this one on a rollout of its own."""
        return LedgerCase(self._makers, f"{self.rollout}-{suffix}", self._closing)

    def commit(
        self,
        call: str = "call-1",
        *,
        request: Items = QUESTION,
        text: str = ANSWER,
        parent: str | None = None,
        prev_len: int = 0,
        chain: Sequence[str] = (),
        rollout: str | None = None,
        **more: Any,
    ) -> Any:
        """A valid commit; ``more`` are fields of its record."""
        record = {
            "model_call_id": call,
            "parent_call_id": parent,
            "prev_len": prev_len,
            "delta_len": 5,
            "cum_len": prev_len + 5,
            "weight_version": 3,
            "digest": digest_of(f"digest of {call}"),
            "extras_digest": digest_of("extras"),
            "staging_key": f"staging/{call}",
            "mode": "text" if parent is None else "token_in",
            "chain_hash": digest_of(f"chain of {call}"),
            "cumulative_hash": digest_of(f"cumulative of {call}"),
            "response_id": f"response-{call}",
            "admitted_at": 1_700_000_000.5,
            "fingerprint_version": self._makers.fingerprint_version,
            **more,
        }
        return self._makers.commit_type.model_validate(
            {
                "rollout_id": self.rollout if rollout is None else rollout,
                "record": record,
                "staging_chain": [*chain, record["staging_key"]],
                "request_items": list(request),
                "response_items": [answer(text)],
            }
        )

    async def rows(self) -> dict[str, Any]:
        """The committed rows of a fresh manifest by call; each stands once."""
        manifest = await self.ledger().manifest(self.rollout)
        expect(manifest["rollout_id"] == self.rollout, f"the manifest names rollout {manifest['rollout_id']!r}")
        calls = [row["model_call_id"] for row in manifest["records"]]
        expect(len(set(calls)) == len(calls), f"the manifest holds a call twice: {sorted(calls)}")
        return {row["model_call_id"]: row for row in manifest["records"]}

    async def failures(self) -> list[tuple[str, str]]:
        """The failures of a fresh manifest, sorted."""
        manifest = await self.ledger().manifest(self.rollout)
        return sorted((failure["model_call_id"], failure["reason"]) for failure in manifest["failures"])

    async def expect_retired(self, ledger: Any) -> None:
        """Reading raises the ledger's retired error, writing is discarded without one, nothing resolves."""
        for what, action in (("manifest", ledger.manifest), ("has_rows", ledger.has_rows)):
            error = await refusal_of(action(self.rollout))
            expect(
                error is not None and self.kinds.is_ledger_retired(error), f"{what} of a retired ledger: {said(error)}"
            )
        late = [
            ("record", ledger.record(self.commit("late", text="Late."))),
            ("record of the retired row", ledger.record(self.commit())),
            ("record_failure", ledger.record_failure(self.rollout, "late", "worker_capture_failed")),
        ]
        for what, error in await refusals_of_all(late):
            expect(error is None, f"{what} behind the retirement is to be discarded with a warning, but {said(error)}")
        for text in ("Late.", ANSWER):
            found = await ledger.resolve(self.rollout, continuation(text=text))
            expect(found.status == "unresolved", f"a row of a retired ledger resolved as {found.status}")
        error = await refusal_of(self.ledger().manifest(self.rollout))
        expect(error is not None and self.kinds.is_ledger_retired(error), "a late row started a new ledger")
