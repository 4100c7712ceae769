"""The audit of a run: each thing that can be wrong is found where it is, and nothing is found that is not."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from audited import HOSTILE, KEYS, PACK, PREFIX, RUN, URL, Maker, made, reading
from captures import entry
from test_cli import Ran, here

from s3capture import S3TokenSource, codec
from s3capture.audit import MEANING, SEVERITY, Finding, Kind, RunAudit, Severity
from s3capture.audit.differing import MOST, differences
from s3capture.audit.rollout import Budget
from s3capture.effects import ObjectInfo
from s3capture.local import EmbeddedServer
from s3capture.reader import Reader
from s3capture.spill import Spill, Target
from s3capture.store.memory import MemoryStore
from s3capture.stored import Selection, StoredRun

FAILING = frozenset(kind for kind in Kind if SEVERITY[kind] is Severity.FAIL)
TARGET = Target(None, "bucket", PREFIX, RUN)


@pytest.fixture(scope="module")
def spill(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the marks of the bad run lie."""
    return tmp_path_factory.mktemp("bad")


@pytest.fixture(scope="module")
def bad(spill: Path) -> MemoryStore:
    """The run with one of everything; tests only read it."""
    return made(spill, bad=True)


@pytest.fixture(scope="module")
def found(bad: MemoryStore, spill: Path) -> list[Finding]:
    """Everything that an audit of the bad run finds."""
    return audit(bad, spill=Spill(spill / "spill"), target=TARGET)


def audit(store: Any, **more: Any) -> list[Finding]:
    """All findings of a run, those about the run included."""
    with reading(store) as reader:
        run = RunAudit(reader, KEYS, **more)
        rows = [finding for one in run.rollouts() for finding in one.findings]
        return [*rows, *run.findings]


def of(found: list[Finding], rollout: str | None, kind: Kind) -> list[Finding]:
    return [finding for finding in found if finding.rollout == rollout and finding.kind is kind]


def only(found: list[Finding], rollout: str | None, kind: Kind) -> Finding:
    (finding,) = of(found, rollout, kind)
    return finding


# -- what is found, and what is not ---------------------------------------------------------------------------

WRONG = Counter(
    {
        ("sealed", Kind.SEALED_CALL): 1,
        ("conflict", Kind.CONFLICT): 1,
        ("marked", Kind.MARK): 1,
        ("changed", Kind.MARK): 2,
        ("spilled", Kind.SPILLED_MARK): 1,
        ("damaged", Kind.DAMAGED_OBJECT): 2,
        ("damaged", Kind.BROKEN_CHAIN): 1,
        ("misplaced", Kind.DAMAGED_OBJECT): 1,
        ("broken-record", Kind.BROKEN_RECORD): 1,
        ("broken-chain", Kind.BROKEN_CHAIN): 2,
        ("broken-chain", Kind.MISSING_PARENT): 1,
        ("wrong-tokens", Kind.WRONG_TOKENS): 1,
        ("markers", Kind.MISSING_MARKER): 1,
        ("markers", Kind.WRONG_MARKER): 1,
        ("markers", Kind.STRAY_MARKER): 1,
        ("breach", Kind.BREACH): 1,
        ("both", Kind.LEDGER_FAILURE): 1,
        ("both", Kind.LEDGER_UNSETTLED): 1,
        ("both", Kind.ORPHAN_LEDGER): 1,
        ("both", Kind.ORPHAN_CAPTURE): 1,
        ("ledger-only", Kind.ORPHAN_LEDGER): 1,
        ("late", Kind.FOREIGN_KEY): 1,
        (None, Kind.FOREIGN_KEY): 2,
        ("gone", Kind.ORPHAN_LINEAGE): 1,
        ("residue", Kind.LOST_EVIDENCE): 1,
    }
)
"""What fails, by rollout and kind; that each other rollout has no ledger, while ``both`` has, comes on top."""

