"""The fenced blocks of a documentation page, so that what runs in tests is what the page says.

The rule of this module: blocks are taken word for word; nothing is filled in or left out.
"""

from __future__ import annotations

import re
from pathlib import Path

GYM_PAGE = Path(__file__).parent.parent.parent / "docs" / "nemo-gym.md"


def blocks(page: Path, language: str) -> list[str]:
    """The blocks of ``page`` in one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
