"""What a spilled mark is, and its name and bytes on the disk.

The rule of this module: ``decode`` gives back exactly the mark that ``encode`` was given, or says that it cannot.
Names are made of digests alone, because file systems fold case and normalise Unicode; ids come back from inside
the file. The bytes are an interface between versions: if they change under one ``FORMAT_VERSION``, marks written
before an upgrade are set aside as damaged after it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass, fields
from typing import Any

FORMAT_VERSION = 1

_MARK_ID = re.compile(r"[0-9a-f]{1,64}")
_ESCAPED = "utf-8+surrogatepass"


class DamagedError(Exception):
    """The file does not read back as a mark that this version wrote."""


class NewerError(Exception):
    """The file was written by a newer version, which alone can judge it."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where marks are to be published: one run under one prefix of one bucket."""

    endpoint_url: str | None
    bucket: str
    prefix: str
    run: str


@dataclass(frozen=True, slots=True)
class SpilledMark:
    """One "incomplete" mark that waits for S3.

    ``call`` is any string, lone surrogates included. ``mark_id`` (1 to 64 lowercase hex digits, unique) is
    the name under which the mark is created in S3, so publishing it twice is harmless. ``at`` is in seconds
    since the epoch; ``by`` names the process that wrote it. A value that could not be read back is a
    ``TypeError`` or ``ValueError`` here, before anything is promised.
    """

    bucket: str
    prefix: str
    endpoint_url: str | None
    run: str
    rollout: str
    call: str
    mark_id: str
    at: float
    reason: str
    by: str

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            allowed = {"at": (int, float), "endpoint_url": (str, type(None))}.get(field.name, (str,))
            if not isinstance(value, allowed):
                raise TypeError(f"{field.name} {value!r} of a spilled mark is a {type(value).__name__}")
        if not math.isfinite(self.at):
            raise ValueError(f"at {self.at!r} is not a finite number of seconds")
        if not _MARK_ID.fullmatch(self.mark_id):
            raise ValueError(f"mark id {short(self.mark_id)} is not 1 to 64 lowercase hex digits")

    @property
    def target(self) -> Target:
        """Where this mark is to be published."""
        return Target(self.endpoint_url, self.bucket, self.prefix, self.run)


def short(text: str) -> str:
    """Return ``text`` in a form fit for a message, at most about 100 characters."""
    shown = repr(text)
    return shown if len(shown) <= 100 else f"{shown[:100]}..."


def file_name(mark: SpilledMark) -> str:
    """Return the name of the file of ``mark``: target, rollout, mark id."""
    return f"{_target_digest(mark.target)}-{_digest(mark.rollout)[:16]}-{mark.mark_id}.mark"


def pattern(target: Target | None, rollout: str | None) -> str:
    """Return a glob of the names to read; without a selection misnamed ``.mark`` files too."""
    if target is None and rollout is None:
        return "[!.]*.mark"
    first = "?" * 16 if target is None else _target_digest(target)
    second = "?" * 16 if rollout is None else _digest(rollout)[:16]
    return f"{first}-{second}-*.mark"


def encode(mark: SpilledMark, why: str | None = None) -> bytes:
    """Return the file content: one line of ASCII JSON, as kind ``late`` when there is a ``why``."""
    content: dict[str, object] = {field.name: _plain(getattr(mark, field.name)) for field in fields(SpilledMark)}
    content["at"] = float(mark.at)
    if why is not None:
        content["why"] = _plain(why)
    line = {
        "version": FORMAT_VERSION,
        "kind": "mark" if why is None else "late",
        "sha256": _digest(_canonical(content)),
        "fields": content,
    }
    return _canonical(line).encode("ascii") + b"\n"


def decode(name: str, data: bytes) -> tuple[SpilledMark, str | None]:
    """Return the mark of a file called ``name``, and why it is late (None for one that is not).

    Raise ``DamagedError`` unless ``data`` is, byte for byte, what this version writes under that name, and
    ``NewerError`` for a format version of the future.
    """
    try:
        line = json.loads(data.decode("ascii"))
        if line["version"] > FORMAT_VERSION:
            raise NewerError(
                f"it has format version {line['version']}, and this version of s3capture reads {FORMAT_VERSION}"
            )
        content = {key: _text(value) for key, value in line["fields"].items()}
        why = content.pop("why", None)
        mark = SpilledMark(**content)
        whole = encode(mark, why) == data
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise DamagedError(f"it is no whole spill file: {type(error).__name__}") from error
    if not whole:
        raise DamagedError("its content is not what was written")
    if file_name(mark) != name:
        raise DamagedError("its name belongs to another mark")  # settling that mark would never remove this file
    return mark, why


def _plain(value: Any) -> Any:
    """Return what stands for ``value`` in JSON so that it comes back exactly.

    JSON writes two lone surrogates in a row as it writes the one character they would form, and reads that
    character back; such a string goes as the hex of its own bytes instead.
    """
    if json.loads(json.dumps(value)) == value:
        return value
    return {_ESCAPED: value.encode("utf-8", "surrogatepass").hex()}


def _text(value: Any) -> Any:
    return bytes.fromhex(value[_ESCAPED]).decode("utf-8", "surrogatepass") if isinstance(value, dict) else value


def _canonical(value: object) -> str:
    return json.dumps(value, ensure_ascii=True, allow_nan=False, sort_keys=True, separators=(",", ":"))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _target_digest(target: Target) -> str:
    # A JSON list keeps the parts apart, and None apart from "", where a separator would not.
    return _digest(_canonical([_plain(getattr(target, field.name)) for field in fields(Target)]))[:16]