NOTED = Counter(
    {
        ("refused", Kind.REFUSAL): 1,
        ("late", Kind.LATE): 2,
        ("open", Kind.OPEN_CALL): 1,
        ("broken-chain", Kind.OPEN_CALL): 1,
        ("freezing", Kind.UNDECIDED): 1,
        ("half-dropped", Kind.UNDECIDED): 1,
        ("changed", Kind.REFUSED_DROP): 1,
        ("breach", Kind.REFUSED_DROP): 1,
        ("kept-1", Kind.RETAINED): 1,
        ("sealed", Kind.RETAINED): 1,
        ("residue", Kind.RESIDUE): 1,
        ("ledger-only", Kind.LEDGER_OPEN): 1,
        ("ledger-only", Kind.LEDGER_OPEN_CALL): 1,
        ("spilled", Kind.SPILLED_ELSEWHERE): 1,
        (None, Kind.PROBE_LEFTOVER): 1,
        (None, Kind.ORPHAN_PACK): 1,
    }
)
"""What is noted, by rollout and kind, beside that a rollout is open or frozen."""


def test_everything_that_is_wrong_is_found_and_nothing_else(found: list[Finding]) -> None:
    """Each fault of the bad run is found in its rollout, as often as it is there, and no other finding fails."""
    about_halves = {finding.rollout for finding in of_kind(found, Kind.ORPHAN_CAPTURE)} - {"both"}
    fails = Counter((finding.rollout, finding.kind) for finding in found if finding.fails)
    assert fails - Counter({(name, Kind.ORPHAN_CAPTURE): 1 for name in about_halves}) == WRONG
    assert len(about_halves) == 22


def of_kind(found: list[Finding], kind: Kind) -> list[Finding]:
    return [finding for finding in found if finding.kind is kind]


def test_notes_say_how_far_each_rollout_has_come(found: list[Finding]) -> None:
    """Open calls, undecided and refused drops, late objects, kept records and residue are noted where they are."""
    notes = Counter((finding.rollout, finding.kind) for finding in found if not finding.fails)
    standing = Counter({key: count for key, count in notes.items() if key[1] in (Kind.OPEN, Kind.UNDELIVERED)})
    assert notes - standing == NOTED
    assert {name for name, kind in standing if kind is Kind.UNDELIVERED} == {
        *("conflict", "marked", "half-dropped", "changed", "late", "both", "frozen-1"),
    }


def test_a_healthy_run_has_no_finding_that_fails(tmp_path: Path) -> None:
    """Open, frozen, dropped, kept and retired rollouts are noted as what they are, and nothing is wrong with them."""
    found = audit(made(tmp_path, bad=False))
    assert {(finding.rollout, finding.kind) for finding in found} == {
        ("open-1", Kind.OPEN),
        ("frozen-1", Kind.UNDELIVERED),
        ("kept-1", Kind.RETAINED),
    }


def test_every_kind_has_a_meaning_and_is_told_on_the_page_of_the_docs() -> None:
    """No kind is left without words; docs/audit.md lists each with its severity."""
    assert set(MEANING) == set(Kind)
    rows = [line.split("|") for line in (Path(__file__).parent.parent / "docs/audit.md").read_text().splitlines()]
    told = {row[1].strip(" `"): row[2].strip() for row in rows if len(row) > 3 and row[1].strip().startswith("`")}
    assert {kind: told.get(kind) for kind in Kind} == {kind: str(SEVERITY[kind]) for kind in Kind}


def test_keys_beside_the_folders_of_a_run_are_foreign(tmp_path: Path) -> None:
    """A key directly below the run, its attempts, its lineage or its ledger, in no folder, is told like any other."""
    store = made(tmp_path, bad=False)
    places = {f"{base}notes.txt" for base in (KEYS.root, KEYS.attempts, KEYS.lineage, KEYS.ledgers)}
    for key in places:
        store.create(key, b"not ours")
    assert {finding.key for finding in audit(store) if finding.kind is Kind.FOREIGN_KEY} == places


def test_an_audit_changes_nothing(tmp_path: Path) -> None:
    """The bucket after an audit is the bucket before it."""
    store = made(tmp_path, bad=True)
    before = {row.key: store.get(row.key) for row in store.list("")}
    audit(store)
    assert {row.key: store.get(row.key) for row in store.list("")} == before


# -- who, when and why ----------------------------------------------------------------------------------------


