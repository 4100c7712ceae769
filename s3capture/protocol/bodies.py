"""What the protocol writes: the body of each kind of object, encoded and decoded side by side.

The rule of this module: a body describes itself (kind, ids, who wrote it and when), and a body that is not
of the kind its key says is corrupt. Who and when come from the caller: nothing here reads a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from s3capture import codec
from s3capture.errors import CorruptObjectError
from s3capture.keys import RolloutKeys, escape

# A LIST shows sizes, not kinds. A seal is small by construction, so whoever must tell seals from entries
# reads the small outcomes and no others.
SEAL_LIMIT = 1024

ENTRY, REFUSAL, SEAL = "entry", "refusal", "seal"


@dataclass(frozen=True, slots=True)
class Origin:
    """Who acts: ``by`` names host and process, ``at`` is Unix seconds, ``nonce`` is unique to the operation."""

    by: str
    at: float
    nonce: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one call came to, ready to be created.

    ``identity`` decides whether two outcomes of one call are the same: the payload digest of an entry, the
    code of a refusal. ``fingerprint`` is the continuation fingerprint, empty when there is none.
    """

    call: str
    kind: str
    identity: str
    digest: str
    body: bytes
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The freeze decision: which outcomes, conflicts and marks are in the snapshot, by key segment."""

    snapshot_id: str
    outcomes: frozenset[str]
    conflicts: frozenset[tuple[str, str]]
    marks: frozenset[str]
    by: str
    at: float


def _ids(keys: RolloutKeys, call: str | None = None) -> dict[str, Any]:
    found = {"run": keys.of.run, "rollout": keys.rollout_id}
    return found if call is None else {**found, "call": call}


def _body(kind: str, keys: RolloutKeys, value: Mapping[str, Any], call: str | None = None) -> bytes:
    return codec.encode(kind, _ids(keys, call), codec.canonical(value))


def entry(keys: RolloutKeys, call: str, payload: codec.Payload, *, fingerprint: str, by: str) -> Outcome:
    """The outcome of a captured call."""
    fields = {**_ids(keys, call), "identity": payload.digest, "fingerprint": fingerprint, "by": by}
    body = codec.encode(ENTRY, fields, payload)
    return Outcome(call, ENTRY, payload.digest, payload.digest, body, fingerprint)


def refusal(keys: RolloutKeys, call: str, record: Mapping[str, Any], *, by: str) -> Outcome:
    """The outcome of a call that the engine refused; the same code is the same refusal (contract)."""
    payload = codec.canonical(record)
    identity = f"refusal:{codec.canonical(record.get('code')).digest}"
    body = codec.encode(REFUSAL, {**_ids(keys, call), "identity": identity, "by": by}, payload)
    return Outcome(call, REFUSAL, identity, payload.digest, body)


def seal(keys: RolloutKeys, segment: str, origin: Origin) -> bytes:
    """The outcome that a freezer or retirer gives to a begun call without one."""
    fields = {"run": keys.of.run, "rollout": keys.rollout_id[:40], "segment": segment[:40]}
    body = codec.encode(SEAL, fields, codec.canonical({"by": origin.by[:40], "at": origin.at}))
    if len(body) > SEAL_LIMIT:
        raise AssertionError(f"a seal of {len(body)} bytes breaks the bound that tells seals from entries")
    return body


def intent(keys: RolloutKeys, call: str, origin: Origin) -> bytes:
    """The announcement of a call."""
    return _body("intent", keys, {"by": origin.by, "at": origin.at}, call)


def mark(keys: RolloutKeys, call: str, origin: Origin, reason: str = "") -> bytes:
    """One incomplete marker; ``call`` may be empty."""
    return _body("mark", keys, {"by": origin.by, "at": origin.at, "reason": reason}, call)


def fence(kind: str, keys: RolloutKeys, origin: Origin, **value: Any) -> bytes:
    """An announcement or a decision without a manifest."""
    return _body(kind, keys, {"by": origin.by, "at": origin.at, **value})


def frozen(keys: RolloutKeys, manifest: Manifest) -> bytes:
    """The freeze decision."""
    value = {
        "snapshot_id": manifest.snapshot_id,
        "outcomes": sorted(manifest.outcomes),
        "conflicts": sorted(map(list, manifest.conflicts)),
        "marks": sorted(manifest.marks),
        "by": manifest.by,
        "at": manifest.at,
    }
    return _body("frozen", keys, value)


def conflict(keys: RolloutKeys, outcome: Outcome) -> tuple[str, bytes]:
    """The key and body of a payload that lost: the body is the losing outcome itself."""
    return keys.conflict(outcome.call, outcome.digest), outcome.body


def read(key: str, body: bytes, *kinds: str) -> codec.StoredObject:
    """Decode ``body`` and check that it is of one of ``kinds``."""
    stored = codec.decode(key, body)
    if stored.kind not in kinds:
        raise CorruptObjectError(f"{key}: holds a {stored.kind!r}, expected {' or '.join(kinds)}")
    return stored


def read_outcome(keys: RolloutKeys, segment: str, body: bytes) -> codec.StoredObject:
    """Decode an outcome and check that it belongs to the rollout and call that its key names."""
    key = keys.call_at(segment)
    stored = read(key, body, ENTRY, REFUSAL, SEAL)
    if stored.kind != SEAL:
        ids = (stored.header.get("run"), stored.header.get("rollout"))
        call = stored.header.get("call")
        if ids != (keys.of.run, keys.rollout_id) or not isinstance(call, str) or escape(call) != segment:
            raise CorruptObjectError(f"{key}: the object says it is call {call!r} of {ids[0]!r} / {ids[1]!r}")
    return stored


def read_manifest(keys: RolloutKeys, body: bytes) -> Manifest:
    """Decode the freeze decision."""
    value = read(keys.frozen, body, "frozen").value()
    try:
        return Manifest(
            snapshot_id=str(value["snapshot_id"]),
            outcomes=frozenset(map(str, value["outcomes"])),
            conflicts=frozenset((str(call), str(digest)) for call, digest in value["conflicts"]),
            marks=frozenset(map(str, value["marks"])),
            by=str(value["by"]),
            at=float(value["at"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptObjectError(f"{keys.frozen}: not a manifest ({error!r})") from error


def read_drop(keys: RolloutKeys, version: int, body: bytes) -> bool:
    """Decode the decision of a drop: was the version still the one it named?"""
    value = read(keys.drop(version), body, "drop").value()
    if not isinstance(value, dict) or not isinstance(value.get("retired"), bool):
        raise CorruptObjectError(f"{keys.drop(version)}: not a drop decision")
    return bool(value["retired"])
