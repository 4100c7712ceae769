"""Where two payloads of one call differ, field by field.

The rule of this module: it shows where and how much, in values short enough to be read side by side, and never an
array: of two token arrays it says the lengths and the first index at which they part, with the two values there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

MOST = 50
"""How many differences are told; ``Differences.more`` counts the rest."""

_SHOWN = 80
_BEFORE = 20


@dataclass(frozen=True, slots=True)
class Difference:
    """One field that differs; ``stored`` and ``refused`` are short texts, None where there is no such field."""

    path: str
    stored: str | None
    refused: str | None


@dataclass(frozen=True, slots=True)
class Differences:
    """The first ``MOST`` differences, and how many there are beyond."""

    told: tuple[Difference, ...]
    more: int = 0


def differences(stored: Any, refused: Any) -> Differences:
    """Compare two JSON-like values."""
    found = _compare("", stored, refused)
    return Differences(tuple(islice(found, MOST)), sum(1 for _ in found))


def _compare(path: str, stored: Any, refused: Any) -> Iterator[Difference]:
    if isinstance(stored, dict) and isinstance(refused, dict):
        for name in sorted(stored.keys() | refused.keys()):
            below = f"{path}.{name}" if path else str(name)
            if name not in refused:
                yield Difference(below, shown(stored[name]), None)
            elif name not in stored:
                yield Difference(below, None, shown(refused[name]))
            else:
                yield from _compare(below, stored[name], refused[name])
    elif isinstance(stored, list) and isinstance(refused, list):
        yield from _compare_lists(path, stored, refused)
    elif not _same(stored, refused):
        yield Difference(path or "(whole)", *_windows(stored, refused))


def _compare_lists(path: str, stored: list[Any], refused: list[Any]) -> Iterator[Difference]:
    if _flat(stored) and _flat(refused):
        first = _first_difference(stored, refused)
        if first is not None:
            yield Difference(path or "(whole)", _at(stored, first), _at(refused, first))
        return
    for index in range(max(len(stored), len(refused))):
        below = f"{path}[{index}]"
        if index >= len(refused):
            yield Difference(below, shown(stored[index]), None)
        elif index >= len(stored):
            yield Difference(below, None, shown(refused[index]))
        else:
            yield from _compare(below, stored[index], refused[index])


def _flat(items: list[Any]) -> bool:
    return not {kind for kind in set(map(type, items)) if kind in (dict, list, str)}


def _first_difference(stored: list[Any], refused: list[Any]) -> int | None:
    if len(stored) == len(refused) and all(map(_same, stored, refused)):
        return None
    pairs = enumerate(zip(stored, refused, strict=False))
    return next((index for index, (one, other) in pairs if not _same(one, other)), min(len(stored), len(refused)))


def _same(one: Any, other: Any) -> bool:
    # 1, 1.0 and True are three payloads; NaN is one with itself, and 0.0 is not -0.0.
    return type(one) is type(other) and (one == other if not isinstance(one, float) else repr(one) == repr(other))


def _at(items: list[Any], index: int) -> str:
    here = shown(items[index]) if index < len(items) else "(ended)"
    return f"{len(items):,} values; [{index:,}] is {here}"


def _windows(stored: Any, refused: Any) -> tuple[str, str]:
    """Two values as text; of two long strings the part where they begin to differ."""
    if not (isinstance(stored, str) and isinstance(refused, str)) or max(len(stored), len(refused)) <= _SHOWN:
        return shown(stored), shown(refused)
    pairs = enumerate(zip(stored, refused, strict=False))
    parts = next((index for index, (one, other) in pairs if one != other), min(len(stored), len(refused)))
    start = max(parts - _BEFORE, 0)
    return _window(stored, start), _window(refused, start)


def _window(text: str, start: int) -> str:
    head, tail = "…" if start else "", "…" if start + _SHOWN < len(text) else ""
    return f"{head}{_quoted(text[start : start + _SHOWN])}{tail} ({len(text):,} characters)"


def shown(value: Any) -> str:
    """Return one value as short text: strings quoted and cut, arrays and objects by their size."""
    if isinstance(value, list):
        return f"a list of {len(value):,}"
    if isinstance(value, Mapping):
        return f"an object of {len(value):,} fields"
    if isinstance(value, str):
        return _quoted(value) if len(value) <= _SHOWN else f"{_quoted(value[:_SHOWN])}… ({len(value):,} characters)"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return f"an integer of {value.bit_length():,} bits"
    return json.dumps(value)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
