"""Replays as tables: one row a call, one row a rollout, with columns that keep their types.

The rule of this module: a column has one type in every file and every reader (Parquet and Ray share them), tokens are
64-bit integers and log probabilities doubles, exact to the bit. A change to a column raises ``TABLE_VERSION``, which
stands in the metadata of each file. Every call says whether its rollout is complete, so that no row is trained on
because someone forgot to join.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from s3capture.archive.needs import parquet
from s3capture.codec import canonical
from s3capture.replay.model import Problem, ProblemKind, ReplayedCall, ReplayedRollout

TABLE_VERSION = 1
VERSION_KEY = b"s3capture.table_version"

_MAX_INT64 = 2**63 - 1
_MAX_US = 253_402_300_800  # year 10,000, where the calendars of readers end


def arrow() -> Any:
    """Return pyarrow, or raise ``MissingExtraError`` that says what to install."""
    return parquet()[0]


_CALL: dict[str, tuple[str, Callable[[ReplayedRollout, ReplayedCall], Any]]] = {
    "run": ("string", lambda r, _: r.run),
    "rollout_id": ("string", lambda r, _: r.rollout_id),
    "model_call_id": ("string", lambda _, c: c.call_id),
    "position": ("int64", lambda _, c: c.position),
    "rollout_complete": ("bool", lambda r, _: not r.incomplete),
    "parent_call_id": ("string", lambda _, c: c.parent),
    "children": ("list<string>", lambda _, c: c.children),
    "terminal": ("bool", lambda _, c: c.terminal),
    "created_at": ("timestamp", lambda _, c: _microseconds(c.facts.created_at)),
    "created_at_s": ("double", lambda _, c: c.facts.created_at),
    "model": ("string", lambda _, c: _text(c.facts.model)),
    "response_id": ("string", lambda _, c: _text(c.facts.response_id)),
    "prompt_token_ids": ("list<int64>", lambda _, c: c.packed_prompt()),
    "generation_token_ids": ("list<int64>", lambda _, c: c.packed.generation),
    "generation_log_probs": ("list<double>", lambda _, c: c.packed.log_probs),
    "prompt_tokens": ("int64", lambda _, c: c.prompt_tokens),
    "generated_tokens": ("int64", lambda _, c: c.generated_tokens),
    "digest": ("string", lambda _, c: c.facts.digest),
    "prompt_was_delta": ("bool", lambda _, c: c.prompt_was_delta),
    "stored_prompt_tokens": ("int64", lambda _, c: c.stored_prompt_tokens),
    "parent_resolution": ("string", lambda _, c: _text(c.facts.parent_resolution)),
    "parent_resolution_reason": ("string", lambda _, c: _text(c.facts.parent_resolution_reason)),
    "recorded_parent_call_id": ("string", lambda _, c: _text(c.facts.parent_call_id)),
    "output_items": ("string", lambda _, c: _json(c.facts.output_items)),
    "token_item_index": ("int64", lambda _, c: c.facts.token_item_index),
    "routed_experts": ("string", lambda _, c: _json(c.facts.routed_experts)),
    "continuation_fingerprint": ("string", lambda _, c: _text(c.facts.continuation_fingerprint)),
    "continuation_context_len": ("int64", lambda _, c: c.facts.continuation_context_len),
    "continuation_context_digest": ("string", lambda _, c: _text(c.facts.continuation_context_digest)),
    "fingerprint_version": ("int64", lambda _, c: c.facts.fingerprint_version),
    "prefix_requested": ("bool", lambda _, c: c.facts.prefix_requested),
    "prefix_supplied": ("bool", lambda _, c: c.facts.prefix_supplied),
    "schema_version": ("int64", lambda _, c: c.facts.schema_version),
    "extra": ("string", lambda _, c: _json(c.facts.model_extra or None)),
}
_ROLLOUT: dict[str, tuple[str, Callable[[ReplayedRollout], Any]]] = {
    "run": ("string", lambda r: r.run),
    "rollout_id": ("string", lambda r: r.rollout_id),
    "state": ("string", lambda r: r.state),
    "archived": ("bool", lambda r: r.archived),
    "complete": ("bool", lambda r: not r.incomplete),
    "incomplete_reasons": ("list<string>", lambda r: r.reasons),
    "snapshot_id": ("string", lambda r: r.snapshot_id),
    "version": ("int64", lambda r: r.version),
    "changed_at": ("timestamp", lambda r: _microseconds(r.last_modified)),
    "calls": ("int64", lambda r: len(r.calls)),
    "prompt_tokens": ("int64", lambda r: sum(c.prompt_tokens for c in r.calls)),
    "generated_tokens": ("int64", lambda r: sum(c.generated_tokens for c in r.calls)),
    "roots": ("list<string>", lambda r: [_text(c.call_id) for c in r.calls if c.parent is None]),
    "terminal_calls": ("list<string>", lambda r: list(map(_text, r.terminal_calls))),
    "refusals": ("int64", lambda r: len(r.refusals)),
    "refused_calls": ("string", lambda r: _json([x.model_dump(mode="json") for x in r.refusals] or None)),
    "problems": ("list<string>", lambda r: [_text(f"{p.call or ''}: {p.kind}: {p.text}") for p in r.problems]),
}

CALL_COLUMNS: Mapping[str, str] = {name: kind for name, (kind, _) in _CALL.items()}
ROLLOUT_COLUMNS: Mapping[str, str] = {name: kind for name, (kind, _) in _ROLLOUT.items()}


def call_schema() -> Any:
    """The schema of a table of calls."""
    return _schema(CALL_COLUMNS)


def rollout_schema() -> Any:
    """The schema of a table of rollouts."""
    return _schema(ROLLOUT_COLUMNS)


class CallBatches:
    """Calls of many rollouts, gathered into tables of at most ``most_tokens`` tokens and ``most_rows`` rows.

    What waits for its table is packed, and small: a table of each rollout would take many times the memory.
    """

    def __init__(self, most_tokens: int, most_rows: int) -> None:
        self._most_tokens, self._most_rows = most_tokens, most_rows
        self._held: list[tuple[ReplayedRollout, ReplayedCall]] = []
        self._tokens = 0

    def add(self, rollout: ReplayedRollout, left_out: list[Problem]) -> Iterator[Any]:
        """Yield the tables that became full. A call that no table can hold is appended to ``left_out``.

        Those are calls with token ids above 2**63 - 1, and with ids that are no valid Unicode.
        """
        for call in rollout.calls:
            if (why := _unfit(call)) is not None:
                left_out.append(Problem(rollout.rollout_id, call.call_id, ProblemKind.INEXPRESSIBLE, why))
                continue
            count = call.prompt_tokens + call.generated_tokens
            if self._held and (self._tokens + count > self._most_tokens or len(self._held) >= self._most_rows):
                yield from self.rest()
            self._held.append((rollout, call))
            self._tokens += count

    def rest(self) -> Iterator[Any]:
        """Yield the table of what is held, if anything is."""
        if self._held:
            yield _call_table(self._held)
        self._held, self._tokens = [], 0


def rollout_row(rollout: ReplayedRollout) -> list[Any]:
    """Return the values of one rollout, for ``rollout_table``; they hold none of its calls."""
    return [value(rollout) for _, value in _ROLLOUT.values()]


def rollout_table(rows: Sequence[list[Any]]) -> Any:
    """Return a table of ``rows``, which ``rollout_row`` made."""
    pa = arrow()
    schema = rollout_schema()
    columns = [
        pa.array([row[number] for row in rows], type=schema.field(number).type) for number in range(len(_ROLLOUT))
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _call_table(held: Sequence[tuple[ReplayedRollout, ReplayedCall]]) -> Any:
    pa = arrow()
    schema = call_schema()
    columns = []
    for name, (kind, value) in _CALL.items():
        if kind in ("list<int64>", "list<double>"):
            columns.append(_lists((value(*pair) for pair in held), double=kind == "list<double>"))
        else:
            columns.append(pa.array([value(*pair) for pair in held], type=schema.field(name).type))
    return pa.Table.from_arrays(columns, schema=schema)


def _lists(values: Iterable[Any], *, double: bool) -> Any:
    """A list column without a Python object for each token."""
    pa = arrow()
    offsets, flat = array("i", [0]), bytearray()
    for value in values:
        flat += value.tobytes()
        offsets.append(len(flat) // 8)
    kind = pa.float64() if double else pa.int64()
    items = pa.Array.from_buffers(kind, offsets[-1], [None, pa.py_buffer(flat)])
    starts = pa.Array.from_buffers(pa.int32(), len(offsets), [None, pa.py_buffer(offsets)])
    return pa.ListArray.from_arrays(starts, items)


def _unfit(call: ReplayedCall) -> str | None:
    for tokens in (call.packed_prompt(), call.packed.generation):
        if not isinstance(tokens, array) or (tokens and max(tokens) > _MAX_INT64):
            return "it has token ids that no 64-bit column holds"
    facts = call.facts
    numbers = (facts.cum_len, facts.token_item_index, facts.continuation_context_len, facts.fingerprint_version)
    if any(number is not None and abs(number) > _MAX_INT64 for number in numbers):
        return "it has a number that no 64-bit column holds"
    if not all(map(_is_unicode, (call.call_id, facts.parent_call_id or "", *call.children))):
        return "its id, or that of a call it is tied to, is no valid Unicode"
    return None


def _is_unicode(text: str) -> bool:
    return text.isascii() or text.encode("utf-8", "replace") == text.encode("utf-8", "surrogatepass")


def _text(value: str | None) -> str | None:
    """Text for a column: a lone surrogate, which no column holds, is escaped as JSON would."""
    if value is None or _is_unicode(value):
        return None if value is None else str(value)
    return "".join(char if _is_unicode(char) else f"\\u{ord(char):04x}" for char in value)


def _json(value: Any) -> str | None:
    return None if value is None else canonical(value).data.decode("utf-8")


def _microseconds(seconds: float | None) -> int | None:
    """A timestamp, or None for what is no time: records carry whatever their writer gave them."""
    if seconds is None or not math.isfinite(seconds) or not 0 <= seconds < _MAX_US:
        return None
    return round(seconds * 1_000_000)


def _schema(columns: Mapping[str, str]) -> Any:
    pa = arrow()
    kinds = {
        "string": pa.string(),
        "bool": pa.bool_(),
        "int64": pa.int64(),
        "double": pa.float64(),
        "timestamp": pa.timestamp("us", tz="UTC"),
        "list<string>": pa.list_(pa.string()),
        "list<int64>": pa.list_(pa.int64()),
        "list<double>": pa.list_(pa.float64()),
    }
    fields = [pa.field(name, kinds[kind]) for name, kind in columns.items()]
    return pa.schema(fields, metadata={VERSION_KEY: str(TABLE_VERSION).encode()})
