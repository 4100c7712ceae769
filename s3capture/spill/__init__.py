"""Marks that S3 could not take, kept on the local disk until it can.

The rule of this package: when ``Spill.write`` returns, the mark survives the death of the process and of the
machine (not of the disk), and nothing here ever makes a mark vanish unpublished. It is the only package that
touches the local disk; it knows nothing of S3, of asyncio, or of what a mark means. If the order of effects in
``write`` moves, a mark can be acknowledged and then be gone: the one silent loss of tokens that the contract names.

There is no state but the directory, and no lock: a file appears by rename, never changes, and goes by
unlink or rename, so any number of threads and processes may write, scan and settle at once::

    <dir>/<16 hex: target>-<16 hex: rollout>-<mark_id>.mark   waiting to be published
    <dir>/late/<the same name>                                its rollout was retired before we came
    <dir>/damaged/<the same name>.<16 hex>                    does not read back as what was written
    <dir>/.tmp-<32 hex>                                       being written, or left by a crash
"""

from __future__ import annotations

from s3capture.spill.content import FORMAT_VERSION, SpilledMark, Target
from s3capture.spill.disk import STALE_TEMP_S, memory_file_system
from s3capture.spill.spill import Spill, SpillScan, UnreadFile

__all__ = [
    "FORMAT_VERSION",
    "STALE_TEMP_S",
    "Spill",
    "SpillScan",
    "SpilledMark",
    "Target",
    "UnreadFile",
    "memory_file_system",
]