def test_a_dangling_call_says_who_began_it_and_who_sealed_it(found: list[Finding]) -> None:
    """A sealed call names process and time of its begin and of its seal; an open one those of its begin."""
    sealed = only(found, "sealed", Kind.SEALED_CALL)
    assert sealed.call == "c4"
    assert sealed.by == sealed.details["begun_by"] == sealed.details["sealed_by"]
    assert 0 < sealed.details["begun_at"] <= sealed.details["sealed_at"]
    waiting = only(found, "open", Kind.OPEN_CALL)
    assert waiting.call == HOSTILE
    assert waiting.by == sealed.by
    assert waiting.at


def test_a_conflict_shows_both_digests_and_the_fields_that_differ(found: list[Finding]) -> None:
    """Stored and refused payload are named by digest, and compared field by field without any array."""
    conflict = only(found, "conflict", Kind.CONFLICT)
    stored, refused = conflict.details["stored"], conflict.details["refused"]
    assert len({stored["digest"], refused["digest"]}) == 2
    assert stored["digest"] in conflict.sentence
    assert refused["digest"] in conflict.sentence
    rows = {row["path"]: (row["stored"], row["refused"]) for row in conflict.details["differences"]}
    assert rows["model"] == ('""', '"other"')
    assert rows["generation_token_ids"] == ("2 values; [1] is 5", "2 values; [1] is 6")
    assert rows["output_items[0].content[0].text"] == ('"It is sunny."', '"It pours."')
    assert "prompt_token_ids" not in rows


def test_a_mark_says_who_made_it_why_and_for_which_call(found: list[Finding]) -> None:
    """The mark of a call with a hostile name is told as it is."""
    mark = only(found, "marked", Kind.MARK)
    assert mark.call == HOSTILE
    assert mark.details["in_snapshot"] is True
    assert {m.details["reason"] for m in of(found, "changed", Kind.MARK)} == {"a late loss", "marked by the caller"}


def test_a_refused_drop_says_what_had_changed_since(found: list[Finding]) -> None:
    """The marks that the dropper did not know of are told; without a reason in the bucket, that is said."""
    refused = only(found, "changed", Kind.REFUSED_DROP)
    assert refused.details["version"] == 2
    assert refused.by == "ghost:13"
    since = [(row["what"], row["by"]) for row in refused.details["since"]]
    assert since[0] == ("mark", "ghost:13")
    assert "a late loss" in refused.sentence
    assert "no longer there" in only(found, "breach", Kind.REFUSED_DROP).sentence


def test_kept_records_are_told_from_leftovers(found: list[Finding]) -> None:
    """A whole snapshot behind a drop was kept; a part of one was left behind by a sweep."""
    assert only(found, "kept-1", Kind.RETAINED).details["outcomes"] == 3
    residue = only(found, "residue", Kind.RESIDUE)
    assert (residue.details["outcomes"], residue.details["intents"]) == (1, 1)
    lost = only(found, "residue", Kind.LOST_EVIDENCE)
    assert lost.details == {"outcomes": 2, "conflicts": 0, "marks": 0, "since_freeze": 0}
    assert "2 outcomes of its snapshot were deleted" in lost.sentence


def test_a_damaged_object_is_told_by_key_whatever_it_is(found: list[Finding]) -> None:
    """An outcome with a flipped bit, an intent without a frame and an intent of another call are told by key."""
    keys = KEYS.rollout("damaged")
    assert {finding.key for finding in of(found, "damaged", Kind.DAMAGED_OBJECT)} == {
        keys.call("c2"),
        keys.intent("c1"),
    }
    moved = only(found, "misplaced", Kind.DAMAGED_OBJECT)
    assert moved.key == KEYS.rollout("misplaced").intent("c3")
    assert "'c1'" in moved.sentence


@pytest.mark.parametrize("place", ["mark", "conflict", "frozen", "closing", "retiring-2", "drop-2"])
def test_every_kind_of_object_is_checked_again(tmp_path: Path, place: str) -> None:
    """A mark, a losing payload, or any fence that was changed on the disk is a damaged object."""
    store = made(tmp_path, bad=True)
    rollout = "conflict" if place == "conflict" else "changed"
    base = KEYS.rollout(rollout).base
    key = next(row.key for row in store.list(base) if row.key[len(base) :].startswith((place, f"fence/{place}")))
    body = store.get(key) or b""
    store.overwrite(key, body[:-1] + bytes([body[-1] ^ 1]))
    assert key in {finding.key for finding in of(audit(store), rollout, Kind.DAMAGED_OBJECT)}


