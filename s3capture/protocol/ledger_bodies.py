"""What the ledger writes: the body of each kind of object and what a LIST of one ledger says, side by side.

The rule of this module: a body describes itself, and one that is not of the kind and rollout its key says is
corrupt. Who and when come from the caller.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from s3capture import codec
from s3capture.effects import ObjectInfo
from s3capture.errors import CorruptObjectError
from s3capture.keys import Kind, LedgerKeys, parse
from s3capture.protocol.bodies import Origin

ROW, REFUSAL = "ledger-row", "ledger-refusal"


@dataclass(frozen=True, slots=True)
class LedgerSurvey:
    """One ledger as listed; calls are key segments."""

    intents: frozenset[str]
    outcomes: dict[str, ObjectInfo]
    failures: frozenset[tuple[str, str]]
    fences: frozenset[Kind]
    objects: tuple[ObjectInfo, ...]

    @property
    def retired(self) -> bool:
        """Whether the ledger was retired."""
        return Kind.LEDGER_RETIRED in self.fences

    @property
    def closed(self) -> bool:
        """Whether the admissions were decided."""
        return Kind.LEDGER_CLOSED in self.fences


@dataclass(frozen=True, slots=True)
class LedgerContents:
    """What the ledger holds: committed rows, refused calls, failure rows, and begun calls without an outcome.

    Rows and failures are the stored values by segment; ``admitted`` is None until the admissions are closed.
    """

    rows: dict[str, Any]
    refused: dict[str, Any]
    failures: tuple[Any, ...]
    unsettled: frozenset[str]
    intents: dict[str, str]
    admitted: frozenset[str] | None


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """A row ready to be created; ``identity`` is the digest of everything that must not change."""

    call: str
    kind: str
    identity: str
    body: bytes
    fingerprint: str = ""


def survey(keys: LedgerKeys, objects: Iterable[ObjectInfo]) -> LedgerSurvey:
    """Sort the rows of a LIST of ``keys.base`` by what they are."""
    rows = tuple(objects)
    parsed = [(p, row) for row in rows if (p := parse(keys.of.root, row.key)) is not None]
    fences = (Kind.LEDGER_CLOSING, Kind.LEDGER_CLOSED, Kind.LEDGER_RETIRED)
    return LedgerSurvey(
        intents=frozenset(p.call for p, _ in parsed if p.kind is Kind.LEDGER_INTENT),
        outcomes={p.call: row for p, row in parsed if p.kind is Kind.LEDGER_CALL},
        failures=frozenset((p.call, p.detail) for p, _ in parsed if p.kind is Kind.LEDGER_FAILURE),
        fences=frozenset(p.kind for p, _ in parsed if p.kind in fences),
        objects=rows,
    )


def row(keys: LedgerKeys, call: str, value: Mapping[str, Any], *, fingerprint: str, by: str) -> LedgerRow:
    """The committed row of a call."""
    payload = codec.canonical(value)
    body = codec.encode(ROW, {**ids(keys, call), "identity": payload.digest, "by": by}, payload)
    return LedgerRow(call, ROW, payload.digest, body, fingerprint)


def refusal(keys: LedgerKeys, call: str, origin: Origin) -> LedgerRow:
    """The settlement of a call that the worker refused before it generated or staged anything."""
    payload = codec.canonical({"model_call_id": call, "at": origin.at, "by": origin.by})
    body = codec.encode(REFUSAL, {**ids(keys, call), "identity": REFUSAL, "by": origin.by}, payload)
    return LedgerRow(call, REFUSAL, REFUSAL, body)


def ids(keys: LedgerKeys, call: str | None = None) -> dict[str, Any]:
    """The header fields that say what an object is about."""
    found = {"run": keys.of.run, "rollout": keys.rollout_id}
    return found if call is None else {**found, "call": call}


def intent(keys: LedgerKeys, call: str, origin: Origin) -> bytes:
    """The request of a call to be admitted."""
    return codec.encode("ledger-intent", ids(keys, call), codec.canonical({"by": origin.by, "at": origin.at}))


def failure(keys: LedgerKeys, call: str, reason: str, origin: Origin) -> tuple[str, bytes]:
    """The key and body of a failure row; the key holds the digest of the reason."""
    digest = hashlib.sha256(reason.encode("utf-8", "surrogatepass")).hexdigest()
    value = {"model_call_id": call, "reason": reason, "at": origin.at, "by": origin.by}
    return keys.failure(call, digest), codec.encode("ledger-failure", ids(keys, call), codec.canonical(value))


def fence(kind: str, keys: LedgerKeys, origin: Origin, **value: Any) -> bytes:
    """An announcement or a decision."""
    return codec.encode(kind, ids(keys), codec.canonical({"by": origin.by, "at": origin.at, **value}))


def read(keys: LedgerKeys, key: str, body: bytes, *kinds: str) -> codec.StoredObject:
    """Decode ``body`` and check that it is of one of ``kinds`` and of the rollout of ``keys``."""
    stored = codec.decode(key, body)
    if stored.kind not in kinds or stored.header.get("rollout") != keys.rollout_id:
        raise CorruptObjectError(
            f"{key}: holds a {stored.kind!r} of rollout {stored.header.get('rollout')!r}, "
            f"expected {' or '.join(kinds)} of {keys.rollout_id!r}"
        )
    return stored


def read_closed(keys: LedgerKeys, body: bytes) -> frozenset[str]:
    """The admitted calls (segments) of a closing decision."""
    value = read(keys, keys.closed, body, "ledger-closed").value()
    try:
        return frozenset(map(str, value["admitted"]))
    except (KeyError, TypeError) as error:
        raise CorruptObjectError(f"{keys.closed}: not a closing decision ({error!r})") from error
