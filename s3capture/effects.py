"""What the protocol may ask of the store, and what it is told: plain data.

The rule of this module: an effect is one atomic act on one key (or one LIST), and an answer says only
what the store knows. Protocol generators yield a *batch* of effects that may happen together in any
order, and receive the answers in the order of the batch. Nothing here performs anything.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar


@dataclass(frozen=True, slots=True)
class Create:
    """Create ``key`` if it is absent (If-None-Match: *)."""

    key: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Get:
    """Read the whole body of ``key``."""

    key: str


@dataclass(frozen=True, slots=True)
class List:
    """List every key that starts with ``prefix``; all pages, in no order, each key once."""

    prefix: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete ``keys``; an absent key is no failure. Not atomic: any subset may be gone at any time."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One row of a LIST. ``size`` is in bytes; ``stamp`` changes when the key was made anew, ``""`` means unknown."""

    key: str
    size: int
    stamp: str = ""


@dataclass(frozen=True, slots=True)
class Created:
    """The key was absent and now holds our body.

    ``first_attempt`` is False when an earlier wire attempt of the same effect ended in doubt: that one
    may have created the key, and someone may have deleted it since.
    """

    first_attempt: bool = True


@dataclass(frozen=True, slots=True)
class Exists:
    """The key was there already; whose body it holds, only a read can tell."""


@dataclass(frozen=True, slots=True)
class Found:
    """The body that was read."""

    body: bytes


@dataclass(frozen=True, slots=True)
class Absent:
    """No such key."""


@dataclass(frozen=True, slots=True)
class Listed:
    """The rows of a LIST; the order carries no meaning."""

    objects: tuple[ObjectInfo, ...]


@dataclass(frozen=True, slots=True)
class Deleted:
    """What a Delete left behind: ``(key, reason)`` for each key that is still there."""

    failed: tuple[tuple[str, str], ...] = ()


Effect: TypeAlias = Create | Get | List | Delete
Answer: TypeAlias = Created | Exists | Found | Absent | Listed | Deleted
Batch: TypeAlias = tuple[Effect, ...]

_T = TypeVar("_T")
Steps: TypeAlias = Generator[Batch, tuple[Answer, ...], _T]