@pytest.mark.parametrize("place", ["intent/c2", "call/c2", "fence/frozen", "fence/closing"])
@pytest.mark.parametrize("payload", [b"no JSON", b"[" * 100_000, b"[]", b"{}"])
def test_an_intact_object_without_sense_is_told(tmp_path: Path, place: str, payload: bytes) -> None:
    """An object whose digest holds and whose payload is no JSON, or not the fields that are due, ends no audit."""
    store = made(tmp_path, bad=False)
    key = f"{KEYS.rollout('frozen-1').base}{place}"
    header = dict(codec.decode(key, store.get(key) or b"").header)
    kind = header.pop("kind")
    del header["s3capture"], header["sha256"]
    digest = hashlib.sha256(payload).hexdigest()
    store.overwrite(key, codec.encode(kind, header, codec.Payload(payload, digest)))
    found = [finding for finding in audit(store) if finding.rollout == "frozen-1" and finding.fails]
    lenient = payload == b"{}" and place in ("intent/c2", "fence/closing")
    assert (key in {finding.key for finding in found}) is not lenient


def test_a_broken_chain_names_the_call_that_is_missing(found: list[Finding]) -> None:
    """Both deltas behind the deleted root are told, each with the call at which its chain ends."""
    broken = {finding.call: finding.sentence for finding in of(found, "broken-chain", Kind.BROKEN_CHAIN)}
    assert set(broken) == {"c2", "c3"}
    assert all("'c1'" in sentence for sentence in broken.values())
    assert only(found, "broken-chain", Kind.MISSING_PARENT).call == "c4"


def rewritten(store: MemoryStore, rollout: str, call: str, **fields: Any) -> None:
    """Give the stored record of a call other fields; digest and lineage marker fit what is then stored."""
    keys = KEYS.rollout(rollout)
    before = codec.decode("key", store.get(keys.call(call)) or b"")
    payload = codec.canonical({**before.value(), **fields})
    header = {name: before.header[name] for name in ("run", "rollout", "call", "fingerprint", "by")}
    store.overwrite(keys.call(call), codec.encode("entry", {**header, "identity": payload.digest}, payload))
    store.overwrite(keys.lineage_call(header["fingerprint"], call), payload.digest.encode())


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"parent_call_id": "c3"}, Kind.BROKEN_CHAIN, "in a circle"),
        ({"cum_len": 9}, Kind.WRONG_TOKENS, "its record says 9"),
        ({"digest": "0" * 64}, Kind.WRONG_TOKENS, "0" * 64),
        ({"digest": None}, Kind.BROKEN_CHAIN, "no digest"),
        ({"prompt_token_ids": [2**70]}, Kind.BROKEN_CHAIN, "no digest covers"),
        ({"generation_token_ids": [7, 7]}, Kind.BROKEN_RECORD, "generation_log_probs"),
        ({"prompt_token_ids": ["9"]}, Kind.BROKEN_RECORD, "prompt_token_ids"),
    ],
)
def test_a_delta_is_rebuilt_and_not_believed(tmp_path: Path, fields: dict[str, Any], kind: Kind, words: str) -> None:
    """A circle, a wrong length or digest, a missing one, and a record beyond the contract are told of the delta."""
    store = made(tmp_path, bad=False)
    rewritten(store, "frozen-1", "c2", **fields)
    told = [finding for finding in audit(store) if finding.call == "c2" and finding.fails]
    assert kind in {finding.kind for finding in told}
    assert any(words in finding.sentence for finding in told)


def test_a_branch_is_rebuilt_from_its_own_parent(tmp_path: Path) -> None:
    """Deltas that branch are each verified along their own chain, in whatever order they are stored."""
    from captures import answered, continued  # noqa: PLC0415

    store = MemoryStore()

    async def fill() -> None:
        make = Maker(store, tmp_path)
        first = (await make.chain("r"))[0]
        for call, token in (("a", 70), ("z", 80), ("m", 90)):
            await make.sink.put(
                answered(call, continued(), call, rollout="r", parent=first, before=[1, 2, 3, 4, 5], prompt=[token])
            )
        await make.close()

    asyncio.run(fill())
    assert {finding.kind for finding in audit(store)} == {Kind.OPEN}
    rewritten(store, "r", "m", prompt_token_ids=[91])
    assert [f.call for f in audit(store) if f.fails] == ["m"]


