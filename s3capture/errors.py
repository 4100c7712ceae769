"""Every error that leaves this package, and what its kind asks of the caller.

The rule of this module: a kind says what to *do*. Kinds are only ever added.

    CaptureError
    ├── TokenCaptureFrozenError (RuntimeError)   drop the late record, do not mark the rollout
    │   └── TokenCaptureRetiredError             the same; the rollout is gone
    ├── RolloutRetiredError (LookupError)        the ledger was retired; read it before retiring
    ├── ConflictingPayloadError (ValueError)     one call id, two payloads; the rollout is masked
    ├── InvalidIdError (ValueError)              refused before any I/O; fix the id
    ├── SettingsError (ValueError, TypeError)    refused before any I/O; fix the setting
    ├── UnstorableValueError (ValueError)        the record holds a value that cannot be kept; see .path
    ├── CaptureAdmissionError (ValueError)       the capture state cannot safely admit generation
    │   └── RetiredAdmissionError (LookupError)  the same, because the ledger was retired
    ├── UnrepresentableHistoryError (ValueError) the request history cannot be represented
    ├── CorruptObjectError                       a stored object is damaged; audit it, never guess
    │   └── UnknownFormatError                   written by a newer version; upgrade the reader
    ├── ClosedError (RuntimeError)               the endpoint was closed
    ├── SpillError                               S3 and the local spill both failed: this mark is lost
    └── StoreError                               the object store; the outcome of the operation is unknown
        ├── StoreUnavailableError                try again later
        ├── StoreAccessError                     credentials or permissions; a person must act
        ├── StoreConfigError                     bucket, endpoint or region is wrong; a person must act
        └── UnsupportedStoreError                no conditional creates: no safe capture on this store

Three kinds stand beside what raises them: ``RunInUseError`` (``preflight``), ``GymNotFoundError`` (``gym``) and
``LocalServerError`` (``seaweed``).

The first three bases are the contract's (``nemo_gym.models.token_capture.protocols``); code written for
nemo-gym 0.7.0 catches the plain ``RuntimeError`` there. Messages name run, rollout and call; they never
hold token arrays or secrets.
"""

from __future__ import annotations


class CaptureError(Exception):
    """Base of every error that this package raises on purpose."""


class TokenCaptureFrozenError(CaptureError, RuntimeError):
    """Reject a write that arrived after its rollout's capture was frozen.

    The caller drops the late record and must not mark the rollout incomplete (contract text).
    """


class TokenCaptureRetiredError(TokenCaptureFrozenError):
    """Reject a write, or a freeze, of a rollout whose capture was retired."""


class RolloutRetiredError(CaptureError, LookupError):
    """Reject reading the ledger of a rollout that was retired."""


class ConflictingPayloadError(CaptureError, ValueError):
    """A model call id was used again with another payload; both digests are in the message."""


class InvalidIdError(CaptureError, ValueError):
    """A run, rollout or prefix name that no key may carry; nothing was changed."""


class SettingsError(CaptureError, ValueError, TypeError):
    """A setting is unknown, missing or out of range; nothing was started."""


class MissingExtraError(SettingsError):
    """What was asked for needs an optional package that is not installed; the message says what to install."""


class UnstorableValueError(CaptureError, ValueError):
    """A record holds a value that would not come back as itself; ``path`` says where."""

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        super().__init__(f"cannot store {path}: {problem}")


class CaptureAdmissionError(CaptureError, ValueError):
    """Refuse a request whose capture state cannot safely admit generation."""


class RetiredAdmissionError(CaptureAdmissionError, RolloutRetiredError):
    """Refuse a request of a rollout whose ledger was retired: for code written for either of its bases."""


class UnrepresentableHistoryError(CaptureError, ValueError):
    """Reject request history that capture cannot represent."""


class CorruptObjectError(CaptureError):
    """A stored object is damaged: wrong digest, broken frame, or not what its key says."""


class UnknownFormatError(CorruptObjectError):
    """A stored object was written in a format that this version does not know."""


class ClosedError(CaptureError, RuntimeError):
    """The endpoint was closed before the call."""


class SpillError(CaptureError):
    """Neither S3 nor the local spill could take a mark: the silent-loss case, said aloud."""


class StoreError(CaptureError):
    """The object store failed; what the failed operation changed is unknown until it is repeated."""


class StoreUnavailableError(StoreError):
    """The store did not answer in time, throttled, or failed; the same call may be repeated."""


class StoreAccessError(StoreError):
    """Credentials or permissions were refused; repeating does not help until someone changes them."""


class StoreConfigError(StoreError):
    """The bucket, endpoint or region is wrong."""


class UnsupportedStoreError(StoreConfigError):
    """The store does not honour create-if-absent, so no capture on it can be trusted."""
