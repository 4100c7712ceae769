"""Capture directories of nemo-gym 0.7.0 into a bucket and out of one: what is brought, refused, and never touched."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import json
import re
import threading
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from captures import entry
from gymdirs import GIVEN, GymDirectory, chain, copy_of, everything, frozen, held, line, put, row, settings

from s3capture import S3CaptureLedger, S3TokenSink, S3TokenSource
from s3capture.archive.archiver import Archiver
from s3capture.archive.hand import Hand
from s3capture.cli import main
from s3capture.errors import (
    ConflictingPayloadError,
    SettingsError,
    StoreAccessError,
    TokenCaptureRetiredError,
)
from s3capture.gymdir import (
    DirectoryInUseError,
    ExportReport,
    Fate,
    ImportReport,
    export_directory,
    exporting,
    import_directory,
)
from s3capture.gymdir.checking import check_directory
from s3capture.gymdir.importing import _ImportSink
from s3capture.keys import RunKeys
from s3capture.reader import Reader
from s3capture.settings import Settings
from s3capture.store.memory import MemoryStore
from s3capture.stored import Selection, StoredRun

KEYS = RunKeys("p", "r")


@pytest.fixture
def gym(tmp_path: Path) -> GymDirectory:
    """A directory with one rollout of each kind."""
    return everything(tmp_path / "captures")


@pytest.fixture
def store() -> MemoryStore:
    """An empty bucket."""
    return MemoryStore()


def fates(report: ImportReport | ExportReport) -> dict[str, Fate]:
    """The fate of each rollout."""
    return {rollout.rollout: rollout.fate for rollout in report.rollouts}


def problems(report: ImportReport | ExportReport, rollout: str) -> str:
    """Everything that is said against one rollout."""
    return "\n".join(next(each.problems for each in report.rollouts if each.rollout == rollout))


def notes(report: ImportReport | ExportReport, rollout: str) -> str:
    """Everything that is noted of one rollout."""
    return "\n".join(next(each.notes for each in report.rollouts if each.rollout == rollout))


def export(store: MemoryStore, target: Path, **more: Any) -> ExportReport:
    """Export the run."""
    with Reader(store) as reader:
        return export_directory(reader, KEYS, target, **more)


# -- what an import brings ------------------------------------------------------------------------------------


def test_an_import_brings_everything(gym: GymDirectory, store: MemoryStore) -> None:
    """Records, intents, marks, freezes, tombstones and ledger rows are in the bucket as the endpoints tell them."""
    report = gym.bring(store)
    assert report.ok
    assert report.verified == (8, 8)
    assert report.others == 1
    assert {name for name, fate in fates(report).items() if fate is Fate.EMPTY} == {"locked-once"}
    for name, records in (("open", chain("open")), ("frozen", chain("frozen", delta=False))):
        snapshot = frozen(store, name)
        assert [each.model_dump() for each in snapshot.entries] == [each.model_dump() for each in records]
        assert not snapshot.incomplete
    for name, version in (("dangling", 3), ("marked", 5), ("stated", 3)):
        snapshot = frozen(store, name)
        assert (snapshot.incomplete, len(snapshot.entries), snapshot.version) == (True, 1, version)
    assert frozen(store, "empty").entries == ()
    with pytest.raises(TokenCaptureRetiredError):
        frozen(store, "retired")
    manifest = asyncio.run(S3CaptureLedger(store=store, **GIVEN).manifest("staged"))
    assert [record["model_call_id"] for record in manifest["records"]] == ["c1", "c2"]
    assert [(each["model_call_id"], each["reason"]) for each in manifest["failures"]] == [("c3", "lost")]


def test_what_gym_froze_is_frozen_and_the_rest_goes_on(gym: GymDirectory, store: MemoryStore) -> None:
    """A rollout that was frozen in the directory takes no more calls; one that was open does."""
    gym.bring(store)
    sink = S3TokenSink(store=store, **GIVEN)
    asyncio.run(sink.begin_call("open", "c9"))
    for name in ("frozen", "dangling", "empty", "retired"):
        with pytest.raises(RuntimeError):
            asyncio.run(sink.begin_call(name, "c9"))


def test_the_directory_is_never_touched(gym: GymDirectory, store: MemoryStore) -> None:
    """Neither check nor import changes, adds or removes a file."""
    before = gym.bytes()
    gym.bring(store)
    assert gym.bytes() == before


def test_importing_again_changes_nothing(gym: GymDirectory, store: MemoryStore) -> None:
    """A second import writes not one object and says that everything is there and verified."""
    gym.bring(store)
    before = held(store)
    again = gym.bring(store)
    assert again.ok
    assert set(fates(again).values()) == {Fate.PRESENT, Fate.EMPTY}
    assert again.verified == (8, 8)
    assert held(store) == before


def test_a_directory_that_grew_is_brought_up_to_date(gym: GymDirectory, store: MemoryStore) -> None:
    """Only what is new is written, and a freeze and a mark that came meanwhile come too."""
    gym.bring(store)
    before = held(store)
    gym.rollout("open", [*chain("open"), entry("c4", "open")], intents=["c1", "c2", "c3", "c4"], frozen=True)
    gym.rollout("frozen", chain("frozen", delta=False), intents=["c1", "c2", "c3"], marks=["c9"], frozen=True)
    report = gym.bring(store)
    assert report.ok
    assert {n for n, fate in fates(report).items() if fate is Fate.IMPORTED} == {"open", "frozen"}
    assert before.items() <= held(store).items()
    assert [each.model_call_id for each in frozen(store, "open").entries] == ["c1", "c4", "c2", "c3"]
    assert frozen(store, "frozen").incomplete


def test_a_dry_run_writes_nothing(gym: GymDirectory, store: MemoryStore) -> None:
    """A dry run says what would be imported and leaves the bucket empty, scratch keys included."""
    report = gym.bring(store, dry_run=True)
    assert report.ok
    assert set(fates(report).values()) == {Fate.PLANNED, Fate.EMPTY}
    assert not store.list("")


def test_globs_choose(gym: GymDirectory, store: MemoryStore) -> None:
    """Only the rollouts that are named are read, checked and imported."""
    gym.file("open", "tokens.jsonl").write_text("broken\n")
    report = gym.bring(store, names=lambda name: name == "frozen")
    assert fates(report) == {"frozen": Fate.IMPORTED}


# -- faults ---------------------------------------------------------------------------------------------------

Spoil = Callable[[GymDirectory], None]


def _lines(*records: Any) -> Spoil:
    def spoil(gym: GymDirectory) -> None:
        gym.rollout("bad", list(records), entry_digests=None)

    return spoil


def _text(suffix: str, text: bytes, **state: Any) -> Spoil:
    def spoil(gym: GymDirectory) -> None:
        gym.rollout("bad", [entry("c1", "bad")], **state)
        gym.file("bad", suffix).write_bytes(text)

    return spoil


def _but(**more: Any) -> dict[str, Any]:
    return {**entry("c1", "bad").model_dump(mode="json"), **more}


def _rows(*rows: dict[str, Any]) -> Spoil:
    return lambda gym: gym.ledger("bad", list(rows))


def _without(value: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: each for key, each in value.items() if key != name}


GOOD = line(entry("c1", "bad"))
FAULTS: dict[str, tuple[Spoil, str]] = {
    "no json": (_text("tokens.jsonl", b"\n{]\n" + GOOD + b"\n"), "bad.tokens.jsonl:2: not JSON"),
    "no json, acknowledged": (_text("tokens.jsonl", GOOD + b"\n{\n", indexed_size=len(GOOD) + 3), ":2: not JSON"),
    "no object": (_text("tokens.jsonl", b"7\n", entry_digests=None), ":1: a JSON int, not an object"),
    "null log prob": (_lines(_but(generation_log_probs=[-1.0, None])), ":1: cannot store generation_log_probs[1]"),
    "null hint": (_lines(_but(generation_log_probs=[-1.0, None])), "Gym writes null for -inf"),
    "token id as text": (_lines(_but(prompt_token_ids=[1, "2"])), ":1: cannot store prompt_token_ids[1]"),
    "token id as float": (_lines(_but(prompt_token_ids=[1.0])), "prompt_token_ids[0]"),
    "no tokens": (_lines(_without(_but(), "prompt_token_ids")), "prompt_token_ids"),
    "future": (_lines(_but(schema_version=2)), "version 2"),
    "too few log probs": (_lines(_but(generation_log_probs=[-1.0])), "generation_log_probs"),
    "another rollout": (_lines(_but(rollout_id="other")), "call 'c1' says it is of rollout 'other'"),
    "wrong digest": (_lines(_but(digest="0" * 64)), "do not have the digest"),
    "wrong length": (_lines(_but(cum_len=6)), "has 5 tokens and says 6"),
    "negative ids": (_lines(_but(prompt_token_ids=[-1], digest="0" * 64)), "no digest can be made"),
    "no parent": (_lines(*chain("bad")[1:]), "call 'c2' is a delta and call 'c1', which it rests on, is not there"),
    "two payloads": (_lines(_but(), _but(created_at=2.0)), "bad.tokens.jsonl:2: call 'c1' stands on line 1"),
    "too large": (_lines(_but(model="x" * 300_000)), "max_object_bytes is"),
    "index differs": (_text("tokens.jsonl", GOOD.replace(b"17000", b"17001") + b"\n"), ":1: call 'c1': the line has"),
    "index names more": (
        lambda gym: gym.rollout("bad", [entry("c1", "bad")], entry_digests={"c7": "0" * 64}),
        "names call 'c7' (1 in all), which has no line",
    ),
    "index too long": (_text("tokens.jsonl", b""), "covers"),
    "index within a line": (_text("tokens.intents", b"", indexed_size=5), "which is within a line"),
    "no state": (_text("tokens.state.json", b"{"), "bad.tokens.state.json: not a state"),
    "odd state": (_text("tokens.state.json", b'{"frozen":"yes"}'), "frozen is a str"),
    "intents": (_text("tokens.intents", b"c1\n\xff\n"), "bad.tokens.intents:2: not UTF-8"),
    "ledger, no json": (_text("lineage.jsonl", b"{\n"), "bad.lineage.jsonl:1"),
    "ledger, unknown": (_rows(row(), row("c2", "c1", 4, cumulative_token_ids=[1])), ":2: call 'c2': 0.7.0 writes no"),
    "ledger, missing": (_rows(_without(row(), "mode")), "column 'mode' is missing"),
    "ledger, lengths": (_rows(row(cum_len=5)), "cum_len is 5"),
    "ledger, digests": (_rows(row(digest="0" * 64)), "are the same thing and differ"),
    "ledger, two rows": (_rows(row(), row(weight_version=4)), ":2: call 'c1' stands on line 1"),
    "ledger, reason": (_rows({"model_call_id": "c1", "failure_reason": ""}), "must hold a reason"),
}


@pytest.mark.parametrize(("spoil", "said"), FAULTS.values(), ids=FAULTS)
def test_a_damaged_rollout_is_told_and_left_out(spoil: Spoil, said: str, tmp_path: Path, store: MemoryStore) -> None:
    """Each fault is told with its file and line; nothing of its rollout is written, and the others are imported."""
    gym = GymDirectory(tmp_path / "captures")
    gym.rollout("good", chain("good"))
    spoil(gym)
    report = import_directory(gym.root, settings(max_object_bytes=200_000), store)
    assert fates(report) == {"bad": Fate.DAMAGED, "good": Fate.IMPORTED}
    assert said in problems(report, "bad")
    assert problems(report, "bad").startswith("bad.")
    assert not report.ok
    assert report.verified == (1, 1)
    assert not [key for key in held(store) if "/bad/" in key]


def test_every_fault_of_a_file_is_told(tmp_path: Path) -> None:
    """The check goes on behind a fault, so that one pass tells them all."""
    gym = GymDirectory(tmp_path / "captures")
    gym.rollout("bad", [_but(rollout_id="other"), _but(model_call_id=7), _but(digest="0" * 64)], entry_digests=None)
    (checked,) = check_directory(gym.root)
    assert sorted(fault.line or 0 for fault in checked.faults) == [1, 2, 3]


def test_a_file_that_cannot_be_read_is_a_fault(gym: GymDirectory, store: MemoryStore) -> None:
    """A file that fails when it is read is a fault of its rollout alone."""
    gym.file("open", "tokens.intents").unlink()
    gym.file("open", "tokens.intents").mkdir()
    report = gym.bring(store)
    assert fates(report)["open"] is Fate.DAMAGED
    assert problems(report, "open").startswith("open.tokens.intents: cannot be read")
    assert report.verified == (7, 7)


def test_a_name_that_is_no_rollout_id_is_told(gym: GymDirectory, store: MemoryStore) -> None:
    """A file of a rollout whose id no key may carry is a problem of the import, and the others are imported."""
    (gym.root / "..tokens.jsonl").write_bytes(GOOD)
    (gym.root / "a b.tokens.lock").touch()
    report = gym.bring(store)
    assert len(report.problems) == 1
    assert "'.'" in report.problems[0]
    assert not report.ok
    assert report.verified == (8, 8)


FORGIVEN: dict[str, tuple[Spoil, int, str]] = {
    "torn last line": (_text("tokens.jsonl", GOOD + b"\n" + GOOD[:40]), 1, "never finished"),
    "a line twice": (_text("tokens.jsonl", GOOD + b"\n" + GOOD + b"\n"), 1, "twice"),
    "no last newline": (_text("tokens.jsonl", GOOD, indexed_size=0), 1, ""),
    "no index": (_text("tokens.state.json", b'{"frozen":true}'), 1, ""),
    "keys in another order": (_lines(dict(reversed(_but().items()))), 1, ""),
    "whole seconds": (_lines(_but(created_at=1_700_000_000)), 1, ""),
}


@pytest.mark.parametrize(("spoil", "calls", "said"), FORGIVEN.values(), ids=FORGIVEN)
def test_what_gym_forgives_is_forgiven(spoil: Spoil, calls: int, said: str, tmp_path: Path, store: MemoryStore) -> None:
    """What Gym's reader drops or repairs is no fault: the records are imported and the rest is noted."""
    gym = GymDirectory(tmp_path / "captures")
    spoil(gym)
    report = gym.bring(store)
    assert fates(report) == {"bad": Fate.IMPORTED}
    assert said in notes(report, "bad")
    assert len(frozen(store, "bad").entries) == calls


