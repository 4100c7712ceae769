"""Both conformance kits over this package's own endpoints, on a real bucket, under a run that is thrown away.

The rule of this module: it writes below a run that holds nothing, and removes whatever lies below it at the end,
also when a check failed or the store went away meanwhile.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from dataclasses import asdict, replace
from tempfile import TemporaryDirectory
from typing import Any

from s3capture.effects import Delete, Deleted, List, Steps
from s3capture.errors import StoreError
from s3capture.ledger import S3CaptureLedger
from s3capture.lineage import S3LineageResolver
from s3capture.preflight import check_run
from s3capture.protocol.steps import listed
from s3capture.runtime import shared
from s3capture.settings import Settings
from s3capture.sink import S3TokenSink
from s3capture.source import S3TokenSource
from s3capture.store.base import Store
from s3capture.testing.conformance import Verdict, judge_transport
from s3capture.testing.ledger_conformance import judge_ledger

TRANSPORT, LEDGER = "transport", "ledger"

# Endpoints with equal settings share threads, connections and what they know of begun calls. These differ in a setting
# that means nothing here, so the kit meets clients as strange to each other as those of three processes.
_STRANGERS = 3


async def judge_bucket(
    settings: Settings, *, races: bool = True, store: Store | None = None
) -> AsyncGenerator[tuple[str, Verdict], None]:
    """Yield the kit (``transport`` or ``ledger``) and the verdict of each check, then remove the run again.

    Raise ``RunInUseError`` when the run of ``settings`` holds data, and a ``StoreError`` when the store cannot be used;
    one that comes up in a check is raised from there, since it says nothing about conformance. What could not be
    removed is a ``StoreError`` too. ``store`` replaces the bucket in tests.
    """
    with TemporaryDirectory(prefix="s3capture-conformance-") as spill:
        settings = replace(settings, spill_dir=spill, retention="delete")
        await asyncio.to_thread(check_run, settings, store=store)
        number = itertools.count(settings.lineage_cache_tokens - _STRANGERS)

        def given() -> dict[str, Any]:
            cache = settings.lineage_cache_tokens - 1 - next(number) % _STRANGERS
            return {**asdict(settings), "lineage_cache_tokens": cache, "store": store}

        kits = {
            TRANSPORT: judge_transport(
                lambda: S3TokenSink(**given()),
                lambda: S3TokenSource(**given()),
                lambda: S3LineageResolver(**given()),
                races=races,
            ),
            LEDGER: judge_ledger(lambda: S3CaptureLedger(**given()), races=races),
        }
        try:
            for kit, verdicts in kits.items():
                async for verdict in verdicts:
                    if isinstance(verdict.cause, StoreError):
                        raise verdict.cause
                    yield kit, verdict
        finally:
            for verdicts in kits.values():
                await verdicts.aclose()
            await asyncio.to_thread(_remove, settings, store)


def _remove(settings: Settings, store: Store | None) -> None:
    runtime = shared(settings, store)

    def steps() -> Steps[tuple[tuple[str, str], ...]]:
        (answer,) = yield (List(runtime.keys.root),)
        keys = tuple(row.key for row in listed(answer))
        if not keys:
            return ()
        (gone,) = yield (Delete(keys),)
        return gone.failed if isinstance(gone, Deleted) else ()

    what = f"removal of the throw-away run {settings.run!r}"
    left = runtime.submit("conformance.remove", what, steps).result()
    if left:
        raise StoreError(f"{what}: {len(left)} objects are still there, the first is {left[0][0]} ({left[0][1]})")
