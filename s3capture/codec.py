"""The bytes of every stored object, and of the payload whose digest is a call's identity.

The rule of this module: what goes in comes back as itself, to the bit, or is refused with its path before
anything is written; and what comes out was checked against the digest that the object carries, or is an
error. An object is one zstd frame (checksum and content size on) around one JSON header line and the
canonical payload; ``zstd -dc`` shows a person what is there. The format version stands in the header, and a
version this code does not know is refused.

Two payloads are the same exactly if their canonical bytes are. Those are sorted-key JSON: for values that
orjson keeps, orjson's own bytes (the ones nemo-gym 0.7.0 hashes); for the others (non-finite floats, integers
beyond 64 bits, lone surrogates) the standard library's ASCII JSON with ``NaN`` and ``Infinity``.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import orjson
import zstandard

from s3capture.errors import CorruptObjectError, UnknownFormatError, UnstorableValueError

FORMAT = 1
MAX_DEPTH = 200
# Measured by tests/benchmarks/codec_levels.py: on real records level 3 is about 1% smaller and a third slower, on
# random token ids it is larger as well.
LEVEL = 1
MAX_HEADER = 1024 * 1024
MAX_PAYLOAD = 1024 * 1024 * 1024
"""What a reader takes, in bytes of header line and of payload; a writer refuses more."""
DEFAULT_LIMIT = MAX_HEADER + 1 + MAX_PAYLOAD
_SPLIT_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1
# Python neither writes nor reads an int of more than 4,300 decimal digits.
_MAX_INT_BITS = 14_000


@dataclass(frozen=True, slots=True)
class Payload:
    """Canonical bytes of one value and their SHA-256 in hex."""

    data: bytes
    digest: str


def canonical(value: Any) -> Payload:
    """Return the canonical form of a JSON-like ``value`` or raise ``UnstorableValueError`` with the path."""
    plain = _survey(value, "", 0)
    if plain:
        try:
            data = orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_PASSTHROUGH_SUBCLASS, default=_subclass)
        except TypeError:
            plain = False  # a lone surrogate: only the serializer notices
    if not plain:
        _refuse_split_pairs(value, "")
        data = json.dumps(
            value, sort_keys=True, ensure_ascii=True, allow_nan=True, separators=(",", ":"), default=_subclass
        ).encode("ascii")
    return Payload(data, hashlib.sha256(data).hexdigest())


def _refuse_split_pairs(value: Any, path: str) -> None:
    """Refuse a high surrogate followed by a low one: JSON would read the two back as one character."""
    if isinstance(value, str):
        if _SPLIT_PAIR.search(value):
            raise UnstorableValueError(path or "the record", "two surrogates in a row, which are no valid text")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _refuse_split_pairs(str(key), f"{path}[{key!r}]"[:200])
            _refuse_split_pairs(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)) and not set(map(type, value)) <= {int, float}:
        for index, item in enumerate(value):
            _refuse_split_pairs(item, f"{path}[{index}]")


def parse_payload(data: bytes) -> Any:
    """Return the value of canonical bytes; exact for both forms of ``canonical``."""
    # The standard library keeps big integers, NaN and surrogates, all of which orjson changes or refuses.
    return json.loads(data)


def _subclass(value: Any) -> Any:
    """Serialize the few subclasses that ``_survey`` lets through as what they are to JSON."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return dict(value)
    return list(value)


def _survey(value: Any, path: str, depth: int) -> bool:
    """Check every value below ``value``; return whether orjson keeps them all."""
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return True
    if kind is int:
        if value.bit_length() > _MAX_INT_BITS:
            raise UnstorableValueError(
                path or "the record", f"an int of {value.bit_length()} bits is too long for JSON"
            )
        return bool(_INT_MIN <= value <= _INT_MAX)
    if kind is float:
        return math.isfinite(value)
    if depth >= MAX_DEPTH:
        raise UnstorableValueError(path or "the record", f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, Enum):
        return _survey(value.value, path, depth)
    if isinstance(value, Mapping):
        plain = True
        for key, item in value.items():
            if not isinstance(key, str):
                raise UnstorableValueError(
                    f"{path}[{key!r}]"[:200],
                    f"the key is a {type(key).__name__}; JSON objects have only string keys",
                )
            plain &= _survey(item, f"{path}.{key}" if path else key, depth + 1)
        return plain
    if isinstance(value, (list, tuple)):
        return _survey_sequence(value, path, depth)
    if isinstance(value, (str, int, float)):
        return _survey(_subclass(value), path, depth)
    raise UnstorableValueError(path or "the record", f"a {kind.__module__}.{kind.__qualname__} has no JSON form")


