"""What a whole run costs: its requests step by step, and every way to keep what it captured.

The rule of this module: a run is described by counts and sizes alone, and becomes objects and requests here; what those
bill is the business of ``costs``. The objects are counted as the protocol makes them, which ``tests/test_costs.py``
holds against a real run; what an archive adds is an estimate, and the dry run of ``s3capture archive`` counts it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from s3capture.costs import CLASSES, STEPS, Requests, StorageClass, Usage, storage_class
from s3capture.errors import SettingsError

# Bytes of the objects beside a record, compressed; a manifest names each call.
_INTENT, _LINEAGE, _FENCE = 183, 64, 165
_MANIFEST, _MANIFEST_CALL = 230, 20
# A row of the index of a pack, compressed; and what is created for each pack beside it: its index, and that it is done.
_INDEX_ROW, _BESIDE_PACK = 64, 2


@dataclass(frozen=True, slots=True)
class Scenario:
    """A run to be priced. ``bytes_per_call`` is the stored size of a record, ``cold_share`` the part of the resolves,
    0 to 1, whose parent is not in memory; the first call of a rollout resolves to ROOT without a request."""

    rollouts: int
    calls_per_rollout: int
    bytes_per_call: int
    cold_share: float = 0.0
    pack_bytes: int = 64 * 10**6

    def __post_init__(self) -> None:
        counts = (self.rollouts, self.calls_per_rollout, self.bytes_per_call, self.pack_bytes)
        if min(counts) < 1 or not 0 <= self.cold_share <= 1:
            raise SettingsError("a run to be priced needs counts and sizes of at least 1 and a cold share of 0 to 1")

    @property
    def calls(self) -> int:
        """The calls of the whole run."""
        return self.rollouts * self.calls_per_rollout

    def kept(self) -> Usage:
        """The objects of the run once it is frozen and nothing was deleted."""
        usage = Usage()
        for size in (self.bytes_per_call, _INTENT, _LINEAGE):
            usage.add(size, self.calls)
        usage.add(_FENCE, self.rollouts)
        usage.add(_MANIFEST + _MANIFEST_CALL * self.calls_per_rollout, self.rollouts)
        return usage

    def packed(self) -> Usage:
        """The packs that hold the same; a pack is taken to be as large as what it holds."""
        usage, held = Usage(), self.kept().bytes
        whole, rest = divmod(held, self.pack_bytes)
        usage.add(self.pack_bytes, whole)
        if rest:
            usage.add(rest)
        return usage

    def beside_packs(self) -> Usage:
        """What stays beside the packs as small objects: their indexes, and the fences of the retired rollouts."""
        usage, packs = Usage(), self.packed().objects
        usage.add(max(self.kept().objects * _INDEX_ROW // packs, 1), packs)
        usage.add(_FENCE, packs)
        usage.add(_FENCE, 2 * self.rollouts)
        usage.add(_MANIFEST + _MANIFEST_CALL * self.calls_per_rollout, self.rollouts)
        return usage

    def dropped(self) -> Usage:
        """What stays of rollouts that were dropped: their fences."""
        usage = Usage()
        usage.add(_FENCE, 3 * self.rollouts)
        usage.add(_MANIFEST + _MANIFEST_CALL * self.calls_per_rollout, self.rollouts)
        return usage

    def archiving(self) -> Requests:
        """The requests of archiving: everything read once, packs created and read back, rollouts retired."""
        packs = self.packed().objects
        read = Requests(0, self.kept().objects + packs, self.rollouts)
        return read + Requests((1 + _BESIDE_PACK) * packs, 0, 0) + STEPS["retire, frozen"].base * self.rollouts


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One step of a run: how often, its requests in all, and their dollars."""

    step: str
    times: int
    put: int
    get: int
    list: int
    dollars: float


@dataclass(frozen=True, slots=True)
class StorageRow:
    """One way to keep a run: dollars a month, once for getting there, and for reading all of it back once."""

    kept_as: str
    storage_class: str
    objects: int
    bytes: int
    billed_bytes: int
    monthly_dollars: float
    once_dollars: float
    read_dollars: float
    minimum_days: int
    restore: bool


@dataclass(frozen=True, slots=True)
class Estimate:
    """``requests`` of the run step by step, ``total_dollars`` of them, and ``storage``, the ways to keep it."""

    requests: tuple[RequestRow, ...]
    total_dollars: float
    storage: tuple[StorageRow, ...]


def estimate(run: Scenario, overrides: Mapping[str, float] | None = None) -> Estimate:
    """Price a run: its capture and training, and then every way to keep what it captured."""
    standard = storage_class("STANDARD", overrides)
    continued = run.calls - run.rollouts
    cold = round(continued * run.cold_share)
    often = {
        "begin_call": run.calls,
        "resolve, in memory": continued - cold,
        "resolve, cold": cold,
        "put": run.calls,
        "freeze": run.rollouts,
        "drop": run.rollouts,
    }
    requests = []
    for step, times in often.items():
        of = STEPS[step].of(run.calls_per_rollout) * times
        requests.append(RequestRow(step, times, of.put, of.get, of.list, of.cost(standard)))
    return Estimate(tuple(requests), sum(row.dollars for row in requests), tuple(_ways(run, standard, overrides)))


def _ways(run: Scenario, standard: StorageClass, overrides: Mapping[str, float] | None) -> Iterator[StorageRow]:
    dropped, kept, packed, beside = run.dropped(), run.kept(), run.packed(), run.beside_packs()
    yield _row("dropped", standard, dropped, once=0.0)
    classes = [storage_class(name, overrides) for name in CLASSES]
    for one in classes:
        yield _row("small objects", one, kept, once=0.0 if one == standard else kept.creation_cost(one))
    archiving = run.archiving().cost(standard) - packed.creation_cost(standard)
    for one in classes:
        yield _row("packs", one, packed, once=archiving + packed.creation_cost(one), beside=(beside, standard))


def _row(
    kept_as: str, one: StorageClass, usage: Usage, *, once: float, beside: tuple[Usage, StorageClass] | None = None
) -> StorageRow:
    parts = [(usage, one), *([beside] if beside else [])]
    return StorageRow(
        kept_as,
        one.name,
        sum(part.objects for part, _ in parts),
        sum(part.bytes for part, _ in parts),
        sum(part.billed_bytes(at) for part, at in parts),
        sum(part.monthly_cost(at) for part, at in parts),
        once,
        usage.reading_cost(one),
        one.minimum_days,
        one.restore,
    )
