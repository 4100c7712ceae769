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


def give_back() -> None:
    """Return what was freed to the operating system; call it behind each large table that was read or written.

    Buffers of megabytes that many threads allocate and free leave holes which no allocator closes by itself: without
    this a replay of an archive takes half as much memory again (tests/benchmarks/kept_runs.py).
    """
    pyarrow, _ = parquet()
    for pool in (pyarrow.default_memory_pool(), pyarrow.system_memory_pool()):
        pool.release_unused()  # the system's is malloc_trim, for all that Python allocated as well
