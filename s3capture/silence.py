"""A log kept silent for a while.

The rule of this module: only who tells everything that would be logged, thing by thing, may use it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unlogged(name: str) -> Iterator[None]:
    """Keep the logger ``name`` silent, and those below it that have no level of their own."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
