"""The wire shapes of the capture ledger, and the reasons it gives: what a training framework parses.

The rule of this module: names, versions and reason strings are a wire contract (contract.md, "Ledger wire
shapes"; nemo-gym 0.7.0 ``staging.records``). A shape that gains, loses or renames a field here breaks readers
in other processes, which forbid unknown fields just as these models do. No row ever holds token ids: lengths
count tokens, digests are SHA-256 as 64 lower-case hex digits, and ``admitted_at`` is in seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, StrictStr, model_validator

LEDGER_SCHEMA_VERSION: Final = 2
LEDGER_DIGEST_VERSION: Final = 2
EXTRAS_DIGEST_VERSION: Final = 1

UNRESOLVED_PARENT_REASON: Final = "unresolved_parent"
UNCOMMITTED_CALL_REASON: Final = "request_finished_without_staged_coordinates"
ROW_MISSING_RESPONSE_ID_REASON: Final = "ledger_row_missing_response_id"
ROW_MISSING_CHAIN_HASH_REASON: Final = "ledger_row_missing_chain_hash"
WORKER_MISSING_COMMIT_COORDS_REASON: Final = "worker_response_missing_commit_coordinates"
WORKER_CAPTURE_FAILED_REASON: Final = "worker_capture_failed"
INVALID_COMMIT_COORDS_REASON: Final = "invalid_worker_commit_coordinates"
ENGINE_REFUSED_REASON: Final = "engine_refused_request"

Identifier: TypeAlias = Annotated[StrictStr, Field(min_length=1)]
Count: TypeAlias = Annotated[StrictInt, Field(ge=0)]
Digest: TypeAlias = Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{64}$")]


class _Wire(BaseModel):
    # Strictness sits on the fields: a model-wide strict mode would refuse the lists that JSON has for tuples.
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=(), hide_input_in_errors=True)

    schema_version: Literal[2] = LEDGER_SCHEMA_VERSION


class CallRecord(_Wire):
    """One committed call: where its tokens were staged, and how it continues its parent.

    ``delta_len`` tokens were added to the parent's ``prev_len``, which makes ``cum_len``. A call without a
    parent starts from text; every other continues its parent's exact tokens. ``fingerprint_version`` 0
    means that no fingerprints were recorded.
    """

    digest_version: Literal[2] = LEDGER_DIGEST_VERSION
    extras_digest_version: Literal[1] = EXTRAS_DIGEST_VERSION
    model_call_id: Identifier
    parent_call_id: Identifier | None = None
    prev_len: Count
    delta_len: Count
    cum_len: Count
    weight_version: Count
    digest: Digest
    extras_digest: Digest
    staging_key: Identifier
    mode: Literal["token_in", "text"] = "token_in"
    chain_hash: Digest
    cumulative_hash: Digest
    response_id: Identifier
    admitted_at: StrictFloat | None = None
    output_fingerprint: Digest | None = None
    continuation_fingerprint: Digest | None = None
    fingerprint_version: Count = 0

    @model_validator(mode="after")
    def _keep_the_rules(self) -> Self:
        if self.delta_len == 0:
            raise ValueError("delta_len is 0, but a committed call adds at least one token")
        if self.cum_len != self.prev_len + self.delta_len:
            raise ValueError(
                f"cum_len is {self.cum_len}, but prev_len {self.prev_len} and delta_len {self.delta_len} "
                f"make {self.prev_len + self.delta_len}"
            )
        parentless = self.parent_call_id is None
        if parentless != (self.prev_len == 0) or parentless != (self.mode == "text"):
            raise ValueError(
                "a call has no parent exactly if prev_len is 0 and mode is 'text'; here parent_call_id is "
                f"{self.parent_call_id!r}, prev_len {self.prev_len} and mode {self.mode!r}"
            )
        return self


class CaptureLedgerCommit(_Wire):
    """One staged call as it is handed to ``CaptureLedger.record``.

    Only ``record`` becomes a row of the manifest; the rest serves to resolve later requests.
    """

    rollout_id: Identifier
    record: CallRecord
    staging_chain: tuple[Identifier, ...] = ()
    request_items: list[dict[str, Any]]
    response_items: list[dict[str, Any]]


class ManifestFailure(_Wire):
    """A call whose capture did not complete; one such row makes the rollout unfit for training."""

    model_call_id: Identifier
    reason: Identifier


class RolloutManifest(_Wire):
    """The whole ledger of one rollout, as ``manifest`` and ``close_admissions`` report it."""

    rollout_id: Identifier
    records: list[CallRecord] = Field(default_factory=list)
    failures: list[ManifestFailure] = Field(default_factory=list)


class RolloutRemoval(_Wire):
    """What ``retire`` or ``delete`` did: ids that had data, and ids that had none, each in the order asked."""

    removed: list[Identifier] = Field(default_factory=list)
    absent: list[Identifier] = Field(default_factory=list)


def manifest_row(row: Mapping[str, Any]) -> CallRecord | ManifestFailure:
    """Return a committed row (the JSON of a ``CallRecord``) as it belongs in the manifest.

    A row without response id or chain digests cannot be trained on: it is reported as a failure of its call,
    never as a crash of the whole manifest (contract.md). Any other fault raises pydantic's ``ValidationError``.
    """
    if not row.get("response_id"):
        return ManifestFailure(model_call_id=row["model_call_id"], reason=ROW_MISSING_RESPONSE_ID_REASON)
    if not row.get("chain_hash") or not row.get("cumulative_hash"):
        return ManifestFailure(model_call_id=row["model_call_id"], reason=ROW_MISSING_CHAIN_HASH_REASON)
    return CallRecord.model_validate(row)
