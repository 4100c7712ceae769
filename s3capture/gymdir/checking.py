"""Every line of a capture directory, judged before anything is written anywhere.

The rule of this module: what Gym's own reader would refuse, what would not come back as itself, and what contradicts
itself is a fault, told with file and line, and its rollout is left out. What Gym forgives (a torn last line, a line
twice, a state without an index) is forgiven here and told as a note. Records stay in the files: what is kept of each
is where it lies and its digest, so that memory is bounded by the largest rollout.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
from pydantic import ValidationError

from s3capture.codec import canonical
from s3capture.errors import CaptureError, UnstorableValueError
from s3capture.gymdir.chains import Chains
from s3capture.gymdir.checked import CheckedRollout, Line, Mark
from s3capture.gymdir.layout import (
    ENTRIES,
    INCOMPLETE,
    INTENTS,
    LEDGER,
    STATE,
    Fault,
    Files,
    GymState,
    check_quiet,
    read_state,
    scan,
)
from s3capture.gymdir.rows import Failure, Row, read_row
from s3capture.records import TokenEntry, check_entry
from s3capture.sink import entry_payload
from s3capture.source import first_line

DEFAULT_MAX_BYTES = 256 * 1024 * 1024
"""What the setting ``max_object_bytes`` is unless it is set."""
MAX_LINE: int = 1024 * 1024 * 1024
"""Bytes; what is longer is no record that an object could hold."""


def check_directory(
    root: Path,
    *,
    names: Callable[[str], bool] = lambda _: True,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Iterator[CheckedRollout]:
    """Yield every rollout of ``root`` whose id ``names`` takes, checked.

    ``max_bytes`` bounds a record as the setting ``max_object_bytes`` does. Raise ``SettingsError`` when ``root`` cannot
    be read, and ``DirectoryInUseError`` before the first rollout when a process holds any lock in it.
    """
    rollouts = [files for files in scan(root).rollouts if names(files.rollout_id)]
    for files in rollouts:
        check_quiet(files)
    for files in rollouts:
        yield check_rollout(files, max_bytes=max_bytes)


def check_rollout(files: Files, *, max_bytes: int = DEFAULT_MAX_BYTES) -> CheckedRollout:
    """Check one rollout; a file that cannot be read is a fault of it."""
    try:
        return _Check(files, max_bytes).run()
    except OSError as error:
        name = Path(str(error.filename)).name if error.filename else files.name(ENTRIES)
        return CheckedRollout(files, GymState(), faults=(Fault(name, None, f"cannot be read: {error.strerror}"),))


@dataclass(slots=True)
class _Check:
    files: Files
    max_bytes: int
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    chains: Chains = field(default_factory=Chains)

    def run(self) -> CheckedRollout:
        state = self._state()
        if state.retired:
            held = [suffix for suffix in (ENTRIES, INTENTS, INCOMPLETE) if self.files.size(suffix)]
            if held:
                self.notes.append(f"retired; {', '.join(map(self.files.name, held))} are left behind it and ignored")
            entries: dict[str, Line] = {}
            intents: list[str] = []
            marks: list[Mark] = []
        else:
            entries, intents, marks = self._entries(state), self._intents(), self._marks(state)
        rows, failures = self._ledger()
        found = CheckedRollout(
            self.files, state, tuple(entries.values()), tuple(intents), tuple(marks), tuple(rows), tuple(failures)
        )
        for broken in self.chains.broken():
            if broken.rootless and found.incomplete:
                self.note(ENTRIES, broken.number, f"{broken.problem}; the rollout is masked")
            else:
                self.fault(ENTRIES, broken.number, broken.problem)
        return dataclasses.replace(found, faults=tuple(self.faults), notes=tuple(self.notes))

    def note(self, suffix: str, number: int, text: str) -> None:
        self.notes.append(f"{self.files.name(suffix)}:{number}: {text}")

    def fault(self, suffix: str, number: int | None, problem: str) -> None:
        self.faults.append(Fault(self.files.name(suffix), number, problem))

    # -- state, intents, marks ----------------------------------------------------------------------------

    def _state(self) -> GymState:
        if not self.files.has(STATE):
            return GymState()
        try:
            return read_state(self._bytes(STATE))
        except ValueError as error:
            self.fault(STATE, None, f"not a state of Gym's: {error}")
            return GymState(digests=None, indexed=None)

    def _bytes(self, suffix: str) -> bytes:
        return self.files.path(suffix).read_bytes() if self.files.has(suffix) else b""

    def _intents(self) -> list[str]:
        found: dict[str, None] = {}
        for number, line in enumerate(self._bytes(INTENTS).splitlines(), 1):
            try:
                call = line.strip().decode("utf-8")
            except UnicodeDecodeError:
                self.fault(INTENTS, number, "not UTF-8, and Gym cannot freeze the rollout")
                continue
            if call:
                found.setdefault(call)
        return list(found)

    def _marks(self, state: GymState) -> list[Mark]:
        found: list[Mark] = []
        # An empty line is a mark that names no call, so only the end of the last line is no line of its own.
        lines = self._bytes(INCOMPLETE).removesuffix(b"\n").split(b"\n") if self.files.size(INCOMPLETE) else []
        for number, line in enumerate(lines, 1):
            found.append(self._mark(f"line {number}", line.decode("utf-8", "replace"), "marked by the caller"))
        if state.incomplete and not found:
            # Gym refuses a second payload of a call by the state alone, and a crash may leave a mark without its line.
            found.append(self._mark("state", "", "the state says incomplete and no marker says why"))
        elif found and not state.incomplete:
            self.notes.append("there are markers although the state says complete; the markers are believed")
        return found

    def _mark(self, place: str, call: str, why: str) -> Mark:
        name = f"{self.files.rollout_id}\0{place}\0{call}".encode("utf-8", "surrogatepass")
        return Mark(f"gym-{hashlib.sha256(name).hexdigest()[:32]}", call, f"{why}; from a capture directory of Gym")

    # -- records ------------------------------------------------------------------------------------------

    def _entries(self, state: GymState) -> dict[str, Line]:
        found: dict[str, Line] = {}
        starts = {0, self.files.size(ENTRIES)}
        for number, start, line in self._lines(ENTRIES):
            starts.add(start)
            payload = line.strip()
            if not payload:
                continue
            raw = hashlib.sha256(payload).hexdigest()
            judged = self._entry(number, start, line, state)
            if judged is None:
                continue
            entry, digest = judged
            call = entry.model_call_id
            if (wanted := (state.digests or {}).get(call)) not in (None, raw):
                self.fault(
                    ENTRIES, number, f"call {call!r}: the line has digest {raw}, the state's index says {wanted}"
                )
            elif call in found and found[call].digest == digest:
                self.note(ENTRIES, number, f"call {call!r} stands there twice")
            elif call in found:
                self.fault(ENTRIES, number, f"call {call!r} stands on line {found[call].number} with other content")
            else:
                found[call] = Line(call, number, start, len(line), digest, entry.continuation_fingerprint)
                self.chains.add(number, entry)
        self._check_index(state, found, starts)
        return found

    def _lines(self, suffix: str) -> Iterator[tuple[int, int, bytes]]:
        """The lines of a file with their number and offset, up to where it ended when it was first looked at."""
        if not self.files.has(suffix):
            return
        number, start, size = 0, 0, self.files.size(suffix)
        with self.files.path(suffix).open("rb") as handle:
            while start < size and (line := handle.readline(min(MAX_LINE, size - start))):
                number += 1
                if len(line) == MAX_LINE:
                    self.fault(suffix, number, f"longer than {MAX_LINE:,} bytes; nothing behind it was looked at")
                    return
                yield number, start, line
                start += len(line)

    def _entry(self, number: int, start: int, line: bytes, state: GymState) -> tuple[TokenEntry, str] | None:
        try:
            value = orjson.loads(line)
        except ValueError as error:
            last = not self._rest(start + len(line)).strip()
            if last and (state.indexed is None or start >= state.indexed):
                self.note(
                    ENTRIES,
                    number,
                    f"{len(line)} bytes of a line that was never finished and so never acknowledged; Gym drops it, and "
                    "so does this",
                )
            else:
                self.fault(ENTRIES, number, f"not JSON ({error})")
            return None
        try:
            return self._judged(value)
        except (CaptureError, ValueError) as error:
            self.fault(ENTRIES, number, str(error))
            return None

    def _rest(self, start: int) -> bytes:
        with self.files.path(ENTRIES).open("rb") as handle:
            handle.seek(start)
            return handle.read(4096)

    def _judged(self, value: Any) -> tuple[TokenEntry, str]:
        """The record, and the digest under which it will be stored."""
        entry = parse_entry(value)
        if entry.rollout_id != self.files.rollout_id:
            raise ValueError(f"call {entry.model_call_id!r} says it is of rollout {entry.rollout_id!r}")
        payload = entry_payload(entry)
        if (size := len(payload.data)) > self.max_bytes:
            raise ValueError(f"call {entry.model_call_id!r} has {size:,} bytes; max_object_bytes is {self.max_bytes:,}")
        return entry, payload.digest

    def _check_index(self, state: GymState, found: dict[str, Line], starts: set[int]) -> None:
        if state.digests is None or state.indexed is None:
            return
        lost = [call for call in state.digests if call not in found]
        size = self.files.size(ENTRIES)
        if not 0 <= state.indexed <= size:
            hint = "; a drop may have been cut short" if not size else ""
            self.fault(
                STATE, None, f"the index covers {state.indexed:,} bytes of records, and there are {size:,}{hint}"
            )
        elif state.indexed not in starts:
            self.fault(STATE, None, f"the index ends at byte {state.indexed:,}, which is within a line")
        if lost and not any(fault.file == self.files.name(ENTRIES) for fault in self.faults):
            self.fault(STATE, None, f"the index names call {lost[0]!r} ({len(lost)} in all), which has no line")

    # -- ledger -------------------------------------------------------------------------------------------

    def _ledger(self) -> tuple[list[Line], list[Failure]]:
        rows: dict[str, Line] = {}
        failures: dict[Failure, None] = {}
        for number, start, line in self._lines(LEDGER):
            if not line.strip():
                continue
            try:
                row = read_row(self.files.rollout_id, line)
                digest = canonical(row.value()).digest if isinstance(row, Row) else ""
            except (ValueError, RecursionError, CaptureError) as error:
                if not line.endswith(b"\n"):
                    self.note(
                        LEDGER,
                        number,
                        f"{len(line)} bytes of a row that was never finished and so never acknowledged are left out; "
                        "Gym itself cannot read the ledger with them",
                    )
                else:
                    self.fault(LEDGER, number, str(error))
                continue
            if isinstance(row, Failure):
                failures.setdefault(row)
            elif row.call not in rows:
                rows[row.call] = Line(row.call, number, start, len(line), digest, row.fingerprint)
            elif rows[row.call].digest != digest:
                self.fault(
                    LEDGER, number, f"call {row.call!r} stands on line {rows[row.call].number} with other content"
                )
        return list(rows.values()), list(failures)


def parse_entry(value: Any) -> TokenEntry:
    """Return the record that ``value`` (the JSON of a line) is, or raise ``ValueError`` naming the field at fault.

    Nothing is converted: a record that a lenient reader would bend into shape is not what was captured.
    """
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}, not an object")
    try:
        check_entry(SimpleNamespace(**value))
        return TokenEntry.model_validate(value)
    except UnstorableValueError as error:
        null = error.path.startswith("generation_log_probs") and "NoneType" in str(error)
        hint = "; Gym writes null for -inf, inf and NaN, and then cannot read the rollout either" if null else ""
        raise ValueError(f"{error}{hint}") from error
    except ValidationError as error:
        raise ValueError(first_line(error)) from error
