"""docs/operations.md against the code: a default that moves must move there too."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from s3capture.settings import Settings

_PAGE = Path(__file__).resolve().parent.parent / "docs" / "operations.md"


def test_the_settings_table_shows_the_defaults() -> None:
    """Each number in the table of settings is the default in the code, and no numeric setting is missing."""
    table = _PAGE.read_text().split("| setting | default |")[1].split("\n\n")[0]
    shown = dict(re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", table, re.MULTILINE))
    numeric = {field.name: str(field.default) for field in fields(Settings) if isinstance(field.default, (int, float))}
    assert shown == numeric
