"""Whether every object is the one that its key names: its digest again, and the ids in its header.

The rule of this module: an object that was copied or renamed is intact and a lie; only its header tells. Outcomes are
held to their key by ``bodies.read_outcome``, and to the seal's shortened ids here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from s3capture import codec
from s3capture.audit.chains import Marked
from s3capture.errors import CorruptObjectError
from s3capture.keys import Kind, ParsedKey, RolloutKeys, escape, parse
from s3capture.protocol import bodies

_SEAL_IDS = 40
"""To how many characters a seal cuts the ids that it carries, to stay small."""


def misplaced(keys: RolloutKeys, stored: Mapping[str, bytes]) -> Iterator[tuple[str, str]]:
    """Yield the key of each object that does not decode or belongs elsewhere, and what is wrong with it."""
    for key, body in stored.items():
        parsed = parse(keys.of.root, key)
        if parsed is None:
            continue
        try:
            problem = _problem(keys, parsed, codec.decode(key, body))
        except CorruptObjectError as error:
            problem = str(error)
        if problem:
            yield key, problem if problem.startswith(key) else f"{key}: {problem}"


def _problem(keys: RolloutKeys, parsed: ParsedKey, stored: codec.StoredObject) -> str:
    header = stored.header
    if stored.kind == bodies.SEAL:
        ids = (keys.of.run, keys.rollout_id[:_SEAL_IDS], parsed.call[:_SEAL_IDS])
        told = (header.get("run"), header.get("rollout"), header.get("segment"))
        return "" if told == ids else f"the seal says it is of call {told[2]!r} of {told[0]!r} / {told[1]!r}"
    if (header.get("run"), header.get("rollout")) != (keys.of.run, keys.rollout_id):
        return f"the object says it is of {header.get('run')!r} / {header.get('rollout')!r}"
    call = header.get("call")
    if parsed.call and not (isinstance(call, str) and escape(call) == parsed.call):
        return f"the object says it is of call {call!r}"
    expected = {Kind.CALL: (bodies.ENTRY, bodies.REFUSAL), Kind.CONFLICT: (bodies.ENTRY, bodies.REFUSAL)}
    if stored.kind not in expected.get(parsed.kind, (str(parsed.kind),)):
        return f"holds a {stored.kind!r}"
    if parsed.kind is Kind.CONFLICT and stored.digest != parsed.detail:
        return f"holds the payload {stored.digest}"
    return ""


def refused_payloads(keys: RolloutKeys, stored: Mapping[str, bytes]) -> dict[str, tuple[Marked, ...]]:
    """What the conflicts of a rollout would have had their markers say, by call segment; damaged ones say nothing."""
    found: dict[str, tuple[Marked, ...]] = {}
    for key, body in stored.items():
        parsed = parse(keys.of.root, key)
        if parsed is None or parsed.kind is not Kind.CONFLICT:
            continue
        try:
            header = codec.decode(key, body).header
        except CorruptObjectError:
            continue
        marked = Marked(str(header.get("fingerprint") or ""), str(header.get("identity") or ""))
        found[parsed.call] = (*found.get(parsed.call, ()), marked)
    return found
