"""The records keep the contract's rules, at construction and after assignment, and its digest layout."""

from __future__ import annotations

import hashlib
import struct
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, ValidationError

from s3capture.errors import UnstorableValueError
from s3capture.ledger_records import (
    CallRecord,
    CaptureLedgerCommit,
    ManifestFailure,
    RolloutManifest,
    RolloutRemoval,
    manifest_row,
)
from s3capture.records import (
    EngineRefusal,
    ParentResolutionStatus,
    TokenEntry,
    check_entry,
    compute_digest,
    cumulative_tokens,
    stamp_lineage,
)

HEX = "0123456789abcdef" * 4


def entry(**given: Any) -> TokenEntry:
    fields: dict[str, Any] = {
        "rollout_id": "7-3",
        "model_call_id": "c1",
        "prompt_token_ids": [1, 2],
        "generation_token_ids": [3],
        "generation_log_probs": [-0.5],
    }
    return TokenEntry(**{**fields, **given})


def layout(*token_ids: int) -> str:
    """The digest by the letter of the contract, packed one id at a time."""
    data = b"nemo-gym-tokens"
    if token_ids:
        data += struct.pack(">BQ", 1, len(token_ids)) + b"".join(struct.pack(">Q", token) for token in token_ids)
    return hashlib.sha256(data).hexdigest()


def test_a_minimal_entry_has_the_contracts_defaults_and_nothing_else() -> None:
    """The JSON of an entry holds exactly the contract's fields with its defaults."""
    assert entry().model_dump(mode="json") == {
        "schema_version": 1,
        "rollout_id": "7-3",
        "model_call_id": "c1",
        "model": "",
        "prompt_token_ids": [1, 2],
        "generation_token_ids": [3],
        "generation_log_probs": [-0.5],
        "routed_experts": None,
        "output_items": [],
        "token_item_index": None,
        "response_id": None,
        "created_at": 0.0,
        "parent_call_id": None,
        "cum_len": None,
        "digest": None,
        "parent_resolution": None,
        "continuation_fingerprint": "",
        "continuation_context_len": 0,
        "continuation_context_digest": "",
        "parent_resolution_reason": "",
        "fingerprint_version": None,
        "prompt_is_delta": False,
        "prefix_requested": False,
        "prefix_supplied": False,
    }


def test_an_unknown_field_is_kept() -> None:
    """A field that this version does not know survives construction and dumping."""
    kept = entry(reward_hint={"a": [1]})
    assert kept.model_dump(mode="json")["reward_hint"] == {"a": [1]}
    check_entry(kept)


def test_default_lists_are_not_shared() -> None:
    """Two entries never share their default output items."""
    first, second = entry(), entry()
    first.output_items.append({"type": "message"})
    assert second.output_items == []


@pytest.mark.parametrize(
    ("path", "broken"),
    [
        ("schema_version", {"schema_version": 2}),
        ("schema_version", {"schema_version": 0}),
        ("generation_log_probs", {"generation_log_probs": []}),
        ("generation_log_probs", {"generation_token_ids": [], "generation_log_probs": [0.0]}),
        ("token_item_index", {"token_item_index": 0}),
        ("token_item_index", {"token_item_index": -1, "output_items": [{}]}),
        ("token_item_index", {"token_item_index": 1, "output_items": [{}]}),
        ("parent_call_id", {"parent_resolution": ParentResolutionStatus.RESOLVED}),
        ("parent_call_id", {"parent_resolution": ParentResolutionStatus.RESOLVED, "parent_call_id": ""}),
        ("parent_call_id", {"parent_resolution": ParentResolutionStatus.ROOT, "parent_call_id": "p"}),
        ("parent_call_id", {"parent_resolution": ParentResolutionStatus.UNRESOLVED, "parent_call_id": "p"}),
        ("prompt_is_delta", {"prompt_is_delta": True}),
        ("prompt_is_delta", {"prompt_is_delta": True, "parent_call_id": "p"}),
        ("prompt_is_delta", {"prompt_is_delta": True, "parent_resolution": ParentResolutionStatus.ROOT}),
    ],
)
def test_a_broken_rule_is_refused_at_construction_and_after_assignment(path: str, broken: dict[str, Any]) -> None:
    """Each rule of the contract holds for a new entry, and ``check_entry`` finds it in a changed one."""
    with pytest.raises(ValidationError, match=path):
        entry(**broken)
    changed = entry()
    for name, value in broken.items():
        setattr(changed, name, value)
    with pytest.raises(UnstorableValueError) as caught:
        check_entry(changed)
    assert caught.value.path == path
    assert "'7-3'" in str(caught.value)
    assert "'c1'" in str(caught.value)


