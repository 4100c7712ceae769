"""Keep the training tokens of reinforcement-learning rollouts safe on object storage.

Model servers write through ``S3TokenSink``, any worker resolves continuations through ``S3LineageResolver``, and the
trainer freezes, reads and retires rollouts through ``S3TokenSource``; the bucket is all they share. Importing this
package is cheap: each endpoint is imported at its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from s3capture.ledger import S3CaptureLedger
    from s3capture.lineage import S3LineageResolver
    from s3capture.sink import S3TokenSink
    from s3capture.source import S3TokenSource

__version__ = "0.1.0"
__all__ = ["S3CaptureLedger", "S3LineageResolver", "S3TokenSink", "S3TokenSource"]

_HOMES = {
    "S3CaptureLedger": "s3capture.ledger",
    "S3LineageResolver": "s3capture.lineage",
    "S3TokenSink": "s3capture.sink",
    "S3TokenSource": "s3capture.source",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib  # noqa: PLC0415 - only what is used is imported

    return getattr(importlib.import_module(_HOMES[name]), name)