def _survey_sequence(items: list[Any] | tuple[Any, ...], path: str, depth: int) -> bool:
    # Token arrays hold 100,000 numbers: they are judged by C loops, not one call for each item.
    kinds = set(map(type, items))
    if kinds == {int} and min(items) >= _INT_MIN and max(items) <= _INT_MAX:
        return True
    if kinds == {float}:
        return all(map(math.isfinite, items))
    if kinds <= {str, bool, type(None)}:
        return True
    plain = True
    for index, item in enumerate(items):
        plain &= _survey(item, f"{path}[{index}]", depth + 1)
    return plain


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A decoded object: its kind, header fields and payload bytes (already checked)."""

    kind: str
    header: dict[str, Any]
    payload: bytes

    @property
    def digest(self) -> str:
        """SHA-256 of the payload in hex."""
        return str(self.header["sha256"])

    def value(self) -> Any:
        """The payload as a value; raise ``CorruptObjectError`` for one that is no JSON, intact as its bytes may be."""
        try:
            return parse_payload(self.payload)
        except (ValueError, RecursionError) as error:
            what = f"{self.kind} of call {self.header.get('call')!r}, rollout {self.header.get('rollout')!r}"
            raise CorruptObjectError(f"the payload of an object ({what}) is not JSON: {error}") from error


def encode(kind: str, fields: Mapping[str, Any], payload: Payload) -> bytes:
    """Return the bytes of an object; ``fields`` (ids and the like) go into its header line."""
    header = {"s3capture": FORMAT, "kind": kind, "sha256": payload.digest, **fields}
    line = json.dumps(header, ensure_ascii=True, separators=(",", ":")).encode("ascii")
    if len(line) > MAX_HEADER:
        raise UnstorableValueError("the ids of the object", f"{len(line)} bytes; at most {MAX_HEADER} can be read back")
    if len(payload.data) > MAX_PAYLOAD:
        raise UnstorableValueError("the record", f"{len(payload.data)} bytes; at most {MAX_PAYLOAD} can be read back")
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True, write_content_size=True)
    return compressor.compress(line + b"\n" + payload.data)


def decode(key: str, body: bytes, limit: int = DEFAULT_LIMIT) -> StoredObject:
    """Return the object stored at ``key``; ``limit`` bounds the memory, in bytes of content.

    Raise ``CorruptObjectError`` for anything but one intact frame whose payload has the digest that its
    header names, and ``UnknownFormatError`` for a format version of the future.
    """
    line, _, payload = _unpack(key, body, limit).partition(b"\n")
    if len(line) > MAX_HEADER:
        raise CorruptObjectError(f"{key}: the header line has {len(line)} bytes")
    try:
        header = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CorruptObjectError(f"{key}: the header line is not JSON ({error})") from error
    if not isinstance(header, dict) or not isinstance(header.get("s3capture"), int):
        raise CorruptObjectError(f"{key}: not an s3capture object")
    if header["s3capture"] != FORMAT:
        raise UnknownFormatError(
            f"{key}: written in format {header['s3capture']}, this version reads format {FORMAT}; upgrade s3capture"
        )
    if not isinstance(header.get("kind"), str):
        raise CorruptObjectError(f"{key}: the header names no kind")
    if hashlib.sha256(payload).hexdigest() != header.get("sha256"):
        raise CorruptObjectError(f"{key}: the payload does not have the digest that its header names")
    return StoredObject(header["kind"], header, payload)


def _unpack(key: str, body: bytes, limit: int) -> bytes:
    try:
        size = zstandard.get_frame_parameters(body).content_size
    except zstandard.ZstdError as error:
        raise CorruptObjectError(f"{key}: not a zstd frame ({error})") from error
    if size in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR):
        raise CorruptObjectError(f"{key}: the frame does not say its size")
    if size > limit:
        raise CorruptObjectError(f"{key}: the frame claims {size} bytes; the limit is {limit}")
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    try:
        data = decompressor.decompress(body)
    except (zstandard.ZstdError, MemoryError) as error:
        raise CorruptObjectError(f"{key}: damaged frame ({error})") from error
    if not decompressor.eof or len(data) != size:
        raise CorruptObjectError(f"{key}: the frame ends early")
    if decompressor.unused_data:
        raise CorruptObjectError(f"{key}: {len(decompressor.unused_data)} bytes follow the frame")
    return data
