"""What a deletion does not do on this bucket, in sentences: old versions, and locked ones.

The rule of this module: a bucket that keeps what was deleted is told of, with the rule that ends it; a bucket that
does not tell is passed over. See docs/retention.md.
"""

from __future__ import annotations

from s3capture.keys import RunKeys
from s3capture.store.boto_facts import BucketFacts


def remarks(facts: BucketFacts, keys: RunKeys) -> tuple[str, ...]:
    """Return what the person should know about ``facts`` after something was deleted; empty where all is gone."""
    said = []
    if facts.versioning in ("enabled", "suspended"):
        also = "" if facts.versioning == "enabled" else " that were made while versioning was on"
        said.append(
            f"versioning is {facts.versioning} on this bucket: objects{also} stay as noncurrent versions behind delete "
            f"markers, and are billed, until a lifecycle rule with NoncurrentVersionExpiration for the prefix "
            f"{keys.root!r} removes them; docs/retention.md has one"
        )
    if facts.object_lock not in (None, "off", "on"):
        said.append(
            f"Object Lock holds each version for {facts.object_lock}: no lifecycle rule removes it before that, and a "
            "deletion only hides it"
        )
    return tuple(said)
