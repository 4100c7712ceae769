"""The contract as types: who conforms, what passes between the parts, and what a process has installed."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from s3capture import errors, protocols
from s3capture.ledger_records import CaptureLedgerCommit
from s3capture.ledger_records import RolloutRemoval as WireRemoval
from s3capture.protocols import (
    AdmissionLedger,
    CaptureLedger,
    LineageMatch,
    LineageResolution,
    LineageResolver,
    RolloutRemoval,
    TokenCaptureSnapshot,
    TokenSink,
    TokenSource,
)
from s3capture.records import ParentResolutionStatus, TokenEntry

MATCH = LineageMatch("c1", (1, 2), "d")


class Sink:
    async def put(self, entry: TokenEntry) -> None: ...
    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None: ...
    async def close(self) -> None: ...


class Source:
    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        return TokenCaptureSnapshot(rollout_id, (), False, "s", 1)

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:  # noqa: ARG002
        return False

    async def retire(self, rollout_ids: Any) -> RolloutRemoval:
        return {"removed": [], "absent": list(rollout_ids)}

    async def delete(self, rollout_ids: Any) -> RolloutRemoval:
        return {"removed": list(rollout_ids), "absent": []}

    async def close(self) -> None: ...


class Resolver:
    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> LineageResolution:  # noqa: ARG002
        return LineageResolution(ParentResolutionStatus.ROOT)

    def is_process_shared(self) -> bool:
        return True

    async def close(self) -> None: ...


class Ledger(Resolver):
    async def record(self, commit: CaptureLedgerCommit) -> None: ...
    async def record_failure(self, rollout_id: str, model_call_id: str, reason: str) -> None: ...
    async def manifest(self, rollout_id: str) -> dict[str, Any]:
        return {"rollout_id": rollout_id}

    async def has_rows(self, rollout_id: str) -> bool:  # noqa: ARG002
        return False

    async def retire(self, rollout_ids: Any) -> RolloutRemoval:
        return {"removed": [], "absent": list(rollout_ids)}

    async def delete(self, rollout_ids: Any) -> RolloutRemoval:
        return {"removed": [], "absent": list(rollout_ids)}


class ClosingLedger(Ledger):
    async def begin_call(self, rollout_id: str, model_call_id: str) -> None: ...
    async def close_admissions(self, rollout_id: str) -> dict[str, Any]:
        return {"rollout_id": rollout_id}

    async def refuse_call(self, rollout_id: str, model_call_id: str) -> None: ...


@pytest.fixture(autouse=True)
def nothing_installed() -> Iterator[None]:
    """Each test starts and ends with nothing installed in the process."""
    yield
    protocols.install_token_sink(None)
    protocols.install_token_source(None)
    protocols.install_lineage_store(None)


@pytest.mark.parametrize(
    ("protocol", "conforming", "members"),
    [
        (TokenSink, Sink, {"put", "mark_incomplete", "close"}),
        (TokenSource, Source, {"freeze", "drop", "retire", "delete", "close"}),
        (LineageResolver, Resolver, {"resolve", "is_process_shared", "close"}),
        (
            CaptureLedger,
            Ledger,
            {"resolve", "is_process_shared", "close"}
            | {"record", "record_failure", "manifest", "has_rows", "retire", "delete"},
        ),
        (
            AdmissionLedger,
            ClosingLedger,
            {"resolve", "is_process_shared", "close"}
            | {"record", "record_failure", "manifest", "has_rows", "retire", "delete"}
            | {"begin_call", "close_admissions", "refuse_call"},
        ),
    ],
)
def test_conforming_means_having_every_method_and_no_other(protocol: Any, conforming: Any, members: set[str]) -> None:
    """An object with the contract's methods conforms, and without any one of them it does not."""
    assert isinstance(conforming(), protocol)
    for name in members:
        without = type("Without", (), {m: getattr(conforming, m) for m in members - {name}})
        assert not isinstance(without(), protocol), name


@pytest.mark.parametrize(
    ("method", "signature"),
    [
        (TokenSink.put, ["entry"]),
        (TokenSink.mark_incomplete, ["rollout_id", "model_call_id=''"]),
        (TokenSource.freeze, ["rollout_id"]),
        (TokenSource.drop, ["rollout_id", "*snapshot_id", "*version"]),
        (TokenSource.retire, ["rollout_ids"]),
        (TokenSource.delete, ["rollout_ids"]),
        (LineageResolver.resolve, ["rollout_id", "request_items"]),
        (CaptureLedger.record, ["commit"]),
        (CaptureLedger.record_failure, ["rollout_id", "model_call_id", "reason"]),
        (CaptureLedger.manifest, ["rollout_id"]),
        (CaptureLedger.has_rows, ["rollout_id"]),
        (CaptureLedger.retire, ["rollout_ids"]),
        (CaptureLedger.delete, ["rollout_ids"]),
        (AdmissionLedger.begin_call, ["rollout_id", "model_call_id"]),
        (AdmissionLedger.close_admissions, ["rollout_id"]),
        (AdmissionLedger.refuse_call, ["rollout_id", "model_call_id"]),
    ],
)
def test_the_signatures_are_the_contracts(method: Any, signature: list[str]) -> None:
    """Every method is async and can be called by the contract's names, keyword-only where it says so."""
    parameters = list(inspect.signature(method).parameters.values())[1:]
    shown = [
        ("*" if p.kind is p.KEYWORD_ONLY else "") + p.name + ("" if p.default is p.empty else f"={p.default!r}")
        for p in parameters
    ]
    assert shown == signature
    assert inspect.iscoroutinefunction(method)
    assert not inspect.iscoroutinefunction(LineageResolver.is_process_shared)


