"""pyarrow, which is optional: imported here, so that its absence is one sentence and not a traceback.

The rule of this module: nobody who captures pays for it; it is imported when an archive or a Parquet file is.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from s3capture.errors import MissingExtraError


def parquet() -> tuple[Any, Any]:
    """Return ``(pyarrow, pyarrow.parquet)``. Raise ``MissingExtraError``."""
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise MissingExtraError(
            f"archives and Parquet need pyarrow, which cannot be imported ({error}); install s3capture[parquet]"
        ) from error