# -- where two payloads differ --------------------------------------------------------------------------------


def compared(stored: Any, refused: Any) -> list[tuple[str, str | None, str | None]]:
    return [(row.path, row.stored, row.refused) for row in differences(stored, refused).told]


def test_arrays_are_told_by_length_and_first_difference() -> None:
    """Of two token arrays the page shows lengths, the first index that differs, and no more values."""
    one, other = list(range(5000)), [*range(4000), *range(7, 900)]
    ((path, stored, refused),) = compared({"t": one}, {"t": other})
    assert (path, stored, refused) == ("t", "5,000 values; [4,000] is 4000", "4,893 values; [4,000] is 7")
    assert compared({"t": [1, 2]}, {"t": [1]}) == [("t", "2 values; [1] is 2", "1 values; [1] is (ended)")]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [(math.nan, math.nan, True), (0.0, -0.0, False), (1, 1.0, False), (1, True, False), (2**200, 2**200 + 1, False)],
)
def test_values_are_the_same_exactly_if_their_payloads_are(one: Any, other: Any, same: bool) -> None:
    """NaN is one with itself, while the signs of zero, and kinds of number, differ."""
    assert (compared({"v": one}, {"v": other}) == []) is same
    assert (compared({"v": [one]}, {"v": [other]}) == []) is same


def test_long_texts_are_cut_where_they_begin_to_differ() -> None:
    """Of two long strings the part is shown where they part, with their lengths."""
    ((_, stored, refused),) = compared("x" * 3000 + "left" + "y" * 90, "x" * 3000 + "right")
    assert stored is not None
    assert "left" in stored
    assert refused is not None
    assert "right" in refused
    assert len(stored) < 160


def test_differences_beyond_the_most_are_counted() -> None:
    """Fifty are told and the rest are a number."""
    many = differences({str(n): 0 for n in range(70)}, {str(n): 1 for n in range(70)})
    assert (len(many.told), many.more) == (MOST, 20)


def test_fields_that_only_one_side_has_are_told() -> None:
    """A field or an item that is missing is not a value."""
    assert compared({"a": 1, "items": [{"b": 1}]}, {"c": [1, 2], "items": [{"b": 1}, {"d": 2}]}) == [
        ("a", "1", None),
        ("c", None, "a list of 2"),
        ("items[1]", None, "an object of 1 fields"),
    ]


# -- a bucket that changes, and what is asked of it -----------------------------------------------------------


class Watched(MemoryStore):
    """Counts what is asked, and does something at the first read of a key."""

    def __init__(self, of: MemoryStore) -> None:
        super().__init__()
        self._objects = of._objects
        self.asked: Counter[str] = Counter()
        self.at_get: dict[str, Callable[[], None]] = {}

    def list(self, prefix: str) -> Sequence[ObjectInfo]:
        """See ``Store.list``."""
        self.asked["list"] += 1
        return super().list(prefix)

    def get(self, key: str) -> bytes | None:
        """See ``Store.get``."""
        self.asked["get"] += 1
        if act := self.at_get.pop(key, None):
            act()
        return super().get(key)


