"""Which listing is believed: the pages of one LIST, by continuation token, checked as they come.

The rule of this module: a listing is whole, or it is an error. Snapshots, audits and deletes rest on it, so silence
must not read as absence: botocore does not compare a reply with its Content-Length, and a LIST that lost its body
parses as an empty bucket. Nothing here relies on the order of keys, nor on StartAfter: some stores do not sort.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from s3capture.errors import StoreConfigError
from s3capture.store.base import TransientStoreError
from s3capture.store.boto_errors import one_line

if TYPE_CHECKING:
    from mypy_boto3_s3.type_defs import ListObjectsV2OutputTypeDef

MAX_STALE_PAGES = 100
"""Pages in a row that bring no new name before a LIST is called endless. An empty page does not count: real
stores send them where deleted versions fill a page."""


def pages(
    fetch: Callable[[str | None], ListObjectsV2OutputTypeDef], *, prefix: str, store: str
) -> Iterator[ListObjectsV2OutputTypeDef]:
    """Yield every page; ``fetch`` takes a continuation token, None for the first page.

    Raises ``TransientStoreError`` for a reply that is no listing, ``StoreConfigError`` for a listing that
    would never end or that names keys outside ``prefix``: what a LIST returns is read, counted and deleted.
    """
    what = f"cannot list {prefix!r} in {store}"
    names: set[str] = set()
    tokens: set[str] = set()
    token: str | None = None
    stale = 0
    while True:
        page = fetch(token)
        if "IsTruncated" not in page:
            raise TransientStoreError(
                f"{what}: the reply is empty or no S3 listing (cut short, or written by something in between); "
                "the same request may be sent again",
                doubtful=False,
            )
        here = _names(page)
        for name in here:
            if not name or not name.startswith(prefix):
                raise StoreConfigError(
                    f"{what}: the store returned {one_line(name, 120)!r}, which is outside; it ignores prefixes or "
                    "changes keys, so its listings cannot be trusted; use another store"
                )
        known = len(names)
        names |= here
        stale = stale + 1 if here and len(names) == known else 0
        yield page
        if not page["IsTruncated"]:
            return
        token = page.get("NextContinuationToken")
        if not token:
            problem = "says that more follows but gives no continuation token"
        elif token in tokens:
            problem = "gives the same continuation token again"
        elif stale >= MAX_STALE_PAGES:
            problem = f"sent {stale} pages in a row without a new key"
        else:
            tokens.add(token)
            continue
        raise StoreConfigError(f"{what}: the store {problem}, so its listings cannot be trusted; use another store")


def _names(page: ListObjectsV2OutputTypeDef) -> set[str]:
    """Return the keys and the common prefixes that a page names."""
    return {row.get("Key", "") for row in page.get("Contents", ())} | {
        row.get("Prefix", "") for row in page.get("CommonPrefixes", ())
    }
