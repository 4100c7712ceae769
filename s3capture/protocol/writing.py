"""What a model server does: begin a call, put its outcome, mark the rollout incomplete.

The rule of this module: a writer creates first and looks second, and acknowledges (returns) only what every
later freeze will find. One round trip is enough for the first put of a call by the process whose ``begin_call``
created the intent: a freezer seals every begun call, so an outcome that could still be created was not sealed,
and the freezer's own seal will meet it. A retry loses that privilege: between two attempts the first outcome
may have been frozen, consumed and deleted.
"""

from __future__ import annotations

from s3capture.effects import Absent, Create, Created, Effect, Get, List, Steps
from s3capture.errors import ConflictingPayloadError
from s3capture.keys import RolloutKeys, escape
from s3capture.protocol import bodies
from s3capture.protocol.bodies import Origin, Outcome
from s3capture.protocol.freezing import closed_error, is_retired, retired_error, settle
from s3capture.protocol.retiring import finish_drop
from s3capture.protocol.steps import PATIENCE, contradiction, found, rows


def begin_call(keys: RolloutKeys, call: str, origin: Origin) -> Steps[bool]:
    """Announce a call; return whether *this* request created the intent, so that its put may be one trip.

    Raise the frozen or retired error when the rollout is closing or closed.
    """
    (made,) = yield (Create(keys.intent(call), bodies.intent(keys, call, origin)),)
    (closing,) = yield (Get(keys.closing),)
    if not isinstance(closing, Absent):
        raise (yield from closed_error(keys, f"begin of call {call!r}"))
    return isinstance(made, Created) and made.first_attempt


def put_outcome(keys: RolloutKeys, outcome: Outcome, origin: Origin, *, owned: bool) -> Steps[None]:
    """Create the outcome of a call; return when every later freeze and resolve will find it.

    ``owned`` is what ``begin_call`` returned, for the first put of that call only. Raise
    ``ConflictingPayloadError`` when the call has another outcome, the frozen or retired error behind a fence.
    """
    what = f"{'refusal' if outcome.kind == bodies.REFUSAL else 'put'} of call {outcome.call!r}"
    key = keys.call(outcome.call)
    effects: list[Effect] = [Create(key, outcome.body)]
    if outcome.fingerprint:
        # The marker's content tells one use of a call id from the next: a LIST shows only its time, to the second, and
        # its ETag, and a resolver that holds the call in memory has nothing else to notice an id deleted and reused.
        effects.append(Create(keys.lineage_call(outcome.fingerprint, outcome.call), outcome.identity.encode()))
    for _ in range(PATIENCE):
        answers = yield tuple(effects)
        made = answers[0]
        if isinstance(made, Created):
            if owned and made.first_attempt:
                return
            break
        owned = False
        (answer,) = yield (Get(key),)
        body = found(answer)
        if body is not None:
            same = yield from _compare(keys, outcome, body, what)
            if same:
                break
        else:
            # It existed and is gone: retired, so the fences judge; or deleted altogether, so the id is new.
            (closing,) = yield (Get(keys.closing),)
            if not isinstance(closing, Absent):
                raise (yield from closed_error(keys, what))
    else:
        raise contradiction(key)
    (closing,) = yield (Get(keys.closing),)
    if isinstance(closing, Absent):
        return
    manifest = yield from settle(keys, origin, what)
    if escape(outcome.call) not in manifest.outcomes:
        raise (yield from closed_error(keys, what))


def _compare(keys: RolloutKeys, outcome: Outcome, body: bytes, what: str) -> Steps[bool]:
    """Return True when the standing outcome is ours; raise when it is a seal or another payload."""
    stored = bodies.read_outcome(keys, escape(outcome.call), body)
    if stored.kind == bodies.SEAL:
        raise (yield from closed_error(keys, what))
    if stored.kind == outcome.kind and stored.header.get("identity") == outcome.identity:
        return True
    (closing,) = yield (Get(keys.closing),)
    if not isinstance(closing, Absent):
        # Behind the fence the verdict is given already; evidence against it would stale the snapshot.
        raise (yield from closed_error(keys, what))
    key, loser = bodies.conflict(keys, outcome)
    fingerprints = dict.fromkeys(filter(None, (outcome.fingerprint, str(stored.header.get("fingerprint") or ""))))
    markers = [Create(keys.lineage_conflict(fingerprint, outcome.call), b"") for fingerprint in fingerprints]
    yield (Create(key, loser), *markers)
    raise ConflictingPayloadError(
        f"{what} of rollout {keys.rollout_id!r}, run {keys.of.run!r}: conflicting payloads for one call id: "
        f"stored {stored.kind} {stored.digest}, refused {outcome.kind} {outcome.digest}; the rollout is masked. "
        "A retry must resend the same bytes"
    )


def mark_incomplete(keys: RolloutKeys, call: str, mark_id: str, body: bytes) -> Steps[None]:
    """Create one marker, so that every snapshot from now on is incomplete and of another version.

    ``mark_id`` is unique to the mark, so publishing it twice changes nothing. Raise the retired error when the
    rollout is retired; a drop that was announced and not decided is decided first, for whoever died.
    """
    yield (Create(keys.mark(mark_id), body),)
    (answer,) = yield (List(keys.fences),)
    seen = rows(keys, answer)
    gone = yield from is_retired(keys, seen)
    for version in sorted(seen.retiring - seen.drops):
        gone = (yield from finish_drop(keys, version)) or gone
    if gone:
        raise retired_error(keys, f"mark for call {call!r}")
