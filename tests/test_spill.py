"""The local spill: a mark that was acknowledged outlives crashes, damage, full disks and rivals."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from s3capture import spill as spill_module
from s3capture.errors import SpillError
from s3capture.spill import Spill, SpilledMark, Target, memory_file_system

MARK = SpilledMark(
    bucket="bucket",
    prefix="a/prefix",
    endpoint_url="http://127.0.0.1:9000",
    run="run-7",
    rollout="7-3",
    call="0f" * 16,
    mark_id="ab" * 16,
    at=1700000000.25,
    reason="put failed: no answer within 5 s",
    by="worker-1:4242",
)
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(spill_module.__file__).parents[2])}
LINUX = sys.platform == "linux"


@pytest.fixture
def spill(tmp_path: Path) -> Spill:
    return Spill(tmp_path / "spill")


def numbered(number: int, **changes: Any) -> SpilledMark:
    return replace(MARK, **{"mark_id": f"{number:032x}", "at": float(number), **changes})


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.is_file())


# ---- keeping, finding, settling -----------------------------------------------------------------------


def test_a_mark_comes_back_exactly_and_goes_when_settled(spill: Spill) -> None:
    """A written mark is pending for any Spill on the directory until it is settled; settling again is fine."""
    path = spill.write(MARK)
    assert path.is_file()
    assert Spill(spill.directory).pending().marks == (MARK,)
    assert spill.settle(MARK)
    assert spill.settle(MARK)
    assert spill.pending() == spill_module.SpillScan()


def test_a_directory_that_was_never_made_is_empty_and_stays_unmade(spill: Spill) -> None:
    """Scanning, settling and listing a missing directory find nothing, and constructing makes nothing."""
    assert spill.pending() == spill_module.SpillScan()
    assert spill.settle(MARK)
    assert spill.late() == []
    assert spill.damaged() == []
    assert not spill.directory.exists()


def test_marks_come_oldest_first(spill: Spill) -> None:
    """The order of a scan is the order of time, whatever the order of names on the disk."""
    for number in (3, 1, 2):
        spill.write(numbered(number, mark_id=f"{9 - number:x}"))
    assert [mark.at for mark in spill.pending().marks] == [1.0, 2.0, 3.0]


def test_writing_again_is_a_no_op(spill: Spill) -> None:
    """The same mark written twice is one file, and the first content stays."""
    first = spill.write(MARK)
    assert spill.write(replace(MARK, reason="told again", at=MARK.at + 1)) == first
    assert spill.pending().marks == (MARK,)
    assert len(files(spill.directory)) == 1


def test_a_scan_selects_by_target_and_rollout(spill: Spill) -> None:
    """Targets that differ in one part only, or whose parts run together, are told apart; so are rollouts."""
    marks = [
        numbered(1),
        numbered(2, endpoint_url=None),
        numbered(3, endpoint_url=""),
        numbered(4, bucket="bucketa", prefix="/prefix"),
        numbered(5, run="run-8"),
        numbered(6, rollout="7-4"),
    ]
    for mark in marks:
        spill.write(mark)
    for mark in marks[1:5]:
        assert spill.pending(target=mark.target).marks == (mark,)
    assert spill.pending(target=MARK.target).marks == (marks[0], marks[5])
    assert spill.pending(target=MARK.target, rollout="7-4").marks == (marks[5],)
    assert spill.pending(rollout="7-3").marks == tuple(marks[:5])
    assert spill.pending(target=Target(None, "other", "", "run-7")).marks == ()


AWKWARD = ["AbC", "abc", "\u00e9", "e\u0301", "", "\0", "../x", "x" * 2000]
AWKWARD += ["\ud800", "\udfff\ud800", "\ud83d\ude00", "\U0001f600"]  # the last two look the same in JSON


def test_awkward_ids_stay_apart_and_come_back_exactly(spill: Spill) -> None:
    """Ids that a file system folds, normalises or refuses are restored from inside the file, each as itself."""
    marks = [numbered(number, call=text, rollout=text) for number, text in enumerate(AWKWARD)]
    for mark in marks:
        spill.write(mark)
    assert list(spill.pending().marks) == marks
    for mark in marks:
        assert spill.pending(rollout=mark.rollout).marks == (mark,)
    folded = {unicodedata.normalize("NFC", name).casefold() for name in files(spill.directory)}
    assert len(folded) == len(marks)
    assert all(re.fullmatch(r"[0-9a-f]{16}-[0-9a-f]{16}-[0-9a-f]{32}\.mark", name) for name in folded)


ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=12)


@settings(max_examples=40, deadline=None)
@given(call=ANY_TEXT, reason=ANY_TEXT, at=st.floats(allow_nan=False, allow_infinity=False))
def test_any_text_and_time_round_trips(call: str, reason: str, at: float) -> None:
    """Whatever strings and finite time a mark holds, the scan returns them unchanged, late ones too."""
    mark = replace(MARK, call=call, reason=reason, at=at)
    with tempfile.TemporaryDirectory() as directory:
        spill = Spill(Path(directory))
        spill.write(mark)
        assert spill.pending().marks == (mark,)
        assert spill.set_late(mark, call)
        assert spill.late() == [(mark, call)]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"mark_id": ""}, ValueError),
        ({"mark_id": "AB"}, ValueError),
        ({"mark_id": "../ab"}, ValueError),
        ({"mark_id": "a" * 65}, ValueError),
        ({"at": float("nan")}, ValueError),
        ({"at": "now"}, TypeError),
        ({"reason": None}, TypeError),
    ],
)
def test_a_mark_that_could_not_come_back_is_refused(change: dict[str, Any], error: type[Exception]) -> None:
    """A value that the file or its name cannot carry is refused when the mark is made."""
    with pytest.raises(error):
        replace(MARK, **change)


def test_the_longest_name_leaves_room_on_every_file_system(spill: Spill) -> None:
    """Names, temp and set-aside ones included, stay below the 143 bytes that the strictest systems allow."""
    path = spill.write(replace(MARK, mark_id="f" * 64))
    path.write_bytes(b"broken")
    (aside,) = spill.pending().damaged
    assert len(path.name) < len(aside.name) <= 143


def test_a_relative_directory_is_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chdir after construction does not split the spill in two."""
    monkeypatch.chdir(tmp_path)
    spill = Spill(Path("spill"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert spill.write(MARK).parent == tmp_path / "spill"


# ---- late marks ---------------------------------------------------------------------------------------


def test_a_late_mark_is_kept_with_its_reason(spill: Spill) -> None:
    """A late mark is no longer pending, is never lost, and keeps the first reason when told again."""
    spill.write(numbered(2))
    spill.write(numbered(1))
    assert spill.set_late(numbered(2), "retired before it could be published")
    assert spill.set_late(numbered(1), "retired \ud800")
    assert spill.set_late(numbered(2), "another reason")
    assert spill.pending().marks == ()
    assert spill.late() == [
        (numbered(1), "retired \ud800"),
        (numbered(2), "retired before it could be published"),
    ]


def test_an_unreadable_late_file_hides_no_other(spill: Spill, caplog: pytest.LogCaptureFixture) -> None:
    """Damage in late/ is left in place and logged, and the other late marks are still listed."""
    for number in (1, 2):
        assert spill.set_late(numbered(number), "retired")
    victim = next((spill.directory / "late").iterdir())
    victim.write_bytes(b"{}")
    assert len(spill.late()) == 1
    assert victim.exists()
    assert victim.name in caplog.text


# ---- durability ---------------------------------------------------------------------------------------


def test_order_of_effects(spill: Spill, monkeypatch: pytest.MonkeyPatch) -> None:
    """File synced, then renamed, then directory synced; each directory made is synced in its parent, all before return.

    Only a power cut shows a wrong order, so the order itself is what can be asserted.
    """
    deep = Spill(spill.directory / "x" / "y")
    events: list[tuple[str, str]] = []
    real_fsync, real_rename, real_mkdir = os.fsync, os.rename, os.mkdir

    def fsync(fd: int) -> None:
        status = os.fstat(fd)
        known = {path.stat().st_ino: str(path) for path in (deep.directory, *deep.directory.parents) if path.exists()}
        events.append(("fsync", known[status.st_ino] if stat.S_ISDIR(status.st_mode) else "file"))
        real_fsync(fd)

    def rename(*args: Any, **kwargs: Any) -> None:
        events.append(("rename", ""))
        real_rename(*args, **kwargs)

    def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
        real_mkdir(path, *args, **kwargs)
        events.append(("mkdir", str(path)))

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(os, "mkdir", mkdir)
    deep.write(MARK)

    own = ("fsync", str(deep.directory))
    file, renamed, synced = events.index(("fsync", "file")), events.index(("rename", "")), events.index(own)
    assert file < renamed < synced
    made = [Path(where) for what, where in events if what == "mkdir"]
    assert made == [spill.directory, spill.directory / "x", deep.directory]
    appears = events.index(("mkdir", str(deep.directory)))
    for directory in made[:-1]:
        entry = events.index(("fsync", str(directory.parent)))
        assert events.index(("mkdir", str(directory))) < entry < appears
    assert ("fsync", str(deep.directory.parent)) in events[appears:]

    events.clear()
    deep.write(MARK)
    assert own in events  # the file was there, yet its writer may have died before this


def test_late_order_of_effects(spill: Spill, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy in late/ and the directories that hold it are synced before the original is removed."""
    spill.write(MARK)
    events: list[str] = []
    real_fsync, real_unlink = os.fsync, os.unlink

    def fsync(fd: int) -> None:
        status = os.fstat(fd)
        known = {path.stat().st_ino: path.name for path in (spill.directory, spill.directory / "late")}
        events.append(known.get(status.st_ino, "file"))
        real_fsync(fd)

    def unlink(*args: Any, **kwargs: Any) -> None:
        events.append("unlink")
        real_unlink(*args, **kwargs)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "unlink", unlink)
    assert spill.set_late(MARK, "retired")
    assert events == ["file", "late", "spill", "unlink"]


CHILD = """
import os, signal, sys
from pathlib import Path
from s3capture.spill import Spill, SpilledMark
directory, operation, name, nth, when = sys.argv[1:]
mark = SpilledMark("bucket", "a/prefix", "http://127.0.0.1:9000", "run-7", "7-3", "0f" * 16, "ab" * 16,
                   1700000000.25, "put failed: no answer within 5 s", "worker-1:4242")
real, calls = getattr(os, name), 0
def fatal(*args, **kwargs):
    global calls
    calls += 1
    if calls == int(nth):
        if when == "half":
            real(args[0], args[1][: len(args[1]) // 2])
        if when == "after":
            real(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **kwargs)
setattr(os, name, fatal)
spill = Spill(Path(directory))
spill.write(mark) if operation == "write" else spill.set_late(mark, "retired")
os.write(1, b"acknowledged")
"""

STEPS = [
    ("write", 1, "half"),
    *((name, 1, when) for name in ("write", "rename") for when in ("before", "after")),
]
STEPS += [("fsync", nth, "before") for nth in (1, 2, 3)]


def killed_child(directory: Path, operation: str, step: tuple[str, int, str]) -> None:
    name, nth, when = step
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(directory), operation, name, str(nth), when],
        env=ENVIRONMENT, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert child.stdout == b""


@pytest.mark.parametrize("step", STEPS, ids=lambda step: "-".join(map(str, step)))
def test_kill_at_each_step_of_a_write(spill: Spill, step: tuple[str, int, str]) -> None:
    """A process killed at any step leaves no mark or a whole one, and the next writer is not in its way."""
    spill.directory.mkdir(mode=0o700)
    killed_child(spill.directory, "write", step)
    scan = spill.pending()
    renamed = step == ("rename", 1, "after") or step in (("fsync", 2, "before"), ("fsync", 3, "before"))
    assert scan == spill_module.SpillScan(marks=(MARK,) if renamed else ())
    spill.write(MARK)
    assert spill.pending().marks == (MARK,)


@pytest.mark.parametrize(
    "step",
    [*STEPS, ("unlink", 1, "before"), ("unlink", 1, "after")],
    ids=lambda step: "-".join(map(str, step)),
)
def test_kill_at_each_step_of_setting_late(spill: Spill, step: tuple[str, int, str]) -> None:
    """A process killed while it sets a mark late leaves it pending, or late, or both, and never neither."""
    spill.write(MARK)
    killed_child(spill.directory, "late", step)
    waiting, late = spill.pending().marks, spill.late()
    assert waiting == (MARK,) or late == [(MARK, "retired")]
    assert spill.set_late(MARK, "retired")
    assert (spill.pending().marks, spill.late()) == ((), [(MARK, "retired")])


def test_short_writes_are_continued(spill: Spill, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes a few bytes at a time still ends with the whole mark."""
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:5]))
    spill.write(MARK)
    assert spill.pending().marks == (MARK,)


def failing(real: Callable[..., Any], code: int, *, when: Callable[[int], bool]) -> Callable[..., Any]:
    def fail(fd: int, *args: Any) -> Any:
        if when(fd):
            raise OSError(code, os.strerror(code))
        return real(fd, *args)

    return fail


def is_directory(fd: int) -> bool:
    return stat.S_ISDIR(os.fstat(fd).st_mode)


def test_a_disk_that_fills_up_midway(spill: Spill, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOSPC after a short write raises SpillError, leaves no file at all, and a later write with space works."""
    real = os.write
    calls: list[int] = []

    def write(fd: int, data: bytes) -> int:
        calls.append(fd)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data[:7])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        with pytest.raises(SpillError, match="No space left"):
            spill.write(MARK)
    assert list(spill.directory.iterdir()) == []
    spill.write(MARK)
    assert spill.pending().marks == (MARK,)


FULL_DISK = """
import errno, os, sys
from pathlib import Path
from s3capture.errors import SpillError
from s3capture.spill import Spill, SpilledMark
root = Path(sys.argv[1])
def mark(number, **changes):
    return SpilledMark("bucket", "", None, "run-7", "7-3", "c" * 9000, f"{number:x}", float(number), "r", "b")
spill = Spill(root / "spill")
spill.write(mark(0))
filler = os.open(root / "filler", os.O_WRONLY | os.O_CREAT)
try:
    while True:
        os.write(filler, b"x" * 4096)
except OSError as error:
    assert error.errno == errno.ENOSPC
os.ftruncate(filler, os.fstat(filler).st_size - 4096)  # room for part of a mark
try:
    spill.write(mark(1))
except SpillError as error:
    assert error.__cause__.errno == errno.ENOSPC, error
else:
    raise AssertionError("the disk was not full")
assert len(os.listdir(spill.directory)) == 1, os.listdir(spill.directory)
assert spill.pending().marks == (mark(0),)
assert not spill.set_late(mark(0), "retired") and spill.pending().marks == (mark(0),)
os.ftruncate(filler, 0)
spill.write(mark(1))
assert spill.pending().marks == (mark(0), mark(1))
"""


@pytest.mark.skipif(
    not (LINUX and os.geteuid() == 0 and shutil.which("unshare")),
    reason="needs root to mount a small file system",
)
def test_a_really_full_file_system(tmp_path: Path) -> None:
    """On a full 64 KB file system a write fails whole, nothing kept is lost, and space makes it work again."""
    script = 'mount -t tmpfs -o size=64k none "$1" || exit 77; exec "$2" -c "$3" "$1"'
    child = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", str(tmp_path), sys.executable, FULL_DISK],
        env=ENVIRONMENT, capture_output=True, timeout=60, check=False, text=True,
    )  # fmt: skip
    if child.returncode == 77 or "unshare failed" in child.stderr:
        pytest.skip("this container may not mount")
    assert child.returncode == 0, child.stderr


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_directory_that_cannot_be_synced(
    spill: Spill, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    """Where directories know no fsync the mark is kept all the same, with one warning for the directory."""
    monkeypatch.setattr(os, "fsync", failing(os.fsync, code, when=is_directory))
    spill.write(numbered(1))
    spill.write(numbered(2))
    assert len(spill.pending().marks) == 2
    assert sum("cannot be synced" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("when", [is_directory, lambda fd: not is_directory(fd)], ids=["directory", "file"])
def test_a_failed_sync_is_no_acknowledgement(
    spill: Spill, monkeypatch: pytest.MonkeyPatch, when: Callable[[int], bool]
) -> None:
    """An I/O error of either fsync raises SpillError, and no temp file stays."""
    spill.directory.mkdir(mode=0o700)
    monkeypatch.setattr(os, "fsync", failing(os.fsync, errno.EIO, when=when))
    with pytest.raises(SpillError, match="Input/output error"):
        spill.write(MARK)
    assert not [name for name in files(spill.directory) if not name.endswith(".mark")]


def test_a_failed_rename_leaves_nothing(spill: Spill, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rename that fails raises SpillError, and the temp file is removed."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(SpillError, match="Read-only"):
        spill.write(MARK)
    assert list(spill.directory.iterdir()) == []


# ---- many writers -------------------------------------------------------------------------------------


def write_many(directory: str, first: int) -> None:
    for number in range(first, first + 60):
        Spill(Path(directory)).write(numbered(number))


def settle_many(directory: str, published: str) -> None:
    """Publish into ``published`` until the writers are done and nothing waits."""
    spill = Spill(Path(directory))
    while True:
        done = (Path(published) / "done").exists()
        scan = spill.pending()
        assert not scan.damaged and not scan.unread
        for mark in scan.marks:
            if int(mark.mark_id, 16) % 10 == 0:
                assert spill.set_late(mark, "retired")
            else:
                (Path(published) / mark.mark_id).touch()
                assert spill.settle(mark)
        if done and not scan.marks:
            return


def test_processes_write_scan_and_settle_at_once(spill: Spill, tmp_path: Path) -> None:
    """Two writers and two publishers on one directory lose no mark, see no damage, and none raises."""
    published = tmp_path / "published"
    published.mkdir()
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_many, args=(str(spill.directory), first)) for first in (0, 40)]
    settlers = [context.Process(target=settle_many, args=(str(spill.directory), str(published))) for _ in range(2)]
    for process in (*settlers, *writers):
        process.start()
    for process in writers:
        process.join()
    (published / "done").touch()
    for process in settlers:
        process.join()
    assert [process.exitcode for process in (*writers, *settlers)] == [0, 0, 0, 0]
    late = {mark.mark_id for mark, _ in spill.late()}
    assert {name for name in files(published) if name != "done"} | late == {f"{n:032x}" for n in range(100)}
    assert files(spill.directory) == []


# ---- damage -------------------------------------------------------------------------------------------


def test_every_flipped_or_missing_byte_is_noticed(spill: Spill) -> None:
    """No single damaged byte and no cut yields another mark; the file is set aside or left, never lost."""
    whole = spill.write(replace(MARK, call="\udc80")).read_bytes()
    (name,) = files(spill.directory)
    path = spill.directory / name
    flips = [(place, bit) for place in range(len(whole)) for bit in (1, 2, 0x20)]
    broken = [whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :] for at, bit in flips]
    broken += [whole[:length] for length in range(len(whole))] + [whole + b"\n", whole + whole]
    broken.append(whole.replace(b"1700000000.25", b"1" + b"0" * 400))  # more than a float can hold
    for count, content in enumerate(broken):
        path.write_bytes(content)
        scan = spill.pending()
        assert scan.marks == ()
        (kept,) = (*scan.damaged, *(left.path for left in scan.unread))
        assert kept.read_bytes() == content, count


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"[]\n",
        b'{"version":0,"kind":"mark","sha256":"","fields":{}}\n',
        b'{"version":true}\n',
    ],
)
def test_a_damaged_file_stops_no_other(spill: Spill, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Damage is moved to damaged/ under its own name and logged; whole marks beside it are still found."""
    bad = spill.write(numbered(1))
    spill.write(numbered(2))
    bad.write_bytes(content)
    scan = spill.pending()
    assert scan.marks == (numbered(2),)
    (aside,) = scan.damaged
    assert aside.parent == spill.directory / "damaged"
    assert aside.read_bytes() == content
    assert not bad.exists()
    assert bad.name in caplog.text
    assert spill.pending() == spill_module.SpillScan(marks=(numbered(2),))


def test_damage_never_overwrites_damage_and_still_names_its_rollout(spill: Spill) -> None:
    """The same file damaged twice is kept twice, and damaged() finds both by target and rollout."""
    for content in (b"one", b"two"):
        spill.write(MARK).write_bytes(content)
        spill.pending(target=MARK.target, rollout=MARK.rollout)
    kept = spill.damaged(target=MARK.target, rollout=MARK.rollout)
    assert sorted(path.read_bytes() for path in kept) == [b"one", b"two"]
    assert spill.damaged() == kept
    assert spill.damaged(rollout="another") == []


def test_a_damaged_file_is_healed_by_its_writer(spill: Spill) -> None:
    """Writing a mark whose file is damaged makes it whole: its being there is not taken for being kept."""
    spill.write(MARK).write_bytes(b"")
    spill.write(MARK)
    assert spill.pending() == spill_module.SpillScan(marks=(MARK,))


def test_a_file_healed_while_it_is_set_aside_goes_back(spill: Spill, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that makes the file whole between a scan's read and its move does not lose the mark."""
    spill.write(MARK).write_bytes(b"")
    real = os.rename

    def rename(*args: Any, **kwargs: Any) -> None:
        monkeypatch.setattr(os, "rename", real)
        Spill(spill.directory).write(MARK)
        real(*args, **kwargs)

    monkeypatch.setattr(os, "rename", rename)
    assert spill.pending() == spill_module.SpillScan(marks=(MARK,))
    assert spill.pending() == spill_module.SpillScan(marks=(MARK,))
    assert spill.damaged() == []


def test_a_mark_under_a_wrong_name_is_set_aside(spill: Spill) -> None:
    """A copy under another name is no second mark: settling the mark would never remove it."""
    path = spill.write(MARK)
    shutil.copy(path, spill.directory / "copy.mark")
    scan = spill.pending()
    assert scan.marks == (MARK,)
    assert [aside.name[:9] for aside in scan.damaged] == ["copy.mark"]


@pytest.mark.parametrize("kind", ["pipe", "directory", "link"])
def test_what_is_no_regular_file_neither_blocks_nor_is_followed(spill: Spill, tmp_path: Path, kind: str) -> None:
    """A pipe, directory or link under the name of a mark is set aside without waiting on it or reading it."""
    path = spill.write(MARK)
    path.rename(tmp_path / "elsewhere")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "elsewhere")
    scan = spill.pending()
    assert (scan.marks, len(scan.damaged)) == ((), 1)


def test_a_newer_format_is_left_alone(spill: Spill) -> None:
    """A file of a newer version is reported, stays where it is, and is not written over."""
    path = spill.write(MARK)
    newer = path.read_bytes().replace(b'"version":1', b'"version":2')
    path.write_bytes(newer)
    spill.write(MARK)
    scan = spill.pending()
    assert (scan.marks, scan.damaged, [left.path for left in scan.unread]) == ((), (), [path])
    assert "format version 2" in scan.unread[0].why
    assert path.read_bytes() == newer


def test_a_file_that_may_not_be_read_is_left_alone(spill: Spill, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused read is no damage: the file is reported and stays (root is never refused, hence the patch)."""
    path = spill.write(numbered(1))
    spill.write(numbered(2))
    real = os.open

    def refuse(name: Any, *args: Any, **kwargs: Any) -> int:
        if name == path.name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(name, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    scan = spill.pending()
    assert (scan.marks, scan.damaged, [left.path for left in scan.unread]) == ((numbered(2),), (), [path])
    assert path.exists()


def test_temp_files_of_the_dead_are_removed_after_a_day(spill: Spill) -> None:
    """A temp file is never a mark; a fresh one may have a living writer and stays, one older than a day goes."""
    spill.write(MARK)
    old, fresh = (spill.directory / f".tmp-{digit * 32}" for digit in "01")
    for path in (old, fresh):
        path.write_bytes(b"{")
    os.utime(old, (time.time() - 25 * 3600,) * 2)
    assert spill.pending() == spill_module.SpillScan(marks=(MARK,))
    assert (old.exists(), fresh.exists()) == (False, True)


# ---- trust and errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_modes(spill: Spill, umask: int) -> None:
    """Directories are 0700 and files 0600, made parents and late/ and damaged/ included, whatever the umask."""
    deep = Spill(spill.directory / "below")
    before = os.umask(umask)
    try:
        deep.write(numbered(1)).write_bytes(b"broken")
        deep.pending()
        deep.write(numbered(1))
        deep.set_late(numbered(2), "retired")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (spill.directory, *spill.directory.rglob("*"))}
    assert {name for name, mode in modes.items() if mode == 0o700} == {"spill", "below", "late", "damaged"}
    assert {mode for name, mode in modes.items() if ".mark" in name} == {0o600}


@pytest.mark.parametrize("dangling", [False, True])
def test_a_symlink_is_refused(spill: Spill, tmp_path: Path, dangling: bool) -> None:
    """A spill directory that is a symbolic link is neither written to nor read, and nothing appears behind it."""
    behind = tmp_path / "behind"
    if not dangling:
        behind.mkdir(mode=0o700)
    spill.directory.symlink_to(behind)
    for action in (lambda: spill.write(MARK), spill.pending):
        with pytest.raises(SpillError, match="symbolic link"):
            action()
    assert behind.exists() is not dangling
    assert dangling or list(behind.iterdir()) == []


def test_a_linked_damaged_folder_stops_nothing(spill: Spill, tmp_path: Path) -> None:
    """When damage cannot be set aside safely it stays in place and is reported, beside the whole marks."""
    bad = spill.write(numbered(1))
    spill.write(numbered(2))
    bad.write_bytes(b"broken")
    (spill.directory / "damaged").symlink_to(tmp_path)
    scan = spill.pending()
    assert (scan.marks, scan.damaged, [left.path for left in scan.unread]) == ((numbered(2),), (), [bad])
    assert "symbolic link" in scan.unread[0].why


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_directory_that_others_may_write_is_refused(spill: Spill, mode: int) -> None:
    """Group- or world-writable directories are refused for writing and reading, naming the mode."""
    spill.directory.mkdir()
    spill.directory.chmod(mode)
    for action in (lambda: spill.write(MARK), spill.pending, spill.probe):
        with pytest.raises(SpillError, match=f"{mode:04o}"):
            action()
    assert list(spill.directory.iterdir()) == []


def test_a_directory_of_another_user_is_refused(spill: Spill, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that belongs to another uid is refused, naming both uids."""
    spill.write(MARK)
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    for action in (lambda: spill.write(MARK), spill.pending):
        with pytest.raises(SpillError, match=f"uid {other - 1}, and this process runs as uid {other}"):
            action()


def test_an_unwritable_place_is_told_in_full(tmp_path: Path) -> None:
    """The error names directory, cause, run, rollout and call, can be printed, and does not repeat a huge id."""
    (tmp_path / "file").touch()
    spill = Spill(tmp_path / "file" / "spill")
    with pytest.raises(SpillError) as caught:
        spill.write(replace(MARK, call="\ud800" + "c" * 5000))
    text = str(caught.value)
    for part in (str(spill.directory), os.strerror(errno.ENOTDIR), "'run-7'", "'7-3'", "'\\ud800ccc"):
        assert part in text
    assert len(text.encode()) < 1000
    with pytest.raises(SpillError, match="marks may wait there"):
        spill.pending()
    with pytest.raises(SpillError, match="cannot take a mark"):
        spill.probe()


def test_a_path_that_no_system_takes_is_a_spill_error(tmp_path: Path) -> None:
    """A null byte in the path is reported as any other failure to keep the mark."""
    with pytest.raises(SpillError, match="null"):
        Spill(tmp_path / "a\0b").write(MARK)


def test_a_probe_leaves_nothing_behind(spill: Spill) -> None:
    """A probe makes the directory, proves that it takes a file, and leaves it empty."""
    spill.probe()
    assert list(spill.directory.iterdir()) == []


def test_a_mark_that_cannot_be_removed_is_told_not_raised(
    spill: Spill, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """settle and set_late return False when the file stays, since nothing is lost by publishing it again."""
    path = spill.write(MARK)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "unlink", refuse)
    assert not spill.settle(MARK)
    assert not spill.set_late(MARK, "retired")
    assert spill.pending().marks == (MARK,)
    assert caplog.text.count(path.name) == 2


# ---- memory in disguise -------------------------------------------------------------------------------


MOUNTS = rb"""/dev/sda1 / ext4 rw 0 0
tmpfs /srv tmpfs rw 0 0
/dev/sdb1 /srv/disk xfs rw 0 0
none /srv/with\040space ramfs rw 0 0
tmpfs /srv/covered tmpfs rw 0 0
/dev/sdc1 /srv/covered ext4 rw 0 0
short line
"""


@pytest.mark.parametrize(
    ("directory", "kind"),
    [
        ("/srv/x", "tmpfs"),
        ("/srv", "tmpfs"),
        ("/srvx", None),
        ("/srv/disk/x", None),
        ("/srv/diskette", "tmpfs"),
        ("/srv/with space/x", "ramfs"),
        ("/srv/covered/x", None),
        ("/", None),
    ],
)
def test_the_file_system_under_a_directory(directory: str, kind: str | None) -> None:
    """The innermost, last mounted file system decides; a mount point matches whole segments only."""
    assert memory_file_system(Path(directory), MOUNTS) == kind


@pytest.mark.skipif(not LINUX or not os.path.ismount("/dev/shm"), reason="needs a tmpfs")
def test_a_spill_in_memory_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    """Marks written to a tmpfs are kept with one warning in the life of the process."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory, caplog.at_level(logging.WARNING):
        for number in (1, 2):
            Spill(Path(directory) / "spill").write(numbered(number))
    assert sum("lies in memory" in record.message for record in caplog.records) == 1