def test_a_torn_ledger_row_was_never_acknowledged(tmp_path: Path, store: MemoryStore) -> None:
    """The unfinished last line of a ledger is noted and left out."""
    gym = GymDirectory(tmp_path / "captures")
    gym.ledger("led", [row()])
    with gym.file("led", "lineage.jsonl").open("a") as handle:
        handle.write(json.dumps(row("c2", "c1", 4))[:70])
    report = gym.bring(store)
    assert fates(report) == {"led": Fate.IMPORTED}
    assert "never finished" in notes(report, "led")


MASKS: dict[str, dict[str, Any]] = {
    "mark": {"marks": ["c1"]},
    "lost call": {"intents": ["c1"]},
    "state": {"incomplete": True},
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_broken_chain_in_a_masked_rollout_is_a_note(mask: dict[str, Any], tmp_path: Path, store: MemoryStore) -> None:
    """A delta whose parent is gone is evidence where Gym masks the rollout anyway, and is imported as such."""
    gym = GymDirectory(tmp_path / "captures")
    gym.rollout("masked", chain("masked")[1:], **mask)
    report = gym.bring(store)
    assert report.ok
    assert "cannot be rebuilt" in notes(report, "masked")
    assert frozen(store, "masked").incomplete


def test_an_old_ledger_row_is_reported_as_gym_reports_it(tmp_path: Path, store: MemoryStore) -> None:
    """A row without response id is imported as it is, and the manifest makes it a failure of its call."""
    gym = GymDirectory(tmp_path / "captures")
    gym.ledger("old", [row(response_id=None), row("c2", "c1", 4, chain_hash=None)])
    assert gym.bring(store).ok
    manifest = asyncio.run(S3CaptureLedger(store=store, **GIVEN).manifest("old"))
    assert [each["reason"] for each in manifest["failures"]] == [
        "ledger_row_missing_response_id",
        "ledger_row_missing_chain_hash",
    ]


# -- a bucket that holds something already --------------------------------------------------------------------


def _freeze(store: MemoryStore, rollout: str) -> None:
    asyncio.run(S3TokenSource(store=store, **GIVEN).freeze(rollout))


def _retire(store: MemoryStore, rollout: str) -> None:
    asyncio.run(S3TokenSource(store=store, **GIVEN).retire([rollout]))


def _begun_and_frozen(store: MemoryStore, rollout: str) -> None:
    asyncio.run(S3TokenSink(store=store, **GIVEN).begin_call(rollout, "c1"))
    _freeze(store, rollout)


def _conflicted(store: MemoryStore, rollout: str) -> None:
    put(store, *chain(rollout))
    with pytest.raises(ConflictingPayloadError):
        put(store, entry("c1", rollout))


def _refused(store: MemoryStore, rollout: str) -> None:
    sink = S3TokenSink(store=store, **GIVEN)
    asyncio.run(sink.record_engine_refusal(rollout, model_call_id="c1", code="too_long"))


RIVALS: dict[str, tuple[str, Callable[[MemoryStore, str], None], str]] = {
    "another payload": ("open", lambda store, name: put(store, entry("c1", name)), "is another record"),
    "a refusal": ("open", _refused, "was refused by the engine"),
    "a seal": ("open", _begun_and_frozen, "was sealed without a record"),
    "a conflict": ("open", _conflicted, "has conflicting payloads in the bucket"),
    "frozen with fewer": (
        "open",
        lambda s, n: (put(s, chain(n)[0]), _freeze(s, n))[0],
        "frozen in the bucket without 2",
    ),
    "retired": ("open", lambda s, n: (put(s, *chain(n)), _retire(s, n))[0], "retired in the bucket"),
    "more than was frozen": ("frozen", lambda s, n: put(s, entry("c8", n)), "1 calls more"),
    "frozen with more": (
        "frozen",
        lambda s, n: (put(s, *chain(n, delta=False), entry("c8", n)), _freeze(s, n))[0],
        "frozen in the bucket with another set of calls",
    ),
    "a record for a lost call": (
        "dangling",
        lambda s, n: put(s, entry("c2", n)),
        "no record in the directory and a record",
    ),
    "records of the retired": ("retired", lambda s, n: put(s, entry("c1", n)), "would retire them"),
}


@pytest.mark.parametrize(("rollout", "rival", "said"), RIVALS.values(), ids=RIVALS)
def test_a_bucket_that_holds_something_else_is_left_alone(
    rollout: str, rival: Callable[[MemoryStore, str], None], said: str, gym: GymDirectory, store: MemoryStore
) -> None:
    """What the bucket holds otherwise is reported; nothing of that rollout is written, not even as evidence."""
    rival(store, rollout)
    before = held(store)
    report = gym.bring(store)
    assert fates(report)[rollout] is Fate.CONFLICT
    assert said in problems(report, rollout)
    after = {key: body for key, body in held(store).items() if f"/{rollout}/" in key}
    assert after == {key: body for key, body in before.items() if f"/{rollout}/" in key}
    assert report.verified == (7, 7)


LEDGER_RIVALS: dict[str, tuple[Callable[[S3CaptureLedger], Any], str]] = {
    "refused": (lambda ledger: ledger.refuse_call("staged", "c1"), "was refused in the bucket's ledger"),
    "retired": (lambda ledger: ledger.retire(["staged"]), "its ledger is retired"),
    "closed": (lambda ledger: ledger.close_admissions("staged"), "admissions of its ledger are closed"),
}


@pytest.mark.parametrize(("rival", "said"), LEDGER_RIVALS.values(), ids=LEDGER_RIVALS)
def test_a_ledger_that_says_otherwise_is_left_alone(
    rival: Callable[[S3CaptureLedger], Any], said: str, gym: GymDirectory, store: MemoryStore
) -> None:
    """A ledger that is closed, retired or holds another outcome keeps what it has."""
    asyncio.run(rival(S3CaptureLedger(store=store, **GIVEN)))
    before = {key: body for key, body in held(store).items() if "/staged/" in key}
    report = gym.bring(store)
    assert fates(report)["staged"] is Fate.CONFLICT
    assert said in problems(report, "staged")
    assert {key: body for key, body in held(store).items() if "/staged/" in key} == before


def test_another_ledger_row_is_a_conflict(gym: GymDirectory, store: MemoryStore) -> None:
    """A row of the same call with other content is reported with both digests."""
    gym.bring(store)
    gym.ledger("staged", [row("c1", weight_version=9)])
    report = gym.bring(store)
    assert "has another ledger row in the bucket" in problems(report, "staged")


def test_a_damaged_object_in_the_bucket_is_a_conflict(gym: GymDirectory, store: MemoryStore) -> None:
    """A rollout whose stored record cannot be trusted is reported as such, and the others are imported."""
    put(store, chain("open")[0])
    store.overwrite(KEYS.rollout("open").call("c1"), b"rubbish")
    report = gym.bring(store)
    assert "damaged in the bucket" in problems(report, "open")
    assert report.verified == (7, 7)


def test_a_lost_continuation_marker_is_written_again(gym: GymDirectory, store: MemoryStore) -> None:
    """A record whose marker a dead process left out is put again, so that a continuation finds it."""
    gym.bring(store)
    markers = [key for key in held(store) if "/lineage/" in key and "/open/" in key]
    store.delete(markers[:1])
    report = gym.bring(store)
    assert fates(report)["open"] is Fate.IMPORTED
    assert set(markers) <= held(store).keys()


# -- trouble on the way ---------------------------------------------------------------------------------------


class _Dying(MemoryStore):
    """A store whose credentials run out after some creates."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    def create(self, key: str, body: bytes) -> bool:
        """See ``Store.create``."""
        self.left -= 1
        if self.left < 0:
            raise StoreAccessError("the credentials have run out")
        return super().create(key, body)


def test_an_import_that_dies_anywhere_is_masked_and_finished_later(gym: GymDirectory) -> None:
    """Whatever was written before the end came, no rollout looks complete that is not; importing again finishes it."""
    complete = {"open": 3, "frozen": 3}
    for left in itertools.count(3):
        store = _Dying(left)
        try:
            report = gym.bring(store)
        except StoreAccessError:
            report = None
        for name, calls in complete.items():
            if any(f"/{name}/" in key for key in held(store)):
                snapshot = frozen(store, name)
                assert snapshot.incomplete or len(snapshot.entries) == calls, f"{name} after {left} creates"
        store.left = 10**6
        assert gym.bring(store).verified == (8, 8)
        if report is not None:
            return


def test_a_directory_in_use_is_refused(gym: GymDirectory, store: MemoryStore) -> None:
    """While a process holds the lock of any rollout nothing is imported."""
    with gym.file("marked", "tokens.lock").open("a+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DirectoryInUseError, match=r"marked\.tokens\.lock"):
            gym.bring(store)
    assert not store.list("")
    assert gym.bring(store).ok


class _Meanwhile:
    """A ``Show`` that does something when a phase begins."""

    def __init__(self, phase: str, deed: Callable[[], Any]) -> None:
        self._phase, self._deed = phase, deed

    def phase(self, what: str, total: int | None) -> None:
        """See ``Show``."""
        del total
        if what == self._phase:
            self._deed()

    def advance(self) -> None:
        """See ``Show``."""


def test_a_directory_that_changes_under_the_import_is_told(gym: GymDirectory, store: MemoryStore) -> None:
    """A rollout whose files changed after they were checked is never called imported."""

    def change() -> None:
        data = gym.file("open", "tokens.jsonl").read_bytes()
        gym.file("open", "tokens.jsonl").write_bytes(data.replace(b"Cloudy", b"Cl0udy"))
        with gym.file("marked", "tokens.incomplete").open("a") as handle:
            handle.write("c7\n")

    report = gym.bring(store, show=_Meanwhile("importing", change))
    assert fates(report)["open"] is Fate.FAILED
    assert "open.tokens.jsonl:2: no longer the line that was checked" in problems(report, "open")
    assert "marked.tokens.incomplete changed" in problems(report, "marked")
    assert report.verified == (6, 8)


def test_a_rival_that_comes_in_between_is_told(gym: GymDirectory, store: MemoryStore) -> None:
    """A record that another process puts between comparison and write fails its rollout, and the others go on."""
    report = gym.bring(store, show=_Meanwhile("importing", lambda: put(store, entry("c1", "open"))))
    assert fates(report)["open"] is Fate.FAILED
    assert "conflicting payloads" in problems(report, "open")
    assert report.verified == (7, 8)


def test_a_tombstone_never_deletes(gym: GymDirectory, store: MemoryStore) -> None:
    """A record that a rival puts just before its rollout is retired stays in the bucket."""
    gym.bring(store, show=_Meanwhile("importing", lambda: put(store, entry("c1", "retired"))))
    assert KEYS.rollout("retired").call("c1") in held(store)


def test_an_import_that_is_interrupted_marks_nothing() -> None:
    """A put that fails after its await was cancelled leaves no mark: the record is still in the directory."""
    started, release = threading.Event(), threading.Event()

    class Slow(_Dying):
        def create(self, key: str, body: bytes) -> bool:
            if "/call/" in key:
                started.set()
                release.wait(30)
            return super().create(key, body)

    slow = Slow(2)  # enough for the check at first use, which creates its scratch key twice

    async def interrupted() -> None:
        sink = _ImportSink(store=slow, **GIVEN)
        put = asyncio.create_task(sink.put(entry("c1")))
        assert await asyncio.to_thread(started.wait, 30)
        put.cancel()
        with pytest.raises(asyncio.CancelledError):
            await put
        release.set()
        await sink.close()

    before = sorted(Settings.of(**GIVEN).spill_path.rglob("*"))
    asyncio.run(interrupted())
    assert not held(slow)
    assert sorted(Settings.of(**GIVEN).spill_path.rglob("*")) == before


def test_what_was_written_is_read_back(gym: GymDirectory) -> None:
    """A store that loses a record after it was acknowledged is found out by the comparison at the end."""

    class Forgetful(MemoryStore):
        def get(self, key: str) -> bytes | None:
            if key == KEYS.rollout("open").call("c2"):
                self.delete([key])
            return super().get(key)

    report = gym.bring(Forgetful())
    assert fates(report)["open"] is Fate.DIFFERENT
    assert "1 records are not in the bucket" in problems(report, "open")


def test_no_directory_is_refused(tmp_path: Path, store: MemoryStore) -> None:
    """What is no directory is refused by name."""
    with pytest.raises(SettingsError, match="not a capture directory"):
        import_directory(tmp_path / "no", settings(), store)


# -- export ---------------------------------------------------------------------------------------------------


def _content(gym: Path) -> dict[str, Any]:
    """What a directory holds, as the check reads it: records, intents, marks, verdicts, ledger."""
    found = {}
    for rollout in check_directory(gym):
        assert not rollout.faults
        if not rollout.empty:
            state = rollout.state
            found[rollout.rollout_id] = (
                {each.call: each.digest for each in rollout.entries},
                set(rollout.dangling),
                sorted(mark.call for mark in rollout.marks),
                (state.frozen, state.retired, rollout.incomplete),
                {each.call: each.digest for each in rollout.rows},
                set(rollout.failures),
            )
    return found


def test_a_directory_comes_back_as_it_was(gym: GymDirectory, store: MemoryStore, tmp_path: Path) -> None:
    """Directory to bucket to directory: the same records, lost calls, marks, verdicts and ledger rows."""
    gym.bring(store)
    before = held(store)
    report = export(store, tmp_path / "back")
    assert report.ok
    assert report.verified == (8, 8)
    assert _content(tmp_path / "back") == _content(gym.root)
    assert held(store) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "captures"]


def test_a_bucket_comes_back_as_it_was(gym: GymDirectory, store: MemoryStore, tmp_path: Path) -> None:
    """Bucket to directory to bucket: every snapshot holds the same entries and the same verdict."""
    gym.bring(store)
    export(store, tmp_path / "back")
    other = MemoryStore()
    assert GymDirectory(tmp_path / "back").bring(other).ok
    for name in ("open", "frozen", "dangling", "marked", "stated", "empty"):
        one, two = frozen(store, name), frozen(other, name)
        assert (one.entries, one.incomplete) == (two.entries, two.incomplete)


@pytest.mark.parametrize("kind", ["full", "file", "nowhere"])
def test_a_place_that_will_not_do_is_refused(kind: str, gym: GymDirectory, store: MemoryStore, tmp_path: Path) -> None:
    """A directory that holds something, a file, and a place without a parent are refused and left as they are."""
    gym.bring(store)
    target = tmp_path / kind / "there" if kind == "nowhere" else tmp_path / kind
    if kind == "full":
        target.mkdir()
        (target / "mine").write_text("x")
    elif kind == "file":
        target.write_text("x")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SettingsError, match=str(target)):
        export(store, target)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_directory_will_do(gym: GymDirectory, store: MemoryStore, tmp_path: Path) -> None:
    """A target that is there and empty is filled."""
    gym.bring(store)
    (tmp_path / "back").mkdir()
    assert export(store, tmp_path / "back").verified == (8, 8)


def test_an_export_that_dies_leaves_nothing(gym: GymDirectory, store: MemoryStore, tmp_path: Path) -> None:
    """When the bucket fails halfway there is no directory, neither whole nor in part."""
    gym.bring(store)

    class Denied(MemoryStore):
        def get(self, key: str) -> bytes | None:
            if "/marked/call/" in key:
                raise StoreAccessError("denied")
            return super().get(key)

    denied = Denied()
    for key, body in held(store).items():
        denied.create(key, body)
    with pytest.raises(StoreAccessError):
        export(denied, tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["captures"]


def test_what_was_exported_is_read_back(
    gym: GymDirectory, store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that does not hold what was written to it is found out by the comparison at the end."""
    gym.bring(store)
    write = exporting._Export._write

    def loses_a_line(self: Any, rollout: str, suffix: str, parts: Any) -> None:
        write(self, rollout, suffix, list(parts)[1:] if suffix in (".tokens.intents", ".lineage.jsonl") else parts)

    monkeypatch.setattr(exporting._Export, "_write", loses_a_line)
    report = export(store, tmp_path / "back")
    bad = {name: problems(report, name) for name, fate in fates(report).items() if fate is Fate.DIFFERENT}
    assert bad.keys() == {"open", "frozen", "dangling", "marked", "stated", "staged"}
    assert "intents of the directory" in bad["open"]
    assert "ledger of the directory" in bad["staged"]
    assert report.verified == (2, 8)


def test_a_damaged_rollout_is_left_out_of_an_export(gym: GymDirectory, store: MemoryStore, tmp_path: Path) -> None:
    """A rollout with a record that cannot be trusted, or a chain that does not close, is told and not written."""
    gym.bring(store)
    put(store, chain("torn")[1])
    store.overwrite(KEYS.rollout("frozen").call("c2"), b"rubbish")
    report = export(store, tmp_path / "back")
    assert {name for name, fate in fates(report).items() if fate is Fate.DAMAGED} == {"frozen", "torn"}
    assert "not a zstd frame" in problems(report, "frozen")
    assert "cannot be rebuilt" in problems(report, "torn")
    assert not report.ok
    assert report.verified == (7, 7)
    assert _content(tmp_path / "back").keys() == _content(gym.root).keys() - {"frozen"}


def test_what_was_retired_is_a_tombstone_unless_it_was_kept(store: MemoryStore, tmp_path: Path) -> None:
    """A dropped rollout is a tombstone, one whose records were kept is exported with them, frozen."""
    for name, retention in (("gone", "delete"), ("kept", "keep")):
        put(store, *chain(name))
        source = S3TokenSource(store=store, retention=retention, **GIVEN)
        snapshot = asyncio.run(source.freeze(name))
        assert asyncio.run(source.drop(name, snapshot_id=snapshot.snapshot_id, version=snapshot.version))
    report = export(store, tmp_path / "back")
    states = {each.rollout: (each.state, each.calls) for each in report.rollouts}
    assert states == {"gone": ("retired", 0), "kept": ("frozen", 3)}
    assert "records kept" in notes(report, "kept")
    assert [path.name for path in tmp_path.glob("back/gone*")] == ["gone.tokens.state.json"]


def test_archived_rollouts_read_as_if_nothing_had_moved(gym: GymDirectory, store: MemoryStore, tmp_path: Path) -> None:
    """What was packed is exported as before, and a second import finds it there; what grew since is a conflict."""
    gym.bring(store)
    export(store, tmp_path / "before")
    with Reader(store) as reader, Hand(store) as hand:
        packed = Archiver(StoredRun(reader, KEYS), hand).archive(Selection(states=frozenset({"frozen"})))
    assert packed.archived == 2
    before = held(store)
    assert not any("/frozen/call/" in key for key in before)
    export(store, tmp_path / "after")
    assert _content(tmp_path / "after") == _content(tmp_path / "before")
    assert gym.bring(store).verified == (8, 8)
    gym.rollout("frozen", chain("frozen", delta=False), intents=["c1", "c2", "c3"], marks=["c9"], frozen=True)
    report = gym.bring(store)
    assert "archived in the bucket without all" in problems(report, "frozen")
    assert held(store) == before


def test_an_unsettled_admission_is_exported_as_a_failure(store: MemoryStore, tmp_path: Path) -> None:
    """A call that was admitted to the ledger and never settled is the failure that our manifest reports."""
    asyncio.run(S3CaptureLedger(store=store, **GIVEN).begin_call("led", "c1"))
    report = export(store, tmp_path / "back")
    assert json.loads((tmp_path / "back" / "led.lineage.jsonl").read_text()) == {
        "model_call_id": "c1",
        "failure_reason": "request_finished_without_staged_coordinates",
    }
    assert "never settled" in notes(report, "led")
    assert copy_of(store).list("")


# -- commands -------------------------------------------------------------------------------------------------


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of one command."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(arguments)
    return status, out.getvalue(), err.getvalue()


@pytest.fixture
def where(moto_server: str, moto_bucket: str) -> list[str]:
    """Url and options of a bucket on moto."""
    return [f"s3://{moto_bucket}/p", "--run", "r", "--endpoint-url", moto_server]


def test_the_commands_tell_what_they_did(gym: GymDirectory, where: list[str], tmp_path: Path) -> None:
    """Damage is one line with file and line number and exit status 1; the rest is imported, exported and verified."""
    gym.file("open", "tokens.jsonl").write_bytes(b"{\x1b]\n")
    status, out, err = run("import-gym", str(gym.root), *where, "--dry-run")
    assert status == 1
    assert "7 planned" in out
    status, out, err = run("import-gym", str(gym.root), *where)
    assert status == 1
    assert re.search(r"^DAMAGED    open: open\.tokens\.jsonl:1: not JSON", out, re.MULTILINE)
    assert "verified   7 of 7\n" in out
    assert "1 rollout of 9 left out" in err
    assert "\x1b" not in out + err
    status, out, _ = run("import-gym", str(gym.root), *where, "--json", "--rollout", "f*", "--rollout", "open")
    rows = {row["rollout"]: row for row in map(json.loads, out.splitlines())}
    assert status == 1
    assert {name: (row["fate"], row["verified"]) for name, row in rows.items()} == {
        "frozen": ("present", True),
        "open": ("damaged", False),
    }
    status, out, err = run("export-gym", where[0], str(tmp_path / "back"), *where[1:])
    assert (status, err) == (0, "")
    assert "verified   7 of 7\n" in out
    assert _content(tmp_path / "back").keys() == {name for name in _content_of_sound(gym) if name != "open"}


def _content_of_sound(gym: GymDirectory) -> set[str]:
    return {rollout.rollout_id for rollout in check_directory(gym.root) if not rollout.empty}


def test_commands_that_cannot_run_say_why(gym: GymDirectory, where: list[str], tmp_path: Path) -> None:
    """A directory that is missing, in use or not empty is exit status 2 and one line; an unknown run is status 1."""
    status, out, err = run("import-gym", str(tmp_path / "none"), *where)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "not a capture directory" in err
    with gym.file("marked", "tokens.lock").open("a+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status, _, err = run("import-gym", str(gym.root), *where)
    assert status == 2
    assert "the directory is in use" in err
    status, _, err = run("export-gym", where[0], str(tmp_path / "back"), *where[1:])
    assert status == 1
    assert "no run 'r'" in err
    assert run("import-gym", str(gym.root), *where)[0] == 0
    status, _, err = run("export-gym", where[0], str(gym.root), *where[1:])
    assert (status, err.count("\n")) == (2, 1)
    assert "holds something already" in err
    status, _, err = run("import-gym", str(gym.root), *where, "--rollout", "nobody-*")
    assert status == 1
    assert "nothing in" in err
