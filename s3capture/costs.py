"""What a bucket bills: storage classes with their minimums and overheads, and the requests of a run.

The rule of this module: pure arithmetic over prices that the caller may replace, and the one place where the requests
of each step stand as numbers; ``tests/test_costs.py`` counts them on the wire. An object below its class's minimum is
billed as the minimum, so a mean size says nothing: sizes are added one by one.

Bytes are bytes, GB and KB are what S3 bills by (2**30 and 2**10), money is US dollars, a month is a month.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from s3capture.errors import SettingsError

__all__ = ["CLASSES", "STEPS", "Requests", "Step", "StorageClass", "Usage", "prices", "storage_class"]

_GB = 2**30
_KB = 2**10

_COUNTED_BELOW = 256 * _KB
"""Sizes below are counted each for itself, those above only summed: no class has a minimum above it, and so the memory
of a ``Usage`` is bounded whatever is added."""

_PRICES = ("gb_month", "put_1000", "get_1000", "retrieval_gb")


@dataclass(frozen=True, slots=True)
class StorageClass:
    """How one storage class bills; raise ``SettingsError`` for what no class can have.

    ``gb_month`` is the price of a GB for a month; ``put_1000`` of 1,000 PUT or LIST requests, and of 1,000 objects
    that a lifecycle rule moves here; ``get_1000`` of reading 1,000 objects, their restore included where ``restore``
    says that one is needed first; ``retrieval_gb`` of a GB read. Each object is billed as at least ``minimum_bytes``,
    and as at least ``minimum_days`` of storage; ``overhead_bytes`` come on top of each at this price, and
    ``standard_overhead_bytes`` at ``standard_gb_month``.
    """

    name: str
    gb_month: float
    put_1000: float
    get_1000: float
    retrieval_gb: float = 0.0
    minimum_bytes: int = 0
    minimum_days: int = 0
    overhead_bytes: int = 0
    standard_overhead_bytes: int = 0
    standard_gb_month: float = 0.0
    restore: bool = False

    def __post_init__(self) -> None:
        for name in (*_PRICES, "standard_gb_month"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise SettingsError(f"the price {self.name}.{name} must be a number of dollars, 0 or more")
        if not 0 <= self.minimum_bytes <= _COUNTED_BELOW:
            raise SettingsError(f"{self.name}.minimum_bytes must be 0 to {_COUNTED_BELOW:,}")


CLASSES: Mapping[str, StorageClass] = MappingProxyType(
    {
        known.name: known
        for known in (
            StorageClass("STANDARD", 0.023, 0.005, 0.0004),
            StorageClass("STANDARD_IA", 0.0125, 0.01, 0.001, 0.01, minimum_bytes=128 * _KB, minimum_days=30),
            StorageClass("GLACIER_IR", 0.004, 0.02, 0.01, 0.03, minimum_bytes=128 * _KB, minimum_days=90),
            StorageClass(
                *("GLACIER", 0.0036, 0.03, 0.0504, 0.01),
                minimum_days=90,
                overhead_bytes=32 * _KB,
                standard_overhead_bytes=8 * _KB,
                standard_gb_month=0.023,
                restore=True,
            ),
            StorageClass(
                *("DEEP_ARCHIVE", 0.00099, 0.05, 0.1004, 0.02),
                minimum_days=180,
                overhead_bytes=32 * _KB,
                standard_overhead_bytes=8 * _KB,
                standard_gb_month=0.023,
                restore=True,
            ),
        )
    }
)
"""Example prices: AWS, us-east-1, first tier, as docs/operations.md says with date and source. Give your own."""


def prices(texts: Iterable[str]) -> dict[str, float]:
    """Parse ``CLASS=DOLLARS`` (a GB for a month) and ``CLASS.PRICE=DOLLARS``; raise ``SettingsError``."""
    found: dict[str, float] = {}
    for text in texts:
        name, _, amount = text.partition("=")
        try:
            found[name.strip()] = float(amount)
        except ValueError:
            raise SettingsError(
                f"cannot read the price {text!r}: write CLASS=DOLLARS, such as GLACIER_IR=0.005, or "
                f"CLASS.PRICE=DOLLARS with one of {', '.join(_PRICES)}"
            ) from None
    for name in found:
        _class_and_price(name)
    return found


def storage_class(name: str, overrides: Mapping[str, float] | None = None) -> StorageClass:
    """Return the class ``name`` with the prices of ``overrides``, as ``prices`` parses them, in place of the examples.

    ``overrides`` may name other classes as well, which say nothing here, except that the price of STANDARD is also
    that of the overhead which the archive classes keep there. Raise ``SettingsError`` for an unknown class or price.
    """
    if name not in CLASSES:
        raise SettingsError(f"unknown storage class {name!r}; known are {', '.join(CLASSES)}")
    changed: dict[str, float] = {}
    for key, amount in (overrides or {}).items():
        of, price = _class_and_price(key)
        if of == name:
            changed[price] = amount
        if (of, price) == ("STANDARD", "gb_month") and CLASSES[name].standard_overhead_bytes:
            changed["standard_gb_month"] = amount
    return replace(CLASSES[name], **changed)  # type: ignore[arg-type] # every name in it is that of a price


def _class_and_price(key: str) -> tuple[str, str]:
    name, _, price = key.partition(".")
    if name not in CLASSES:
        raise SettingsError(f"unknown storage class {name!r} in the price {key!r}; known are {', '.join(CLASSES)}")
    if price and price not in _PRICES:
        raise SettingsError(f"unknown price {price!r} in {key!r}; known are {', '.join(_PRICES)}")
    return name, price or "gb_month"


class Usage:
    """Objects by size, to be priced in any class; its memory is bounded, whatever the number of objects."""

    def __init__(self) -> None:
        self._small: Counter[int] = Counter()
        self._large = 0
        self.objects = 0
        self.bytes = 0

    def add(self, size_bytes: int, count: int = 1) -> None:
        """Add ``count`` objects of ``size_bytes`` each."""
        if size_bytes < 0 or count < 0:
            raise ValueError(f"sizes and counts are 0 or more, not {size_bytes} and {count}")
        self.objects += count
        self.bytes += size_bytes * count
        if size_bytes < _COUNTED_BELOW:
            self._small[size_bytes] += count
        else:
            self._large += size_bytes * count

    def billed_bytes(self, storage: StorageClass) -> int:
        """Return the bytes that are billed: each object as at least the minimum, and all overheads."""
        least = storage.minimum_bytes
        small = sum(max(size, least) * count for size, count in self._small.items())
        overhead = storage.overhead_bytes + storage.standard_overhead_bytes
        return small + self._large + overhead * self.objects

    def monthly_cost(self, storage: StorageClass) -> float:
        """Return the dollars for one month."""
        at_standard = storage.standard_overhead_bytes * self.objects
        here = self.billed_bytes(storage) - at_standard
        return (here * storage.gb_month + at_standard * storage.standard_gb_month) / _GB

    def creation_cost(self, storage: StorageClass) -> float:
        """Return the dollars for creating all of them there, or for moving them there by a lifecycle rule."""
        return self.objects * storage.put_1000 / 1000

    def reading_cost(self, storage: StorageClass) -> float:
        """Return the dollars for reading all of them once within the region, restores included."""
        return self.objects * storage.get_1000 / 1000 + self.bytes * storage.retrieval_gb / _GB


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests by what they cost: deletes are free, and a create that is refused is a PUT."""

    put: int
    get: int
    list: int

    def __add__(self, other: Requests) -> Requests:
        return Requests(self.put + other.put, self.get + other.get, self.list + other.list)

    def __mul__(self, times: int) -> Requests:
        return Requests(self.put * times, self.get * times, self.list * times)

    def cost(self, storage: StorageClass) -> float:
        """Return their dollars at the prices of ``storage``."""
        return ((self.put + self.list) * storage.put_1000 + self.get * storage.get_1000) / 1000


@dataclass(frozen=True, slots=True)
class Step:
    """The requests of one step, and what each call of the rollout adds to it."""

    base: Requests
    for_each_call: Requests = Requests(0, 0, 0)

    def of(self, calls: int) -> Requests:
        """Return the requests of the step in a rollout of ``calls`` calls."""
        return self.base + self.for_each_call * calls


STEPS: Mapping[str, Step] = MappingProxyType(
    {
        "begin_call": Step(Requests(1, 1, 0)),
        "put": Step(Requests(2, 0, 0)),
        "put, not begun here": Step(Requests(2, 1, 0)),
        "resolve, in memory": Step(Requests(0, 0, 1)),
        "resolve, cold": Step(Requests(0, 1, 1)),
        "freeze": Step(Requests(2, 0, 2), Requests(0, 1, 0)),
        "drop": Step(Requests(2, 1, 3)),
        "retire, frozen": Step(Requests(2, 0, 2)),
    }
)
"""The budgets of docs/operations.md, as requests of each kind."""
