"""The training-token records: one entry for a generated call, one refusal for a call that was never generated.

The rule of this module: an entry that breaks a rule of the contract never becomes an object, and
``check_entry`` finds the same faults in an entry whose fields were assigned afterwards. Every reader
trusts that; were a rule checked somewhere else only, a broken record could be acknowledged and the fault
would come out when the rollout is trained on.

Field names, defaults and rules are upstream's ``TokenEntry`` (nemo-gym 0.7.0; contract.md, "Records").
Token ids are vocabulary indices, log probabilities are natural logarithms, lengths count tokens, and
``created_at`` is in seconds since the epoch.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from s3capture.errors import UnstorableValueError

SCHEMA_VERSION = 1
"""The one version of ``TokenEntry`` that is written and read."""

DIGEST_VERSION = 1
"""The version in the header of a token digest."""

_DIGEST_DOMAIN = b"nemo-gym-tokens"
_EMPTY_DIGEST = hashlib.sha256(_DIGEST_DOMAIN).hexdigest()
_NAMEABLE_BITS = 128
_FLOAT_BITS = 1023


class ParentResolutionStatus(StrEnum):
    """What was decided, at request time, about the call that a request continues."""

    ROOT = "root"
    RESOLVED = "resolved"
    UNRESOLVED = "unresolved"


class TokenEntry(BaseModel):
    """The exact tokens of one model call, and where it stands in its rollout.

    Unknown fields are kept, and fields may be assigned after construction (``check_entry`` judges them).
    ``generation_log_probs`` holds one number for each of ``generation_token_ids``; ``output_items`` is the
    response without token arrays, and ``token_item_index`` says which of its items carried them.
    ``cum_len`` and ``digest`` describe prompt and generation in full, also when ``prompt_is_delta`` says
    that ``prompt_token_ids`` is only what follows the resolved parent's tokens. ``parent_resolution`` is
    None when the caller made no request-time decision. The ``continuation_*`` fields and
    ``fingerprint_version`` are written by ``stamp_continuation`` and are what a later request is matched by.
    """

    model_config = ConfigDict(extra="allow", protected_namespaces=(), hide_input_in_errors=True)

    schema_version: int = SCHEMA_VERSION
    rollout_id: str
    model_call_id: str
    model: str = ""
    prompt_token_ids: list[int]
    generation_token_ids: list[int]
    generation_log_probs: list[float]
    routed_experts: Any | None = None
    output_items: list[dict[str, Any]] = Field(default_factory=list)
    token_item_index: int | None = None
    response_id: str | None = None
    created_at: float = 0.0
    parent_call_id: str | None = None
    cum_len: int | None = None
    digest: str | None = None
    parent_resolution: ParentResolutionStatus | None = None
    continuation_fingerprint: str = ""
    continuation_context_len: int = 0
    continuation_context_digest: str = ""
    parent_resolution_reason: str = ""
    fingerprint_version: int | None = None
    prompt_is_delta: bool = False
    prefix_requested: bool = False
    prefix_supplied: bool = False

    @model_validator(mode="after")
    def _keep_the_rules(self) -> Self:
        for path, problem in _broken_rules(self):
            raise ValueError(f"{path}: {problem}")
        return self


class EngineRefusal(BaseModel):
    """A call that the engine refused before it generated anything, so that no entry can follow.

    ``code`` is the engine's own, None when it gave none. ``parent_call_id`` and ``parent_resolution`` are the
    request-time lineage decision, kept as given: the contract states no rule that ties them together here.
    """

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=(), hide_input_in_errors=True)

    model_call_id: str
    code: str | None = None
    created_at: float = 0.0
    parent_call_id: str | None = None
    parent_resolution: ParentResolutionStatus | None = None


def compute_digest(token_ids: Sequence[int]) -> str:
    """Return the SHA-256, 64 lower-case hex digits, of an exact token sequence.

    The bytes hashed are the domain ``nemo-gym-tokens``, then big-endian version (1 byte), count (8 bytes)
    and each id (8 bytes); the empty sequence hashes the domain alone (contract.md, "Records"). Raises
    ``UnstorableValueError`` (a ``ValueError``) naming the value when an id is negative, over 64 bits, or no
    whole number.
    """
    if not token_ids:
        return _EMPTY_DIGEST
    try:
        packed = array("Q", list(token_ids))
    except (OverflowError, TypeError):
        raise _bad_token_id(token_ids) from None
    if sys.byteorder == "little":
        packed.byteswap()
    header = struct.pack(">BQ", DIGEST_VERSION, len(packed))
    return hashlib.sha256(_DIGEST_DOMAIN + header + packed.tobytes()).hexdigest()


def cumulative_tokens(entry: TokenEntry) -> list[int]:
    """Return prompt and generation in full: what the prompt of a child of this call must start with.

    Raises ``ValueError`` for a delta, whose full prompt only its parents hold.
    """
    if entry.prompt_is_delta:
        raise ValueError(
            f"{_whose(entry)} stores a delta prompt: its full tokens need the chain of its parents "
            f"(next: {entry.parent_call_id!r})"
        )
    return [*entry.prompt_token_ids, *entry.generation_token_ids]


def stamp_lineage(
    entry: TokenEntry,
    parent_call_id: str | None,
    *,
    parent_resolution: ParentResolutionStatus | None = None,
    cumulative: list[int] | None = None,
) -> TokenEntry:
    """Write ``cum_len``, ``digest`` and the request-time parent decision into ``entry``, and return it.

    ``cumulative`` is prompt and generation in full; only a delta must be given it. Nothing is written when a
    ``ValueError`` is raised: the decision breaks a rule, or ``cumulative`` disagrees with the entry's arrays.
    """
    for path, problem in _broken_decision(parent_resolution, parent_call_id, entry.prompt_is_delta):
        raise ValueError(f"{path}: {problem} ({_whose(entry)})")
    if cumulative is None:
        cumulative = cumulative_tokens(entry)
    else:
        own = [*entry.prompt_token_ids, *entry.generation_token_ids]
        tail = cumulative[max(len(cumulative) - len(own), 0) :] if entry.prompt_is_delta else cumulative
        if tail != own:
            raise ValueError(
                f"the cumulative tokens given for {_whose(entry)} ({len(cumulative)} tokens) disagree with "
                f"the {len(own)} tokens of its own arrays"
            )
    digest = compute_digest(cumulative)
    entry.cum_len = len(cumulative)
    entry.digest = digest
    entry.parent_call_id = parent_call_id
    entry.parent_resolution = parent_resolution
    return entry


def check_entry(entry: object) -> None:
    """Raise ``UnstorableValueError`` with the path of the first field that breaks the record's rules.

    For entries whose fields were assigned after construction. ``entry`` may be any model of ``TokenEntry``'s
    shape; a field that it does not have is judged only where the contract requires it. Nothing is converted,
    so that what is stored comes back as itself: a bool, a string or a float is no token id, and None is no log
    probability, while any int (also beyond 64 bits), NaN and the infinities are kept. What lies inside
    ``output_items``, ``routed_experts`` and unknown fields is left to the codec.
    """
    for path, problem in _faults(entry):
        raise UnstorableValueError(path, f"{problem} ({_whose(entry)})")


_ABSENT: Any = object()
_INT = frozenset({int})
_NUMBER = frozenset({int, float})
_REQUIRED_STRINGS = ("rollout_id", "model_call_id")
_STRINGS = (
    "model",
    "continuation_fingerprint",
    "continuation_context_digest",
    "parent_resolution_reason",
)
_OPTIONAL_STRINGS = ("response_id", "parent_call_id", "digest")
_INTS = ("schema_version", "continuation_context_len")
_OPTIONAL_INTS = ("token_item_index", "cum_len", "fingerprint_version")
_FLAGS = ("prompt_is_delta", "prefix_requested", "prefix_supplied")
_Fault = tuple[str, str]


def _faults(entry: object) -> Iterator[_Fault]:
    """Yield every fault as path and problem; types come first, because the rules presuppose them."""
    for name in _REQUIRED_STRINGS:
        yield from _scalar_fault(entry, name, (str,), "a string", required=True)
    for name in _STRINGS:
        yield from _scalar_fault(entry, name, (str,), "a string")
    for name in _OPTIONAL_STRINGS:
        yield from _scalar_fault(entry, name, (str, type(None)), "a string or None")
    for name in _INTS:
        yield from _scalar_fault(entry, name, (int,), "an int")
    for name in _OPTIONAL_INTS:
        yield from _scalar_fault(entry, name, (int, type(None)), "an int or None")
    for name in _FLAGS:
        yield from _scalar_fault(entry, name, (bool,), "a bool")
    yield from _scalar_fault(entry, "created_at", (float, int), "a number")
    yield from _status_fault(entry)
    yield from _array_fault(entry, "prompt_token_ids", _INT, "an int")
    yield from _array_fault(entry, "generation_token_ids", _INT, "an int")
    yield from _array_fault(entry, "generation_log_probs", _NUMBER, "a float or an int")
    yield from _rounding_fault(entry)
    yield from _items_fault(entry)
    yield from _broken_rules(entry)


def _scalar_fault(
    entry: object, name: str, allowed: tuple[type, ...], wanted: str, *, required: bool = False
) -> Iterator[_Fault]:
    value = getattr(entry, name, _ABSENT)
    if value is _ABSENT:
        if required:
            yield name, "the entry has no such field"
    elif not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        yield name, f"is a {type(value).__name__}, not {wanted}"


def _status_fault(entry: object) -> Iterator[_Fault]:
    value = getattr(entry, "parent_resolution", None)
    # Another package's StrEnum of the same values is as good as ours: both are strings.
    if value is not None and not (isinstance(value, str) and value in list(ParentResolutionStatus)):
        yield "parent_resolution", f"{value!r} is none of {', '.join(ParentResolutionStatus)} or None"


def _array_fault(entry: object, name: str, allowed: frozenset[type], wanted: str) -> Iterator[_Fault]:
    values = getattr(entry, name, _ABSENT)
    if values is _ABSENT:
        yield name, "the entry has no such field"
    elif type(values) is not list:
        yield name, f"is a {type(values).__name__}, not a list"
    # Prompts reach 131,072 ids: this pass runs in C, and only a fault is worth a search.
    elif others := set(map(type, values)) - allowed:
        # A subclass (numpy.float64 is a float) is stored as the number that it is, but a bool is no number.
        strange = {kind for kind in others if kind is bool or not issubclass(kind, tuple(allowed))}
        for index, value in enumerate(values) if strange else ():
            if type(value) in strange:
                yield f"{name}[{index}]", f"is a {type(value).__name__}, not {wanted}"


def _rounding_fault(entry: Any) -> Iterator[_Fault]:
    """Yield each int that a reader, for whom the field is a float, would round or could not hold."""
    if type(entry.generation_log_probs) is not list:
        return
    numbers = [("created_at", getattr(entry, "created_at", 0.0))]
    if int in set(map(type, entry.generation_log_probs)):
        numbers += [(f"generation_log_probs[{i}]", value) for i, value in enumerate(entry.generation_log_probs)]
    for path, value in numbers:
        if type(value) is int and (value.bit_length() > _FLOAT_BITS or int(float(value)) != value):
            yield path, f"an int of {value.bit_length()} bits, which no float holds exactly"


def _items_fault(entry: object) -> Iterator[_Fault]:
    items = getattr(entry, "output_items", _ABSENT)
    if items is _ABSENT:
        return
    if type(items) is not list:
        yield "output_items", f"is a {type(items).__name__}, not a list"
        return
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            yield f"output_items[{index}]", f"is a {type(item).__name__}, not a dict"


def _broken_rules(entry: Any) -> Iterator[_Fault]:
    """Yield each rule of contract.md, "Records", that ``entry`` breaks; its types are right already."""
    version = getattr(entry, "schema_version", SCHEMA_VERSION)
    if version > SCHEMA_VERSION:
        yield (
            "schema_version",
            f"the record is of version {version} and this reader knows {SCHEMA_VERSION}; upgrade the reader",
        )
    if version < SCHEMA_VERSION:
        yield (
            "schema_version",
            f"the record is of version {version}, which was never released; write it again as {SCHEMA_VERSION}",
        )
    generated, log_probs = len(entry.generation_token_ids), len(entry.generation_log_probs)
    if generated != log_probs:
        yield (
            "generation_log_probs",
            f"there must be as many as generation_token_ids, yet there are {log_probs} for {generated}",
        )
    index, items = getattr(entry, "token_item_index", None), getattr(entry, "output_items", ())
    if index is not None and not 0 <= index < len(items):
        yield "token_item_index", f"{index} lies outside output_items, which holds {len(items)}"
    yield from _broken_decision(
        getattr(entry, "parent_resolution", None),
        getattr(entry, "parent_call_id", None),
        getattr(entry, "prompt_is_delta", False),
    )


def _broken_decision(status: str | None, parent_call_id: str | None, is_delta: bool) -> Iterator[_Fault]:
    """Yield each rule that the request-time parent decision breaks."""
    if status == ParentResolutionStatus.RESOLVED and not parent_call_id:
        yield "parent_call_id", "a resolved parent must be named"
    if status in (ParentResolutionStatus.ROOT, ParentResolutionStatus.UNRESOLVED) and parent_call_id is not None:
        yield "parent_call_id", f"{parent_call_id!r} is named, yet the parent decision is {str(status)!r}"
    if is_delta and status != ParentResolutionStatus.RESOLVED:
        yield "prompt_is_delta", "a delta prompt can only be rebuilt from a resolved parent, and there is none"


def _whose(entry: object) -> str:
    rollout_id, call_id = getattr(entry, "rollout_id", None), getattr(entry, "model_call_id", None)
    return f"model call {call_id!r} of rollout {rollout_id!r}"


def _bad_token_id(token_ids: Sequence[int]) -> UnstorableValueError:
    for index, value in enumerate(token_ids):
        path = f"token_ids[{index}]"
        if not isinstance(value, int):
            return UnstorableValueError(path, f"{value!r} is a {type(value).__name__}, not an int")
        if not 0 <= value < 2**64:
            bits = value.bit_length()
            shown = str(value) if bits <= _NAMEABLE_BITS else f"an int of {bits} bits"
            return UnstorableValueError(path, f"{shown} is not between 0 and 2**64 - 1, as a token id must be")
    return UnstorableValueError("token_ids", "holds a value that is no 64-bit token id")
