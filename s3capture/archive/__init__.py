"""Rollouts packed into few large objects, and read back from them as if nothing had moved.

The rule of this package: what is deleted was read back from the pack first, and the decision that the archive speaks
for a rollout stands in the bucket before anything of it goes. Packs and their indexes are Parquet, so pyarrow is needed
(``s3capture[parquet]``); nothing outside this package imports it to read an archive.
"""

from __future__ import annotations