@pytest.mark.parametrize(
    "allowed",
    [
        {"parent_call_id": "p"},
        {"parent_call_id": "p", "parent_resolution": ParentResolutionStatus.RESOLVED},
        {"parent_call_id": "p", "parent_resolution": ParentResolutionStatus.RESOLVED, "prompt_is_delta": True},
        {"parent_resolution": ParentResolutionStatus.ROOT},
        {"parent_resolution": ParentResolutionStatus.UNRESOLVED},
        {"output_items": [{}, {}], "token_item_index": 1},
        {"generation_token_ids": [], "generation_log_probs": []},
        {"prompt_token_ids": []},
        {"created_at": 12},
        {"generation_log_probs": [float("-inf")]},
        {"generation_log_probs": [float("nan")]},
        {"prompt_token_ids": [2**80, -1]},
    ],
)
def test_what_the_contract_allows_passes(allowed: dict[str, Any]) -> None:
    """Lawful entries, the odd ones included, are neither refused nor changed."""
    changed = entry(**allowed)
    for name, value in allowed.items():
        setattr(changed, name, value)
    check_entry(changed)


class Number(float):
    """Stands for the float types of array libraries."""


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        ("generation_log_probs[3]", "generation_log_probs", [0.0, -1, float("nan"), None]),
        ("generation_log_probs[0]", "generation_log_probs", [True]),
        ("generation_log_probs[0]", "generation_log_probs", ["-0.5"]),
        ("generation_log_probs", "generation_log_probs", (-0.5,)),
        ("generation_log_probs", "generation_log_probs", None),
        ("prompt_token_ids[0]", "prompt_token_ids", [True, 2]),
        ("prompt_token_ids[0]", "prompt_token_ids", ["1"]),
        ("prompt_token_ids[0]", "prompt_token_ids", [1.0]),
        ("prompt_token_ids[2]", "prompt_token_ids", [1, 2, None]),
        ("prompt_token_ids", "prompt_token_ids", "12"),
        ("generation_token_ids[0]", "generation_token_ids", [[3]]),
        ("output_items", "output_items", {}),
        ("output_items[1]", "output_items", [{}, "text"]),
        ("schema_version", "schema_version", True),
        ("schema_version", "schema_version", "1"),
        ("schema_version", "schema_version", 1.0),
        ("rollout_id", "rollout_id", None),
        ("model_call_id", "model_call_id", 7),
        ("model", "model", None),
        ("response_id", "response_id", 7),
        ("created_at", "created_at", "now"),
        ("created_at", "created_at", None),
        ("cum_len", "cum_len", 1.5),
        ("digest", "digest", b"00"),
        ("parent_resolution", "parent_resolution", "sometimes"),
        ("continuation_context_len", "continuation_context_len", None),
        ("fingerprint_version", "fingerprint_version", "2"),
        ("prompt_is_delta", "prompt_is_delta", 1),
        ("prefix_supplied", "prefix_supplied", None),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_its_path(path: str, name: str, value: object) -> None:
    """Values that could not come back as themselves are named by field and index, and none is converted."""
    changed = entry()
    setattr(changed, name, value)
    with pytest.raises(UnstorableValueError) as caught:
        check_entry(changed)
    assert caught.value.path == path


def test_a_subclass_of_float_is_a_log_probability() -> None:
    """The scalars of array libraries are floats and are not refused."""
    changed = entry()
    changed.generation_log_probs = [Number(-0.5)]
    check_entry(changed)


