"""Ledger rows as Gym's file ledger writes them, and as ours stores them.

The rule of this module: the two shapes are mapped into each other column by column, and a column that is not known is
refused. Gym's file keeps the stamps of a row (fingerprint, context) and not the items that they were made from, so
``KeptStamps`` hands them on as they are: a row that was imported is the very row that ``GymCaptureLedger`` would have
stored for the same commit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from s3capture.gymdir.layout import FINGERPRINT_VERSION
from s3capture.ledger_records import manifest_row
from s3capture.matching import NativeMatcher
from s3capture.source import first_line

_RECORD = {
    "parent_call_id": "parent_call_id",
    "prev_len": "prev_len",
    "delta_len": "delta_len",
    "cum_len": "cum_len",
    "weight_version": "weight_version",
    "staging_digest": "digest",
    "extras_digest": "extras_digest",
    "staging_key": "staging_key",
    "mode": "mode",
    "chain_hash": "chain_hash",
    "cumulative_hash": "cumulative_hash",
    "response_id": "response_id",
    "admitted_at": "admitted_at",
    "output_fingerprint": "output_fingerprint",
    "continuation_fingerprint": "continuation_fingerprint",
    "fingerprint_version": "fingerprint_version",
}
"""The columns of Gym's row that are fields of the record, with the names that the record gives them."""

_STAMPS = {"fingerprint": str, "context_len": int, "context_digest": str}
_COLUMNS = {"model_call_id", "digest", "staging_chain", *_STAMPS, *_RECORD}
_FAILURE = {"model_call_id", "failure_reason"}


@dataclass(frozen=True, slots=True)
class Failure:
    """A call whose capture did not complete."""

    call: str
    reason: str


@dataclass(frozen=True, slots=True)
class RawRecord:
    """A record that is handed to the ledger as it stands: old rows lack what the model demands.

    The manifest reports such a row as a failure of its call, in Gym as in ours.
    """

    values: Mapping[str, Any]

    @property
    def model_call_id(self) -> str:
        """See ``CallRecord``."""
        return str(self.values["model_call_id"])

    @property
    def staging_key(self) -> str:
        """See ``CallRecord``."""
        return str(self.values["staging_key"])

    @property
    def cum_len(self) -> int:
        """See ``CallRecord``."""
        return int(self.values["cum_len"])

    @property
    def cumulative_hash(self) -> str | None:
        """See ``CallRecord``."""
        found = self.values["cumulative_hash"]
        return None if found is None else str(found)

    def model_dump(self, *, mode: str = "json") -> dict[str, Any]:
        """The fields of the record."""
        del mode  # they came from JSON
        return dict(self.values)


@dataclass(frozen=True, slots=True)
class Row:
    """A committed call, in the shape that ``S3CaptureLedger.record`` takes; the stamps stand for the request."""

    rollout_id: str
    record: RawRecord
    staging_chain: tuple[str, ...]
    request_items: list[dict[str, Any]]
    response_items: list[dict[str, Any]]

    @property
    def call(self) -> str:
        """The call that was committed."""
        return self.record.model_call_id

    @property
    def fingerprint(self) -> str:
        """The continuation fingerprint; empty when the call said nothing."""
        return str(self.request_items[0]["fingerprint"])

    def value(self) -> dict[str, Any]:
        """What our ledger stores for it; its canonical digest is the identity of the row."""
        stamps = self.request_items[0]
        return {
            "record": self.record.model_dump(),
            "staging_chain": list(self.staging_chain),
            "fingerprint": stamps["fingerprint"],
            "fingerprint_version": FINGERPRINT_VERSION,
            "context_len": stamps["context_len"],
            "context_digest": stamps["context_digest"],
        }


class KeptStamps(NativeMatcher):
    """A matcher that writes the stamps which a ``Row`` carries in place of its request."""

    def stamp_continuation(self, entry: Any, request_items: Sequence[dict[str, Any]]) -> Any:
        """Copy the stamps; nothing is hashed."""
        (stamps,) = request_items
        entry.continuation_fingerprint = stamps["fingerprint"]
        entry.continuation_context_len = stamps["context_len"]
        entry.continuation_context_digest = stamps["context_digest"]
        entry.fingerprint_version = FINGERPRINT_VERSION
        return entry


def read_row(rollout_id: str, line: bytes) -> Row | Failure:
    """Return what one line of a ledger file says, or raise ``ValueError`` saying what is wrong with it."""
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}, not an object")
    call = value.get("model_call_id")
    if not isinstance(call, str) or not call:
        raise ValueError("model_call_id: not a string that names a call")
    if "failure_reason" in value:
        reason = value["failure_reason"]
        if not isinstance(reason, str) or not reason or value.keys() != _FAILURE:
            raise ValueError(f"a failure row of call {call!r} must hold a reason and nothing else")
        return Failure(call, reason)
    if unknown := sorted(value.keys() - _COLUMNS):
        raise ValueError(f"call {call!r}: 0.7.0 writes no column {unknown[0]!r} ({len(unknown)} are unknown)")
    if missing := sorted(_COLUMNS - value.keys()):
        raise ValueError(f"call {call!r}: column {missing[0]!r} is missing ({len(missing)} in all)")
    return _row(rollout_id, call, value)


def _row(rollout_id: str, call: str, value: Mapping[str, Any]) -> Row:
    record = {theirs: value[column] for column, theirs in _RECORD.items()}
    for name in ("output_fingerprint", "continuation_fingerprint"):
        record[name] = record[name] or None
    record["fingerprint_version"] = record["fingerprint_version"] or 0
    fields = {"schema_version": 2, "digest_version": 2, "extras_digest_version": 1, "model_call_id": call, **record}
    _check_record(call, fields)
    for name, kind in _STAMPS.items():
        if not isinstance(value[name], kind) or isinstance(value[name], bool):
            raise ValueError(f"call {call!r}: {name} is a {type(value[name]).__name__}, not a {kind.__name__}")
    if value["digest"] != record["cumulative_hash"]:
        raise ValueError(f"call {call!r}: digest and cumulative_hash are the same thing and differ")
    chain = value["staging_chain"] or []
    if not isinstance(chain, list) or not all(isinstance(key, str) and key for key in chain):
        raise ValueError(f"call {call!r}: staging_chain is no list of staging keys")
    stamps = {name: value[name] for name in _STAMPS}
    return Row(rollout_id, RawRecord(fields), tuple(chain), [stamps], [])


def _check_record(call: str, fields: dict[str, Any]) -> None:
    # What an old row may lack is filled in for the check only; all else must be as the model wants it.
    zeros = "0" * 64
    lacking = {"response_id": "-", "chain_hash": zeros, "cumulative_hash": zeros}
    try:
        manifest_row({**fields, **{name: fields[name] or value for name, value in lacking.items()}})
    except ValidationError as error:
        raise ValueError(f"call {call!r}: {first_line(error)}") from error


def dump_row(value: Mapping[str, Any]) -> bytes:
    """Return the line of Gym's ledger file for a row that ours stores."""
    record = value["record"]
    line = {
        "model_call_id": record["model_call_id"],
        "digest": record["cumulative_hash"],
        "staging_chain": list(value["staging_chain"]),
        **{name: value[name] for name in _STAMPS},
        **{column: record.get(theirs) for column, theirs in _RECORD.items()},
    }
    return _line(line)


def dump_failure(failure: Failure) -> bytes:
    """Return the line of Gym's ledger file for a failure."""
    return _line({"model_call_id": failure.call, "failure_reason": failure.reason})


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"