def test_a_rollout_that_is_dropped_meanwhile_is_read_as_it_is_then(tmp_path: Path) -> None:
    """A rollout whose records go between LIST and GET is no loss: it is listed again, and is retired."""
    store = Watched(made(tmp_path, bad=False))

    def drop() -> None:
        async def run() -> None:
            source = S3TokenSource(url=URL, run=RUN, store=unwatched(store), spill_dir=str(tmp_path))
            snapshot = await source.freeze("frozen-1")
            assert await source.drop("frozen-1", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
            await source.close()

        asyncio.run(run())

    store.at_get[KEYS.rollout("frozen-1").call("c2")] = drop
    found = [finding for finding in audit(store) if finding.rollout == "frozen-1"]
    assert found == []


def unwatched(of: Watched) -> MemoryStore:
    """A store on the same objects that watches nothing."""
    view = MemoryStore()
    view._objects = of._objects
    return view


def test_an_object_that_is_listed_and_never_there_is_lost(tmp_path: Path) -> None:
    """A store that goes on listing what it cannot give is a finding, named by key."""
    store = made(tmp_path, bad=False)
    key = KEYS.rollout("frozen-1").call("c2")

    class Forgetful(Watched):
        def get(self, wanted: str) -> bytes | None:
            return None if wanted == key else super().get(wanted)

    lost = of_kind(audit(Forgetful(store)), Kind.LOST_OBJECT)
    assert [(finding.rollout, finding.key) for finding in lost] == [("frozen-1", key)]


def test_a_put_that_comes_in_between_is_no_orphan(tmp_path: Path) -> None:
    """A rollout that begins after the lineage was listed, or ends its first put then, is looked at again."""
    store = made(tmp_path, bad=False)
    keys = KEYS.rollout("open-1")
    hidden = {row.key for row in store.list(keys.lineage_base)}

    class Earlier(Watched):
        def list(self, prefix: str) -> Sequence[ObjectInfo]:
            return [row for row in super().list(prefix) if row.key not in hidden]

    assert not [finding for finding in audit(Earlier(store)) if finding.fails]


def test_a_rollout_that_begins_meanwhile_is_no_orphan(tmp_path: Path) -> None:
    """Lineage of a rollout that was not there when its shard was listed is told only if it still is not there."""
    store = made(tmp_path, bad=False)
    hidden = KEYS.rollout("open-1").base

    class Before(Watched):
        def list(self, prefix: str) -> Sequence[ObjectInfo]:
            return [row for row in super().list(prefix) if prefix == hidden or not row.key.startswith(hidden)]

    assert not [finding for finding in audit(Before(store)) if finding.fails]


def test_lists_do_not_grow_with_the_rollouts_of_a_shard(tmp_path: Path) -> None:
    """A shard is listed once for attempts and once for lineage, however many rollouts are in it."""

    def asked(names: list[str]) -> int:
        store = MemoryStore()

        async def fill() -> None:
            make = Maker(store, tmp_path)
            for name in names:
                await make.sink.put(entry("c1", name))
            await make.close()

        asyncio.run(fill())
        watched = Watched(store)
        audit(watched)
        return watched.asked["list"]

    same = [name for number in range(3000) if KEYS.rollout(name := f"r-{number}").base.split("/")[3] == "00"]
    assert len(same) > 5
    assert asked(same[:1]) == asked(same[:6])


def archived(tmp: Path) -> MemoryStore:
    """The bad run, of which everything that can be was archived."""
    pytest.importorskip("pyarrow")
    from s3capture.archive.archiver import Archiver  # noqa: PLC0415
    from s3capture.archive.hand import Hand  # noqa: PLC0415

    store = made(tmp, bad=False)
    with Reader(store) as reader, Hand(store) as hand:
        Archiver(StoredRun(reader, KEYS), hand).archive(Selection(globs=("frozen-*", "kept-*")))
    return store


def test_archived_rollouts_are_audited_as_if_nothing_had_moved(tmp_path: Path) -> None:
    """Rollouts that lie in a pack are neither undelivered nor kept by mistake, and nothing is wrong with them."""
    found = audit(archived(tmp_path))
    assert {(finding.rollout, finding.kind) for finding in found} == {
        ("open-1", Kind.OPEN),
        ("frozen-1", Kind.ARCHIVED),
        ("kept-1", Kind.ARCHIVED),
    }


def test_an_index_without_its_pack_is_a_loss(tmp_path: Path) -> None:
    """An index whose pack is gone, and one that is damaged besides, are told of the run; the rest is audited."""
    pytest.importorskip("pyarrow")
    store = made(tmp_path, bad=False)
    store.create(KEYS.archive.index(PACK), b"no Parquet")
    fails = {(finding.rollout, finding.kind, finding.key) for finding in audit(store) if finding.fails}
    assert fails == {(None, kind, KEYS.archive.index(PACK)) for kind in (Kind.LOST_PACK, Kind.DAMAGED_OBJECT)}


def test_a_damaged_pack_is_told_and_ends_nothing(tmp_path: Path) -> None:
    """The rollouts of a pack that was changed are told as damaged, and the others are audited."""
    store = archived(tmp_path)
    (key,) = [row.key for row in store.list(f"{KEYS.archive.base}pack/")]
    body = store.get(key) or b""
    store.overwrite(key, b"\0" * len(body))
    damaged = {finding.rollout for finding in of_kind(audit(store), Kind.DAMAGED_OBJECT)}
    assert damaged <= {"frozen-1", "kept-1"}
    assert damaged


def test_bytes_in_flight_are_bounded_and_a_large_rollout_is_alone() -> None:
    """Who asks for more than is free waits for it; who asks for more than all gets all, alone."""
    budget, entered = Budget(100), threading.Event()

    def large() -> None:
        with budget.taken(1000):
            entered.set()

    with budget.taken(60), budget.taken(40):
        thread = threading.Thread(target=large)
        thread.start()
        assert not entered.wait(0.05)
    assert entered.wait(10)
    thread.join()


# -- the spill, and what is chosen ----------------------------------------------------------------------------


def test_every_file_of_the_spill_that_may_be_a_mark_is_told(tmp_path: Path) -> None:
    """A waiting mark, a late one and a damaged file of this run fail; marks of another run are not looked at."""
    from s3capture.spill import SpilledMark  # noqa: PLC0415

    spill = Spill(tmp_path / "s")
    marks = [
        SpilledMark("bucket", PREFIX, None, run, "r", "c", digit * 8, 1.7e9, "why", "host:1")
        for run, digit in ((RUN, "a"), (RUN, "b"), (RUN, "c"), ("another", "d"))
    ]
    paths = [spill.write(mark) for mark in marks]
    assert spill.set_late(marks[1], "it was retired")
    paths[2].write_bytes(b"torn")
    found = audit(MemoryStore(), spill=spill, target=TARGET)
    assert Counter(finding.kind for finding in found) == {Kind.SPILLED_MARK: 2, Kind.SPILL_DAMAGE: 1}
    assert {finding.details.get("state") for finding in of(found, "r", Kind.SPILLED_MARK)} == {"waiting", "late"}


def test_only_chosen_rollouts_are_audited(bad: MemoryStore) -> None:
    """A glob takes its rollouts, and what belongs to no rollout is not told."""
    found = audit(bad, selection=Selection(globs=("damaged", "mis*")))
    assert {finding.rollout for finding in found} == {"damaged", "misplaced"}


def test_a_run_with_a_ledger_alone_is_no_orphan(tmp_path: Path) -> None:
    """Where tokens are staged elsewhere, ledgers without captures are as it should be."""
    store = MemoryStore()

    async def fill() -> None:
        make = Maker(store, tmp_path)
        await make.ledger.begin_call("r", "c1")
        await make.ledger.refuse_call("r", "c1")
        await make.ledger.close_admissions("r")
        await make.close()

    asyncio.run(fill())
    assert [finding for finding in audit(store) if finding.fails] == []


# -- the command ----------------------------------------------------------------------------------------------


@pytest.fixture
def command(bad: MemoryStore, spill: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Run ``audit`` on the bad run, or on another store."""

    def run(*arguments: str, store: MemoryStore = bad, name: str = RUN) -> Ran:
        @contextmanager
        def opened(_settings: object) -> Iterator[Reader]:
            with reading(store) as reader:
                yield reader

        monkeypatch.setattr(sys.modules["s3capture.cli.audit"], "opened", opened)
        where = ("--spill-dir", str(spill / "spill")) if store is bad else ()
        return here("audit", URL, "--run", name, *where, *arguments)

    return run


def test_the_text_has_totals_first_and_then_the_reasons(command: Callable[..., Ran]) -> None:
    """What fails is counted by kind, then told by rollout, then about the run; notes are counted only."""
    ran = command()
    assert ran.status == 1
    lines = ran.out.splitlines()
    assert lines[0].startswith(f"run {RUN}: 23 rollouts, ")
    totals = next(number for number, line in enumerate(lines) if line.startswith("sealed-call "))
    reasons = next(number for number, line in enumerate(lines) if line.startswith("sealed  (retired"))
    whole = lines.index("the run as a whole")
    assert totals < reasons < whole
    assert not any(line.startswith("  undelivered") for line in lines)
    assert any(line.startswith("  undelivered") for line in command("--notes").out.splitlines())


def test_nothing_of_a_bucket_acts_on_the_terminal(tmp_path: Path, command: Callable[..., Ran]) -> None:
    """Control characters of ids and reasons are escaped."""
    store = MemoryStore()

    async def fill() -> None:
        make = Maker(store, tmp_path)
        await make.sink.put(entry("c1", "r"))
        await make.sink.mark_incomplete("r", "bell \x07 \x1b[31m")
        await make.close()

    asyncio.run(fill())
    ran = command(store=store)
    assert ran.status == 1
    assert "\x1b" not in ran.out
    assert "\\x1b[31m" in ran.out


def test_the_json_is_a_line_for_each_rollout_with_findings_and_the_totals_last(command: Callable[..., Ran]) -> None:
    """Every line is JSON of a known type, the findings add up to the totals, and the run comes before them."""
    rows = command("--json").rows
    assert [row["type"] for row in rows[-2:]] == ["run", "totals"]
    assert {row["type"] for row in rows[:-2]} == {"rollout"}
    kinds = Counter(finding["kind"] for row in rows[:-1] for finding in row["findings"])
    assert kinds == rows[-1]["kinds"]
    assert rows[-1]["fails"] == sum(f["severity"] == "fail" for row in rows[:-1] for f in row["findings"])
    conflict = next(row for row in rows if row.get("rollout") == "conflict")
    assert conflict["state"] == "frozen"
    assert conflict["incomplete"] is True
    assert conflict["findings"][0]["details"]["refused"]["digest"]


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("--rollout", "kept-*"), 0),
        (("--rollout", "kept-*", "--strict"), 1),
        (("--rollout", "kept-*", "--fail-on", "retained"), 1),
        (("--rollout", "conflict", "--fail-on", "mark"), 0),
        (("--rollout", "conflict", "--fail-on", "mark", "--fail-on", "conflict"), 1),
        (("--rollout", "nobody*"), 1),
        (("--since", "1h"), 1),
        (("--fail-on", "typo"), 2),
        (("--strict", "--fail-on", "mark"), 2),
        (("--since", "yesterday"), 2),
        (("--rollout", ""), 2),
        (("--html", "/no/such/directory/page.html"), 2),
        (("--html", "/"), 2),
    ],
)
def test_the_exit_status_is_the_verdict(command: Callable[..., Ran], arguments: tuple[str, ...], status: int) -> None:
    """0 for nothing that fails, 1 for findings that do or what is not there, 2 for what cannot be run."""
    assert command(*arguments).status == status


def test_a_run_that_is_not_there_is_told(command: Callable[..., Ran]) -> None:
    """A mistyped run is no clean run."""
    ran = command(store=MemoryStore(), name="typo")
    assert ran.status == 1
    assert "there is no run 'typo'" in ran.err


def test_the_page_is_written_whole_or_not_at_all(command: Callable[..., Ran], tmp_path: Path) -> None:
    """--html writes one file beside which nothing is left, and says so on stderr."""
    ran = command("--html", str(tmp_path / "page.html"))
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert (tmp_path / "page.html").read_text("utf-8").startswith("<!doctype html>")
    assert "wrote" in ran.err
    assert not ran.out.startswith("<")


def test_a_real_run_is_audited_as_what_it_was(seaweed: EmbeddedServer, bucket: str, tmp_path: Path) -> None:
    """Of the demo's rollouts, played by real processes, exactly the troubles that were played are found."""
    where = ("--url", f"s3://{bucket}/p", "--run", "r", "--endpoint-url", seaweed.endpoint_url)
    assert here("demo", "--keep", "--rollouts", "8", "--workers", "2", "--json", *where).status == 0
    page = tmp_path / "page.html"
    ran = here("audit", where[1], *where[2:], "--json", "--html", str(page))
    assert ran.status == 1
    totals = ran.rows[-1]
    assert {kind: totals["kinds"].get(kind) for kind in FAILING if kind in totals["kinds"]} == {
        Kind.SEALED_CALL: 1,
        Kind.CONFLICT: 1,
    }
    assert totals["states"]["frozen"] == totals["rollouts"] == 8
    text = page.read_text("utf-8")
    data = json.loads(text.split('<script type="application/json" id="data">')[1].split("</script>")[0])
    assert len(data["rollouts"]) == 8
    assert data["stored"]["n"] > 0
    assert sum(data["timeline"]["lanes"][0]["counts"]) == data["timeline"]["lanes"][0]["total"] > 0
