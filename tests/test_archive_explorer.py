"""Every interleaving of archiving keeps what was acknowledged, and every broken order of it is caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from s3capture.effects import List, Steps
from s3capture.keys import RolloutKeys
from s3capture.protocol import archiving
from s3capture.protocol.archiving import Packable
from s3capture.protocol.steps import listed
from s3capture.testing.archive_scenarios import SHIPPED_ARCHIVING, Archiving, archive_scenarios
from s3capture.testing.explorer import explore

SCENARIOS = (
    "archive dies and is repeated",
    "archive loses a reply",
    "archive meets a mark",
    "archive meets a late put",
    "archive meets a consumer",
    "archive meets a consumer of a marked rollout",
    "two archives of what was kept",
)


def test_the_scenarios_are_these() -> None:
    """CI explores exactly the scenarios that are named here."""
    assert tuple(archive_scenarios()) == SCENARIOS


@pytest.mark.parametrize("name", SCENARIOS)
def test_archiving_keeps_every_promise(name: str) -> None:
    """No schedule loses an acknowledged record or mark, or lets the archive speak for what it does not hold."""
    report = explore(archive_scenarios()[name])
    assert report.violation is None, str(report.violation)
    assert report.executions > 100


def _believes_a_refusal(keys: RolloutKeys, packable: Packable, origin: Any) -> Steps[bool]:
    yield from archiving.settle(keys, packable, origin)
    return True


def _packs_what_is_being_deleted(keys: RolloutKeys) -> Steps[Packable | str]:
    found = yield from archiving.examine(keys)
    if not isinstance(found, str):
        return found
    answers = yield (List(keys.base), List(keys.lineage_base))
    rows = (*listed(answers[0]), *listed(answers[1]))
    return Packable(rows, frozenset(row.key for row in rows if not row.key.startswith(keys.fences)), frozenset())


def _everything(packable: Packable) -> frozenset[str]:
    return frozenset(row.key for row in packable.rows)


@dataclass(frozen=True)
class Variant:
    """One broken order, and the scenario that catches it."""

    name: str
    steps: Archiving
    caught_by: str


def _variant(name: str, caught_by: str, **changes: Callable[..., Any] | bool) -> Variant:
    return Variant(name, replace(SHIPPED_ARCHIVING, **changes), caught_by)  # type: ignore[arg-type]


VARIANTS = (
    _variant("takes away before it lists", SCENARIOS[0], waits_for_done=False),
    _variant("never lists", SCENARIOS[0], lists_as_done=False),
    _variant("lists although the drop was refused", "archive meets a mark", settle=_believes_a_refusal),
    _variant("lists what it could not read whole", "archive meets a consumer", needs_all=False),
    _variant("packs what is being deleted", "archive meets a consumer", examine=_packs_what_is_being_deleted),
    _variant("takes the fences away", "archive meets a late put", takes=_everything),
)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_broken_order_is_caught(variant: Variant) -> None:
    """Archiving in another order, or without one of its checks, breaks a promise in some schedule."""
    report = explore(archive_scenarios(variant.steps)[variant.caught_by])
    assert report.violation is not None