def test_errors_never_show_the_tokens() -> None:
    """A fault deep in a long prompt is reported without the prompt."""
    changed = entry()
    changed.prompt_token_ids = [424242] * 100_000 + [None]  # type: ignore[list-item]
    with pytest.raises(UnstorableValueError) as caught:
        check_entry(changed)
    assert caught.value.path == "prompt_token_ids[100000]"
    assert "424242" not in str(caught.value)
    assert len(str(caught.value)) < 200


class Foreign(BaseModel):
    """A model of the same shape from elsewhere, older: it lacks most optional fields."""

    model_config = ConfigDict(extra="allow")
    rollout_id: str
    model_call_id: str
    prompt_token_ids: list[int]
    generation_token_ids: list[int]
    generation_log_probs: list[float]
    parent_resolution: str | None = None


def test_another_models_entry_is_judged_alike() -> None:
    """Any model of the record's shape is checked by its attributes; an absent optional field is no fault."""
    foreign = Foreign(**entry().model_dump(include=set(Foreign.model_fields)))
    check_entry(foreign)
    foreign.parent_resolution = "resolved"
    with pytest.raises(UnstorableValueError) as caught:
        check_entry(foreign)
    assert caught.value.path == "parent_call_id"
    with pytest.raises(UnstorableValueError) as caught:
        check_entry(SimpleNamespace(model_call_id="c"))
    assert caught.value.path == "rollout_id"


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_the_digest_follows_the_byte_layout(token_ids: list[int]) -> None:
    """The digest is SHA-256 over domain, version, count and big-endian ids, and the domain alone when empty."""
    assert compute_digest(token_ids) == layout(*token_ids)


def test_the_digest_of_a_known_sequence_never_changes() -> None:
    """Digests written by earlier versions stay valid."""
    assert compute_digest([]) == "2e222d36d0c6ae1db1ec18b3f96d9a46df5db61b40137bbfbac4cdf0acde9763"
    assert compute_digest([1, 2, 3]) == "bf99633051449f0f3248b4995a7c8468b9561d7732447341916085f12ff9ff54"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(-1, "-1"), (2**64, str(2**64)), pytest.param(2**20000, "20001 bits", id="huge"), ("7", "'7'"), (0.5, "0.5")],
)
def test_an_id_that_no_digest_covers_is_named(value: object, shown: str) -> None:
    """A negative, too large or non-integer id is a ValueError that names value and place."""
    with pytest.raises(ValueError, match=r"token_ids\[2\]") as caught:
        compute_digest([1, 2, value])  # type: ignore[list-item]
    assert shown in str(caught.value)


def test_cumulative_tokens_refuses_a_delta() -> None:
    """A delta does not hold its full tokens, and says whose they are."""
    assert cumulative_tokens(entry()) == [1, 2, 3]
    delta = entry(prompt_is_delta=True, parent_call_id="p", parent_resolution="resolved")
    with pytest.raises(ValueError, match=r"'c1'.*delta.*'p'"):
        cumulative_tokens(delta)


def test_stamping_a_full_entry_describes_prompt_and_generation() -> None:
    """A full entry needs no help: length and digest cover its own arrays."""
    stamped = stamp_lineage(entry(), "p", parent_resolution=ParentResolutionStatus.RESOLVED)
    assert (stamped.cum_len, stamped.digest) == (3, layout(1, 2, 3))
    assert (stamped.parent_call_id, stamped.parent_resolution) == ("p", ParentResolutionStatus.RESOLVED)


def test_stamping_a_delta_describes_the_full_sequence() -> None:
    """A delta is stamped with the parent's tokens included."""
    delta = entry(prompt_is_delta=True, parent_call_id="p", parent_resolution="resolved")
    resolved = ParentResolutionStatus.RESOLVED
    stamp_lineage(delta, "p", parent_resolution=resolved, cumulative=[8, 9, 1, 2, 3])
    assert (delta.cum_len, delta.digest) == (5, layout(8, 9, 1, 2, 3))


