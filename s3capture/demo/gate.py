"""A gate that many pass together, until one wants to be alone.

The rule of this module: whoever is alone shares the time with nobody, so what happens during an outage is the same
in every run; and those who come later wait behind the one who wants to be alone, who therefore gets its turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """For one event loop."""

    def __init__(self) -> None:
        self._change = asyncio.Condition()
        self._passing = 0
        self._closed = False

    @asynccontextmanager
    async def together(self) -> AsyncIterator[None]:
        """Pass while nobody is alone or waits to be."""
        async with self._change:
            await self._change.wait_for(lambda: not self._closed)
            self._passing += 1
        try:
            yield
        finally:
            async with self._change:
                self._passing -= 1
                self._change.notify_all()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Wait until nobody passes any more, and let nobody pass meanwhile."""
        async with self._change:
            await self._change.wait_for(lambda: not self._closed)
            self._closed = True
            try:
                await self._change.wait_for(lambda: not self._passing)
            except BaseException:
                self._closed = False
                raise
        try:
            yield
        finally:
            async with self._change:
                self._closed = False
                self._change.notify_all()
