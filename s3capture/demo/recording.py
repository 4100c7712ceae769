"""Recordings: JSON lines, one model call a line, read and checked whole before anything is played.

The rule of this module: a recording is judged line by line, every fault is told with file and line number, and one
with a fault is not played at all: half a recording would show "verified" for rollouts with holes in them. The
format is docs/recording-format.md. A recording is held in memory as the deltas that it consists of.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import zstandard
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from s3capture.demo.script import Call, Rollout, Script
from s3capture.errors import CaptureError, UnrepresentableHistoryError
from s3capture.ids import validate_rollout_id
from s3capture.matching import NativeMatcher

SHOWN_FAULTS = 20
MAX_LINE = 256 * 1024 * 1024
"""Bytes; a line is one call, and the largest calls known are under 1 MiB."""

_CHUNK = 1 << 16
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_MAX_TOKEN_ID = 2**63 - 1


class RecordingError(CaptureError):
    """A recording cannot be played; the message lists its faults, each with file and line."""


def _token_ids(value: Any) -> Any:
    if isinstance(value, list) and value:
        if set(map(type, value)) != {int}:
            raise ValueError("token ids must be whole numbers")
        if min(value) < 0 or max(value) > _MAX_TOKEN_ID:
            raise ValueError("token ids must lie between 0 and 2**63 - 1")
    return value


_TokenIds = Annotated[list[int], BeforeValidator(_token_ids)]
_Item = dict[str, Any]


class RecordedCall(BaseModel):
    """One line. Unknown fields are refused: what a demo would silently leave out, it could not verify."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    rollout_id: str
    model_call_id: str
    parent_call_id: str | None
    new_request_items: list[_Item]
    output_items: list[_Item]
    prompt_suffix_ids: _TokenIds
    generation_token_ids: _TokenIds
    generation_log_probs: list[float]
    token_item_index: int | None = None
    response_id: str | None = None
    created_at: float = Field(default=0.0, allow_inf_nan=False)
    model: str = ""

    @model_validator(mode="after")
    def _keep_the_rules(self) -> RecordedCall:
        generated, log_probs = len(self.generation_token_ids), len(self.generation_log_probs)
        if generated != log_probs:
            raise ValueError(f"{log_probs} generation_log_probs for {generated} generation_token_ids")
        if self.token_item_index is not None and not 0 <= self.token_item_index < len(self.output_items):
            raise ValueError(
                f"token_item_index {self.token_item_index} lies outside output_items, which holds "
                f"{len(self.output_items)}"
            )
        validate_rollout_id(self.rollout_id)
        return self