@pytest.mark.parametrize(
    ("parent", "given_", "delta"),
    [
        (None, {"parent_resolution": ParentResolutionStatus.RESOLVED}, False),
        ("p", {"parent_resolution": ParentResolutionStatus.ROOT}, False),
        ("p", {"parent_resolution": ParentResolutionStatus.UNRESOLVED}, False),
        ("p", {"cumulative": [1, 2, 4]}, False),
        ("p", {"parent_resolution": ParentResolutionStatus.RESOLVED}, True),
        ("p", {"parent_resolution": ParentResolutionStatus.RESOLVED, "cumulative": [9, 1, 2, 4]}, True),
        ("p", {"parent_resolution": ParentResolutionStatus.RESOLVED, "cumulative": [2, 3]}, True),
        (None, {"parent_resolution": ParentResolutionStatus.ROOT, "cumulative": [9, 1, 2, 3]}, True),
    ],
)
def test_a_stamp_that_contradicts_the_entry_changes_nothing(
    parent: str | None, given_: dict[str, Any], delta: bool
) -> None:
    """A refused stamp leaves the entry as it was."""
    extra = {"prompt_is_delta": True, "parent_call_id": "q", "parent_resolution": "resolved"} if delta else {}
    untouched = entry(**extra)
    before = untouched.model_dump()
    with pytest.raises(ValueError, match="c1"):
        stamp_lineage(untouched, parent, **given_)
    assert untouched.model_dump() == before


def test_a_refusal_keeps_what_it_was_given_and_cannot_be_changed() -> None:
    """A refusal holds the engine's code and the request-time decision, and is frozen."""
    refusal = EngineRefusal(model_call_id="c1", code=None, parent_call_id="p", parent_resolution="resolved")
    assert refusal.model_dump(mode="json") == {
        "model_call_id": "c1",
        "code": None,
        "created_at": 0.0,
        "parent_call_id": "p",
        "parent_resolution": "resolved",
    }
    with pytest.raises(ValidationError):
        refusal.code = "other"  # type: ignore[misc]
    with pytest.raises(ValidationError):
        EngineRefusal(model_call_id="c1", parent_resolution="maybe")


ROOT_ROW: dict[str, Any] = {
    "schema_version": 2,
    "digest_version": 2,
    "extras_digest_version": 1,
    "model_call_id": "c1",
    "parent_call_id": None,
    "prev_len": 0,
    "delta_len": 3,
    "cum_len": 3,
    "weight_version": 4,
    "digest": HEX,
    "extras_digest": HEX,
    "staging_key": "7-3/c1",
    "mode": "text",
    "chain_hash": HEX,
    "cumulative_hash": HEX,
    "response_id": "resp-1",
    "admitted_at": None,
    "output_fingerprint": None,
    "continuation_fingerprint": None,
    "fingerprint_version": 0,
}
CHILD = {"parent_call_id": "c0", "prev_len": 5, "cum_len": 8, "mode": "token_in"}


@pytest.mark.parametrize(
    "row", [ROOT_ROW, {**ROOT_ROW, **CHILD, "admitted_at": 1.5, "output_fingerprint": HEX, "fingerprint_version": 2}]
)
def test_a_ledger_row_has_exactly_the_wire_fields(row: dict[str, Any]) -> None:
    """A row comes back from its model as the same JSON, versions included."""
    assert CallRecord.model_validate(row).model_dump(mode="json") == row


def test_mode_defaults_to_token_in_and_optional_fields_to_none() -> None:
    """A row that leaves out what may be left out has the contract's defaults."""
    optional = ("admitted_at", "output_fingerprint", "continuation_fingerprint", "fingerprint_version", "mode")
    versions = ("schema_version", "digest_version", "extras_digest_version")
    row = {**ROOT_ROW, **CHILD}
    short = {key: value for key, value in row.items() if key not in (*optional, *versions)}
    assert CallRecord(**short).model_dump(mode="json") == row


