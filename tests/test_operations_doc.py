"""docs/operations.md and docs/settings.md against the code: a default that moves must move there too."""

from __future__ import annotations

import re
from dataclasses import MISSING, Field, fields
from pathlib import Path

from s3capture import settings
from s3capture.settings import Settings

_DOCS = Path(__file__).resolve().parent.parent / "docs"
_PAGE = _DOCS / "operations.md"


def test_the_settings_table_shows_the_defaults() -> None:
    """Each number in the table of settings is the default in the code, and no numeric setting is missing."""
    table = _PAGE.read_text().split("| setting | default |")[1].split("\n\n")[0]
    shown = dict(re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", table, re.MULTILINE))
    numeric = {field.name: str(field.default) for field in fields(Settings) if isinstance(field.default, (int, float))}
    assert shown == numeric


def _default(field: Field[object]) -> str:
    if field.default is MISSING:
        return "required"
    return "none" if field.default is None else str(field.default)


def test_every_setting_is_on_its_page() -> None:
    """docs/settings.md has one row for each setting, with the default, the choices and the bounds of the code."""
    page = (_DOCS / "settings.md").read_text().split("## Environment variables")[0]
    rows = {
        name: (default.strip("`"), values)
        for name, default, values in re.findall(r"^\| `(\w+)` \| ([^|]+?) \| ([^|]+?) \|", page, re.MULTILINE)
    }
    assert {name: default for name, (default, _) in rows.items()} == {f.name: _default(f) for f in fields(Settings)}
    for name, choices in settings._CHOICES.items():
        assert re.findall(r"`([^`]+)`", rows[name][1]) == [choice for choice in choices if choice is not None]
    for name, most in settings._COUNTS.items():
        assert rows[name][1] == f"1 to {most}"