@dataclass(slots=True)
class _Reader:
    """Collects calls and faults over the lines of one file."""

    path: Path
    rollouts: dict[str, list[Call]] = field(default_factory=dict)
    lines: dict[str, dict[str, int]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    count: int = 0

    def fault(self, number: int, problem: str) -> None:
        self.count += 1
        if len(self.faults) < SHOWN_FAULTS:
            self.faults.append(f"{self.path}:{number}: {problem}")

    def take(self, number: int, line: bytes) -> None:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            self.fault(number, f"not JSON ({error}); write one JSON object a line")
            return
        if not isinstance(value, dict):
            self.fault(number, f"a JSON {type(value).__name__}, not an object; write one JSON object a line")
            return
        try:
            recorded = RecordedCall.model_validate(value)
        except ValidationError as error:
            for problem in _problems(error):
                self.fault(number, problem)
            # Its ids stand all the same, so that its children are not told to have no parent.
            if isinstance(value.get("rollout_id"), str) and isinstance(value.get("model_call_id"), str):
                self.lines.setdefault(value["rollout_id"], {}).setdefault(value["model_call_id"], number)
            return
        self._place(number, recorded)

    def _place(self, number: int, recorded: RecordedCall) -> None:
        known = self.lines.setdefault(recorded.rollout_id, {})
        call, parent = recorded.model_call_id, recorded.parent_call_id
        if call in known:
            self.fault(
                number,
                f"call {call!r} of rollout {recorded.rollout_id!r} stands on line {known[call]} already; "
                "give each call of a rollout an id of its own",
            )
            return
        if parent is not None and parent not in known:
            self.fault(number, self._no_parent(recorded, parent))
        known[call] = number
        try:
            NativeMatcher().fingerprint([*recorded.new_request_items, *recorded.output_items])
        except UnrepresentableHistoryError as error:
            self.fault(number, f"call {call!r}: {error}; mend that item")
        self.rollouts.setdefault(recorded.rollout_id, []).append(_call(recorded))

    def _no_parent(self, recorded: RecordedCall, parent: str) -> str:
        head = f"call {recorded.model_call_id!r} continues call {parent!r}, which"
        if parent == recorded.model_call_id:
            return f"{head} is itself; name the call before it, or null for a root"
        for rollout, calls in self.lines.items():
            if parent in calls:
                return (
                    f"{head} belongs to rollout {rollout!r} (line {calls[parent]}), not to {recorded.rollout_id!r}; "
                    "a parent must be a call of the same rollout"
                )
        return (
            f"{head} is on no line before this one; write parents before children, or mend the parent's line "
            "if it is reported above"
        )


def read_recording(path: Path, *, delta_every: int = 2) -> Script:
    """Read a recording (plain, gzip or zstd, told apart by their first bytes) or raise ``RecordingError``.

    Lines of different rollouts may be mixed; within a rollout parents come first. Every ``delta_every``-th
    call that has a parent is to be stored as a delta.
    """
    reader = _Reader(path)
    number = 0
    try:
        for number, line in enumerate(_lines(path), start=1):
            if line.strip():
                reader.take(number, line)
    except OSError as error:
        raise RecordingError(f"cannot read recording {path}: {error.strerror or error}") from error
    except (zlib.error, zstandard.ZstdError, _BrokenFileError) as error:
        reader.fault(number + 1, f"{error}; the file is cut short or damaged, so fetch or write it again")
    if reader.faults:
        hidden = reader.count - len(reader.faults)
        more = f"\n({hidden} more not shown)" if hidden else ""
        many = f"{reader.count} faults" if reader.count > 1 else "a fault"
        raise RecordingError(f"recording {path} has {many}; nothing was played\n" + "\n".join(reader.faults) + more)
    if not reader.rollouts:
        raise RecordingError(f"recording {path} holds no calls; see docs/recording-format.md for the format")
    return Script(f"recording {path.name}", _with_deltas(reader.rollouts, delta_every))


def write_recording(script: Script, path: Path) -> None:
    """Write the calls of ``script`` as a plain recording; twists and late calls have no place in one."""
    with path.open("wb") as file:
        for rollout in script.rollouts:
            for call in rollout.calls:
                recorded = RecordedCall(
                    rollout_id=rollout.rollout_id,
                    model_call_id=call.call_id,
                    parent_call_id=call.parent,
                    new_request_items=call.new_items,
                    output_items=call.output_items,
                    prompt_suffix_ids=call.suffix_ids,
                    generation_token_ids=call.generation_ids,
                    generation_log_probs=call.log_probs,
                    token_item_index=call.token_item_index,
                    response_id=call.response_id,
                    created_at=call.created_at,
                    model=call.model,
                )
                # The standard library, because it keeps what a log probability can be: -Infinity and NaN.
                file.write(json.dumps(recorded.model_dump(), separators=(",", ":")).encode("ascii") + b"\n")


def _with_deltas(rollouts: dict[str, list[Call]], every: int) -> list[Rollout]:
    continuations = itertools.count(1)
    return [
        Rollout(
            rollout_id,
            [
                call if call.parent is None else dataclasses.replace(call, delta=next(continuations) % every == 0)
                for call in calls
            ],
        )
        for rollout_id, calls in rollouts.items()
    ]


def _call(recorded: RecordedCall) -> Call:
    return Call(
        call_id=recorded.model_call_id,
        parent=recorded.parent_call_id,
        new_items=recorded.new_request_items,
        output_items=recorded.output_items,
        token_item_index=recorded.token_item_index,
        suffix_ids=recorded.prompt_suffix_ids,
        generation_ids=recorded.generation_token_ids,
        log_probs=recorded.generation_log_probs,
        response_id=recorded.response_id,
        created_at=recorded.created_at,
        model=recorded.model,
    )


# In the words of the format; the validator's own speak of inputs.
_WANTED = {
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "a JSON object",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a number, and neither NaN nor infinite",
}


def _problems(error: ValidationError) -> Iterator[str]:
    """What pydantic found, without the values: they could be token arrays."""
    for row in error.errors(include_input=False, include_url=False):
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in row["loc"]).lstrip(".")
        words = row["msg"].removeprefix("Value error, ")
        match row["type"]:
            case "extra_forbidden":
                yield f"unknown field {where!r}; the fields are {', '.join(RecordedCall.model_fields)}"
            case "missing":
                yield f"field {where!r} is missing"
            case kind if kind in _WANTED:
                yield f"{where}: must be {_WANTED[kind]}"
            case _:
                yield f"{where}: {words}" if where else words


class _BrokenFileError(Exception):
    """The bytes of the file end or go wrong where they should not."""


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of the unpacked file, the last one also without its newline."""
    held: list[bytes] = []
    size = 0
    for chunk in _unpacked(path):
        first, *others = chunk.split(b"\n")
        held.append(first)
        size += len(first)
        for piece in others:
            yield b"".join(held)
            held, size = [piece], len(piece)
        if size > MAX_LINE:
            raise _BrokenFileError(f"a line of more than {MAX_LINE:,} bytes")
    if size:
        yield b"".join(held)


def _unpacked(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        head = file.read(4)
        file.seek(0)
        if head.startswith(_GZIP):
            yield from _members(file, lambda: zlib.decompressobj(wbits=31), "gzip")
        elif head == _ZSTD:
            yield from _members(file, lambda: zstandard.ZstdDecompressor().decompressobj(), "zstd")
        else:
            yield from iter(lambda: file.read(_CHUNK), b"")


def _members(file: BinaryIO, make: Callable[[], Any], name: str) -> Iterator[bytes]:
    """Unpack one stream after another; a stream that does not reach its end is an error, never an end of file."""
    stream = make()
    while data := file.read(_CHUNK):
        while data:
            if stream.eof:
                stream = make()
            yield stream.decompress(data)
            data = stream.unused_data if stream.eof else b""
    if not stream.eof:
        raise _BrokenFileError(f"the {name} stream ends early")
