"""Random lives of ledgers: recorded, recorded again, failed, read and resolved, in any order.

The rule of this module: as in ``capturing``; in place of records there are token-free rows.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from typing import Any

from nemo_gym.token_id_capture.fingerprint import FINGERPRINT_VERSION
from nemo_gym.token_id_capture.lineage import RolloutLineage
from nemo_gym.token_id_capture.staging.records import CallRecord, CaptureLedgerCommit

from gym_e2e.capturing import IDS_THAT_DIFFER, INVALID_IDS
from gym_e2e.pairs import Answer, Differences, Items, Sides, Speech, answer, resolution

WEIGHTS = {"record": 8, "resolve": 7, "again": 3, "conflict": 2, "fail": 2, "read": 3, "stray": 0.7}
REASONS = ["unresolved_parent", "worker_capture_failed"]


@dataclass
class Book:
    """What the test knows of one ledger; ``over`` once the sides may rightly differ from there on."""

    rollout: str
    commits: dict[str, CaptureLedgerCommit] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    over: bool = False


class Ledgers:
    """Plays ledgers on both sides."""

    def __init__(self, sides: Sides, found: Differences, rng: random.Random) -> None:
        self.sides, self.found, self.rng = sides, found, rng
        self.speech = Speech(rng)
        self.operations = 0

    async def sequence(self, name: str) -> None:
        """One sequence over two ledgers."""
        books = [Book(f"{name}-ledger-{number}") for number in range(2)]
        for _ in range(self.rng.randint(5, 18)):
            book = self.rng.choice(books)
            if book.over:
                continue
            (chosen,) = self.rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
            self.operations += 1
            await getattr(self, f"_{chosen}")(book)
        for book in books:
            await self._read(book)

    async def _record(self, book: Book) -> None:
        request = self._request(book)
        theirs = await self._resolved(book, request)
        if theirs[0] != "ok":
            return
        failed = [call for call in book.failed if call not in book.commits]
        call = self.rng.choice(failed) if failed and self.rng.random() < 0.3 else f"{self.rng.getrandbits(128):032x}"
        commit = self._commit(book, call, request, theirs[1].match)
        theirs, ours = await self._both("record", commit)
        if call in book.failed:
            self.found.same("their row beside a failure", ("error", "conflict"), theirs)
            self.found.same("our row beside a failure", ("ok", None), ours)
            manifest = (await self.sides.ledger.manifest(book.rollout))["records"]
            self.found.same("the row beside a failure", True, call in {row["model_call_id"] for row in manifest})
            self.found.excused("failure-then-row")
            book.over = True
            return
        self.found.same("record", theirs, ours)
        book.commits[call] = commit

    async def _again(self, book: Book) -> None:
        if book.commits:
            self.found.same("record again", *await self._both("record", self.rng.choice(list(book.commits.values()))))

    async def _conflict(self, book: Book) -> None:
        if not book.commits:
            return
        commit = self.rng.choice(list(book.commits.values()))
        changes: dict[str, Any] = {
            "weight_version": commit.record.weight_version + 1,
            "staging_key": f"{commit.record.staging_key}/other",
            "response_id": "another",
            "chain_hash": _digest("another"),
            "cumulative_hash": _digest("another"),
            "extras_digest": _digest("another"),
            "digest": _digest("another"),
            "admitted_at": 1.5,
            "output_fingerprint": _digest("another"),
            "fingerprint_version": FINGERPRINT_VERSION + 1,
        }
        name = self.rng.choice([*changes, "request_items", "response_items", "staging_chain"])
        if name in changes:
            other = commit.model_copy(update={"record": commit.record.model_copy(update={name: changes[name]})})
        elif name == "staging_chain":
            other = commit.model_copy(update={name: (*commit.staging_chain, "another")})
        else:
            other = commit.model_copy(update={name: [*getattr(commit, name), {"role": "assistant", "content": "else"}]})
        self.found.same(f"record with another {name}", *await self._both("record", other))

    async def _fail(self, book: Book) -> None:
        call = self.rng.choice([*book.commits, *book.failed, f"{self.rng.getrandbits(128):032x}"])
        self.found.same("failure", *await self._both("record_failure", book.rollout, call, self.rng.choice(REASONS)))
        book.failed.append(call)

    async def _read(self, book: Book) -> None:
        if book.over:
            return
        self.found.same("has_rows", *await self._both("has_rows", book.rollout))
        theirs, ours = await self._both("manifest", book.rollout)
        self.found.same("manifest", _without_order(theirs), _without_order(ours))

    async def _resolve(self, book: Book) -> None:
        broken = self.rng.random() < 0.08
        await self._resolved(book, self.speech.unrepresentable() if broken else self._request(book))

    async def _stray(self, book: Book) -> None:
        del book
        differs = self.rng.random() < 0.4
        rollout = self.rng.choice(IDS_THAT_DIFFER if differs else INVALID_IDS)
        operation = self.rng.choice(["has_rows", "manifest", "record_failure"])
        given = (rollout, "c", "reason") if operation == "record_failure" else (rollout,)
        theirs, ours = await self._both(operation, *given)
        if differs:
            self.found.same(f"{operation} of {rollout[:9]!r}", ("error", "invalid id"), ours)
            self.found.excused("id-of-dots-or-length")
        else:
            self.found.same(f"{operation} of {rollout!r}", theirs, ours)

    # -- both sides -----------------------------------------------------------------------------------------

    async def _both(self, method: str, *given: Any) -> tuple[Answer, Answer]:
        theirs = await answer(lambda: getattr(self.sides.their_lineage, method)(*given))
        ours = await answer(lambda: getattr(self.sides.ledger, method)(*given))
        return theirs, ours

    async def _resolved(self, book: Book, items: Items) -> Answer:
        theirs, ours = await self._both("resolve", book.rollout, items)
        plain = resolution(theirs), resolution(ours)
        if plain[0] != plain[1]:
            self.found.same("resolve among rows", self._by_the_matcher(book, items), plain[1])
            self.found.excused("rows-by-the-matcher")
        else:
            self.found.same("resolve of rows", *plain)
        return theirs

    def _by_the_matcher(self, book: Book, items: Items) -> Answer:
        """The decision of Gym's matcher over the rows, as its in-memory store takes it."""
        lineage = RolloutLineage()
        for call, commit in book.commits.items():
            if commit.record.fingerprint_version == FINGERPRINT_VERSION:
                request, record = list(commit.request_items), commit.record
                lineage.record(
                    call,
                    [*request, *commit.response_items],
                    [],
                    record.cumulative_hash,
                    len(request),
                    parent_staging_chain=list(commit.staging_chain),
                    cum_len=record.cum_len,
                    chain_hash=record.chain_hash,
                )
        status, node, reason = lineage.resolve_node(items)
        if node is None:
            return "ok", (str(status), reason, None)
        return "ok", (str(status), reason, (node.call_id, (), node.digest, tuple(node.staging_chain), node.chain_hash))

    # -- what is drawn --------------------------------------------------------------------------------------

    def _request(self, book: Book) -> Items:
        kind = self.rng.random()
        if not book.commits or kind < 0.15:
            return [self.speech.user()]
        parent = self.rng.choice(list(book.commits.values()))
        history = [*parent.request_items, *parent.response_items]
        return [*(self.speech.rewritten(history) if kind < 0.27 else history), self.speech.user()]

    def _commit(self, book: Book, call: str, request: Items, parent: Any) -> CaptureLedgerCommit:
        before = 0 if parent is None else int(parent.prev_len)
        added = self.rng.randint(1, 4)
        # A few calls with the same tokens: candidates that may stand for one another.
        shared = _digest(f"{self.rng.randrange(3)}") if self.rng.random() < 0.5 else _digest(call)
        key = f"{book.rollout}/{call}"
        record = CallRecord(
            model_call_id=call,
            parent_call_id=None if parent is None else parent.model_call_id,
            prev_len=before,
            delta_len=added,
            cum_len=before + added,
            weight_version=self.rng.randrange(3),
            digest=_digest(f"d{call}"),
            extras_digest=_digest("extras"),
            staging_key=key,
            mode="text" if parent is None else "token_in",
            chain_hash=_digest(f"c{call}"),
            cumulative_hash=shared,
            response_id=f"r-{call}",
            admitted_at=self.rng.choice([None, 1_750_000_000.25]),
            fingerprint_version=self.rng.choice([FINGERPRINT_VERSION] * 8 + [0, FINGERPRINT_VERSION - 1]),
        )
        return CaptureLedgerCommit(
            rollout_id=book.rollout,
            record=record,
            staging_chain=(*(() if parent is None else parent.staging_chain), key),
            request_items=request,
            response_items=self.speech.output(),
        )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _without_order(found: Answer) -> Answer:
    if found[0] != "ok":
        return found
    return "ok", {**found[1], **{name: sorted(found[1][name], key=str) for name in ("records", "failures")}}