def test_a_snapshot_has_the_contracts_fields_and_is_frozen() -> None:
    """Adapters read the fields by name and order, refusals being empty by default."""
    names = [field.name for field in dataclasses.fields(TokenCaptureSnapshot)]
    assert names == ["rollout_id", "entries", "incomplete", "snapshot_id", "version", "engine_refusals"]
    snapshot = TokenCaptureSnapshot("7-3", (), False, "s", 1)
    assert snapshot.engine_refusals == ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        snapshot.version = 2  # type: ignore[misc]


def test_a_match_defaults_to_a_parent_without_staging() -> None:
    """Only a ledger fills the staging columns."""
    assert dataclasses.astuple(MATCH) == ("c1", (1, 2), "d", (), 0, "")


@pytest.mark.parametrize("status", list(ParentResolutionStatus))
@pytest.mark.parametrize("match", [None, MATCH])
def test_a_resolution_has_a_match_exactly_when_resolved(
    status: ParentResolutionStatus, match: LineageMatch | None
) -> None:
    """Every contradiction between status and match is a ValueError, every other combination is kept."""
    if (status == "resolved") == (match is not None):
        assert LineageResolution(status, match, "why").match is match
    else:
        with pytest.raises(ValueError, match=str(status)):
            LineageResolution(status, match)


def test_a_plain_removal_validates_as_the_wire_model() -> None:
    """The dict that ``retire`` returns is what the wire model accepts, key for key."""
    removal: RolloutRemoval = {"removed": ["a"], "absent": ["b"]}
    wire = WireRemoval.model_validate(removal)
    assert {"removed": wire.removed, "absent": wire.absent} == removal
    assert RolloutRemoval.__required_keys__ == {"removed", "absent"}


@pytest.mark.parametrize(
    ("install", "installed", "thing"),
    [
        (protocols.install_token_sink, protocols.installed_token_sink, Sink()),
        (protocols.install_token_source, protocols.installed_token_source, Source()),
        (protocols.install_lineage_store, protocols.installed_lineage_store, Resolver()),
    ],
)
def test_what_is_installed_can_be_read_back_and_cleared(install: Any, installed: Any, thing: Any) -> None:
    """Each slot holds its own object until None clears it, and the others stay empty."""
    assert installed() is None
    install(thing)
    slots = (protocols.installed_token_sink, protocols.installed_token_source, protocols.installed_lineage_store)
    assert [slot() for slot in slots if slot() is not None] == [thing]
    assert installed() is thing
    install(None)
    assert installed() is None


def test_a_sink_that_lacks_methods_is_refused_by_name_and_the_old_one_stays() -> None:
    """A TypeError names exactly the missing methods; an attribute that cannot be called counts as missing."""

    class Half:
        mark_incomplete = "not callable"

        async def put(self, entry: TokenEntry) -> None: ...

    good = Sink()
    protocols.install_token_sink(good)
    with pytest.raises(TypeError, match="mark_incomplete, close") as caught:
        protocols.install_token_sink(Half())  # type: ignore[arg-type]
    assert "put" not in str(caught.value)
    assert protocols.installed_token_sink() is good


def test_source_and_lineage_store_are_installed_unvalidated() -> None:
    """The contract validates sinks alone."""
    thing: Any = object()
    protocols.install_token_source(thing)
    protocols.install_lineage_store(thing)
    assert protocols.installed_token_source() is thing
    assert protocols.installed_lineage_store() is thing


@pytest.mark.parametrize(
    ("name", "bases"),
    [
        ("TokenCaptureFrozenError", (RuntimeError,)),
        ("TokenCaptureRetiredError", (RuntimeError, errors.TokenCaptureFrozenError)),
        ("RolloutRetiredError", (LookupError,)),
        ("CaptureAdmissionError", (ValueError,)),
        ("UnrepresentableHistoryError", (ValueError,)),
    ],
)
def test_the_errors_are_the_packages_own_and_have_the_contracts_bases(name: str, bases: tuple[type, ...]) -> None:
    """An error caught through ``protocols`` is the one that is raised, by the bases the contract names."""
    assert getattr(protocols, name) is getattr(errors, name)
    assert issubclass(getattr(protocols, name), bases[-1])
    assert all(issubclass(getattr(protocols, name), base) for base in bases)


def test_every_public_name_exists_and_none_is_forgotten() -> None:
    """``__all__`` lists exactly what the module defines in public, and the errors of the contract."""
    defined = {
        name
        for name, value in vars(protocols).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == protocols.__name__
    }
    contract_errors = {name for name in protocols.__all__ if name.endswith("Error")}
    assert set(protocols.__all__) == defined | contract_errors
    assert len(contract_errors) == 5