@pytest.mark.parametrize(
    "broken",
    [
        {"schema_version": 1},
        {"digest_version": 1},
        {"extras_digest_version": 2},
        {"surprise": 1},
        {"delta_len": 0, "cum_len": 0},
        {"cum_len": 4},
        {"prev_len": 1, "cum_len": 4},
        {"prev_len": -1, "cum_len": 2},
        {"mode": "token_in"},
        {"mode": "other"},
        {"parent_call_id": "c0"},
        {**CHILD, "mode": "text"},
        {**CHILD, "prev_len": 0, "cum_len": 3},
        {**CHILD, "parent_call_id": None},
        {"model_call_id": ""},
        {"model_call_id": 7},
        {"response_id": ""},
        {"response_id": None},
        {"weight_version": "4"},
        {"weight_version": True},
        {"delta_len": 3.0},
        {"digest": HEX[:-1]},
        {"digest": HEX.upper()},
        {"chain_hash": ""},
        {"chain_hash": HEX + "\n"},
        {"admitted_at": float("nan")},
        {"admitted_at": "1.5"},
        {"fingerprint_version": -1},
    ],
)
def test_a_row_that_breaks_the_wire_contract_is_refused(broken: dict[str, Any]) -> None:
    """Ledger rows are strict: no conversion, no unknown field, no other version, no contradiction."""
    with pytest.raises(ValidationError):
        CallRecord.model_validate({**ROOT_ROW, **broken})


def test_a_commit_carries_the_row_and_what_resolution_needs() -> None:
    """A commit survives JSON, where its staging chain is a list."""
    wire = {
        "schema_version": 2,
        "rollout_id": "7-3",
        "record": ROOT_ROW,
        "staging_chain": ["7-3/c0"],
        "request_items": [{"role": "user", "content": "hi"}],
        "response_items": [],
    }
    commit = CaptureLedgerCommit.model_validate(wire)
    assert commit.staging_chain == ("7-3/c0",)
    assert commit.model_dump(mode="json") == wire
    with pytest.raises(ValidationError):
        CaptureLedgerCommit.model_validate({**wire, "staging_chain": [""]})
    with pytest.raises(ValidationError):
        CaptureLedgerCommit.model_validate({key: value for key, value in wire.items() if key != "request_items"})


def test_a_manifest_has_the_wire_shape() -> None:
    """A manifest names its rollout and holds rows and failures; it is empty by default."""
    assert RolloutManifest(rollout_id="7-3").model_dump(mode="json") == {
        "schema_version": 2,
        "rollout_id": "7-3",
        "records": [],
        "failures": [],
    }
    full = RolloutManifest(
        rollout_id="7-3",
        records=[CallRecord.model_validate(ROOT_ROW)],
        failures=[ManifestFailure(model_call_id="c2", reason="worker_capture_failed")],
    )
    assert full.model_dump(mode="json") == {
        "schema_version": 2,
        "rollout_id": "7-3",
        "records": [ROOT_ROW],
        "failures": [{"schema_version": 2, "model_call_id": "c2", "reason": "worker_capture_failed"}],
    }
    with pytest.raises(ValidationError):
        RolloutManifest.model_validate({"rollout_id": "7-3", "rows": []})


def test_a_removal_validates_the_plain_answer() -> None:
    """What ``retire`` and ``delete`` return validates as the wire model."""
    removal = RolloutRemoval.model_validate({"removed": ["a"], "absent": []})
    assert (removal.removed, removal.absent) == (["a"], [])
    with pytest.raises(ValidationError):
        RolloutRemoval.model_validate({"removed": "a"})


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        ("response_id", "ledger_row_missing_response_id"),
        ("chain_hash", "ledger_row_missing_chain_hash"),
        ("cumulative_hash", "ledger_row_missing_chain_hash"),
    ],
)
@pytest.mark.parametrize("blank", [None, "", "absent"])
def test_a_committed_row_that_cannot_be_trained_on_is_a_failure(missing: str, reason: str, blank: str | None) -> None:
    """A row without response id or chain digests poisons its call and not the whole manifest."""
    row = {**ROOT_ROW, missing: blank}
    if blank == "absent":
        del row[missing]
    failure = manifest_row(row)
    assert isinstance(failure, ManifestFailure)
    assert (failure.model_call_id, failure.reason) == ("c1", reason)


def test_a_sound_row_is_reported_as_it_is() -> None:
    """A complete row enters the manifest unchanged."""
    assert manifest_row(ROOT_ROW).model_dump(mode="json") == ROOT_ROW
