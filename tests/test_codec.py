"""What goes into an object comes back as itself, to the bit, or is refused by its path; damage never goes unseen."""

from __future__ import annotations

import enum
import hashlib
import json
import math
import random
import struct
from collections import OrderedDict
from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import orjson
import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from s3capture.codec import FORMAT, MAX_DEPTH, MAX_HEADER, Payload, canonical, decode, encode, parse_payload
from s3capture.errors import CorruptObjectError, UnknownFormatError, UnstorableValueError

KEY = "p/r/attempts/00/x/call/c"
# Every code point; two surrogates that would read back as one character have a test of their own.
texts = st.text(st.characters(exclude_categories=()), max_size=12).filter(
    lambda text: not any(0xD800 <= ord(a) < 0xDC00 <= ord(b) < 0xE000 for a, b in pairwise(text))
)
integers = (
    st.integers() | st.integers(min_value=2**62, max_value=2**70) | st.integers(min_value=-(2**70), max_value=-(2**62))
)
leaves = st.none() | st.booleans() | integers | st.floats(allow_subnormal=True) | texts
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)
plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), inner, max_size=4)
    ),
    max_leaves=20,
)


def identical(one: Any, other: Any) -> bool:
    """Whether two values are of one type and, floats to the bit (NaN is NaN), the same."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        same_bits = struct.pack(">d", one) == struct.pack(">d", other)
        return same_bits or (math.isnan(one) and math.isnan(other))
    if isinstance(one, list):
        return len(one) == len(other) and all(map(identical, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(identical(one[key], other[key]) for key in one)
    return bool(one == other)


def stored(value: Any, **fields: Any) -> bytes:
    return encode("entry", fields, canonical(value))


def frame(content: bytes, *, checksum: bool = True, size: bool = True) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=checksum, write_content_size=size).compress(content)


def content(payload: bytes = b"{}", **header: Any) -> bytes:
    fields = {"s3capture": FORMAT, "kind": "entry", "sha256": hashlib.sha256(payload).hexdigest(), **header}
    return json.dumps({k: v for k, v in fields.items() if v is not ...}).encode() + b"\n" + payload


# -- values -------------------------------------------------------------------------------------------------


@given(values)
@example([-math.inf, math.inf, math.nan, None, -9999.0, -0.0, 0.0, 0.031, 5e-324, 1.7976931348623157e308])
@example([2**64, 2**64 - 1, -(2**63), -(2**63) - 1, 10**400, 0, True, False, 1, 1.0])
@example({"\ud800": "\udfff", "é": "é", "": "\x00\u2028", "a\ud800": [math.nan]})
@example([[], {}, "", None, [[]], {"": {}}])
@example({"nan": [1.5, math.nan], "plain": [1, 2, 3]})
def test_every_value_comes_back_as_itself(value: Any) -> None:
    """Any JSON-like value is read back with the same types and the same bits, through the stored bytes."""
    assert identical(decode(KEY, stored(value)).value(), value)


@given(st.floats(width=32) | st.floats(), st.integers(0, 3))
def test_floats_keep_their_bits(number: float, neighbours: int) -> None:
    """A float comes back to the bit, alone, among floats, and among values that force the other form."""
    for value in (number, [number] * (neighbours + 1), [number, 2**70, "\ud800"]):
        assert identical(parse_payload(canonical(value).data), value)


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: {"k": inner}, lambda inner: [1, [inner]]])
def test_deep_nesting_comes_back(wrap: Any) -> None:
    """150 levels of nesting are kept, plain or not; more than the limit is refused, never a RecursionError."""
    for leaf in (1, math.nan):
        value: Any = leaf
        depth = 0
        while depth < 150:
            value, depth = wrap(value), depth + (2 if wrap(0) == [1, [0]] else 1)
        assert identical(decode(KEY, stored(value)).value(), value)
        for _ in range(MAX_DEPTH):
            value = wrap(value)
        with pytest.raises(UnstorableValueError, match="nested deeper than"):
            canonical(value)


@given(plain_values)
def test_the_digest_of_a_plain_value_is_the_contracts(value: Any) -> None:
    """For what orjson keeps, the bytes are orjson's sorted-key compact JSON, and the digest is their SHA-256."""
    expected = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    assert canonical(value) == Payload(expected, hashlib.sha256(expected).hexdigest())


def test_the_digest_is_pinned() -> None:
    """The canonical bytes of both forms are part of the stored format and may not drift."""
    assert canonical({"b": [1, 2.5, -0.0], "a": "é"}).data == '{"a":"é","b":[1,2.5,-0.0]}'.encode()
    assert canonical({"b": [math.nan, -math.inf], "a": "é"}).data == rb'{"a":"\u00e9","b":[NaN,-Infinity]}'
    assert canonical({"a": "\ud800"}).data == rb'{"a":"\ud800"}'


@given(st.dictionaries(texts, leaves, min_size=2, max_size=6), st.randoms())
def test_the_order_of_keys_does_not_matter(value: dict[str, Any], shuffle: random.Random) -> None:
    """The same fields in another order, at any level, are the same payload."""
    items = list(value.items())
    shuffle.shuffle(items)
    assert canonical(dict(items)) == canonical(value)
    assert canonical({"outer": [dict(items)]}) == canonical({"outer": [value]})


def test_two_nan_payloads_are_the_same() -> None:
    """NaN is equal to NaN here, whatever its bits, so a record with NaN can be put again."""
    (odd,) = struct.unpack(">d", bytes.fromhex("7ff8000000000001"))
    assert (
        canonical([math.nan, 1.0])
        == canonical([float("nan"), 1.0])
        == canonical([odd, 1.0])
        == canonical([-math.nan, 1.0])
    )
    assert canonical([math.nan]) != canonical([None])


@pytest.mark.parametrize(
    ("one", "other"),
    [(0.0, -0.0), (1, 1.0), (1, True), (0, False), (None, math.nan), ("1", 1), ([], {}), (2**53, 2**53 + 1)],
)
def test_values_that_python_confuses_are_different_payloads(one: Any, other: Any) -> None:
    """What compares equal in Python, or prints alike elsewhere, is another payload."""
    assert canonical([one]).digest != canonical([other]).digest


class Colour(enum.StrEnum):
    RED = "red"


class Number(enum.IntEnum):
    ONE = 1


class Text(str):
    __slots__ = ()


class Whole(int):
    pass


class Real(float):
    pass


@pytest.mark.parametrize(
    ("given_", "kept"),
    [
        (Colour.RED, "red"),
        (Number.ONE, 1),
        (Text("x"), "x"),
        (Whole(3), 3),
        (Real(0.5), 0.5),
        (OrderedDict(b=1, a=2), {"a": 2, "b": 1}),
        (MappingProxyType({"a": 1}), {"a": 1}),
        ((1, 2), [1, 2]),
    ],
)
@pytest.mark.parametrize("beside", [0, math.nan])
def test_subclasses_are_stored_as_what_json_sees(given_: Any, kept: Any, beside: float) -> None:
    """An enum, a subclass of a JSON type, a mapping and a tuple are the value that JSON has for them, in both forms."""
    assert canonical([given_, beside]) == canonical([kept, beside])


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, b"raw"]}, "a[1]"),
        ({"a": {"b": {1, 2}}}, "a.b"),
        ({"a": [0.5, {"b": object()}]}, "a[1].b"),
        ({"a": {1: "x"}}, "a[1]"),
        ({"a": {None: "x"}}, "a[None]"),
        ([1, complex(1, 2)], "[1]"),
        (b"raw", "the record"),
        ({"a": ["ok", "\ud83d\ude00"]}, "a[1]"),
        ({"\ud83d\ude00": 1}, "['\\ud83d\\ude00']"),
        ({"a": [1, 10**5000]}, "a[1]"),
        (Exception(), "the record"),
    ],
)
def test_what_cannot_come_back_is_refused_by_its_path(value: Any, path: str) -> None:
    """A value without a JSON form is refused before anything is written, and the error says where it is."""
    with pytest.raises(UnstorableValueError) as caught:
        canonical(value)
    assert caught.value.path == path
    assert path in str(caught.value)


# -- objects ------------------------------------------------------------------------------------------------


@given(values, texts)
def test_the_header_comes_back(value: Any, call: str) -> None:
    """Kind, header fields (any text), digest and payload bytes are read back as they were written."""
    payload = canonical(value)
    found = decode(KEY, encode("refusal", {"call": call, "n": 1}, payload))
    assert (found.kind, found.header["call"], found.header["n"]) == ("refusal", call, 1)
    assert (found.digest, found.payload) == (payload.digest, payload.data)


def test_a_person_can_read_an_object() -> None:
    """Decompressed, an object is one JSON header line and the payload, with newlines only between the two."""
    line, payload = zstandard.ZstdDecompressor().decompress(stored({"v": "a\nb"}, call="x\ny")).split(b"\n")
    assert json.loads(line)["call"] == "x\ny"
    assert json.loads(payload) == {"v": "a\nb"}


def test_the_same_value_is_stored_as_the_same_bytes() -> None:
    """Encoding has no clock and no chance in it."""
    assert stored({"v": [1.5] * 1000}, call="c") == stored({"v": [1.5] * 1000}, call="c")


def test_every_flipped_byte_is_noticed() -> None:
    """No damaged byte of a stored object is read as something else; a zstd frame has a few bits that mean nothing,
    and with those flipped the object is still itself."""
    rng = random.Random(7)
    ids = [rng.randrange(150_000) for _ in range(400)]
    body = stored({"ids": ids, "text": "word " * 50, "p": rng.random()}, call="c")
    intact, noticed = decode(KEY, body), 0
    for position in range(len(body)):
        for bits in (*(1 << bit for bit in range(8)), 0xFF):
            damaged = bytearray(body)
            damaged[position] ^= bits
            try:
                assert decode(KEY, bytes(damaged), limit=1 << 20) == intact
            except CorruptObjectError:
                noticed += 1
    assert noticed > len(body) * 9 * 0.99


@pytest.mark.parametrize("checksum", [True, False])
def test_a_flipped_byte_is_noticed_by_the_digest_alone(checksum: bool) -> None:
    """A payload that is not what its header says is refused, also when the frame around it is intact."""
    good = content(b'{"v":[1,2,3]}')
    assert decode(KEY, frame(good, checksum=checksum)).value() == {"v": [1, 2, 3]}
    with pytest.raises(CorruptObjectError, match="digest"):
        decode(KEY, frame(good.replace(b"[1,2,3]", b"[1,2,4]"), checksum=checksum))


def test_every_truncation_is_noticed() -> None:
    """An object that lost its end, at whatever byte, is an error."""
    body = stored({"v": list(range(300))})
    for size in range(len(body)):
        with pytest.raises(CorruptObjectError):
            decode(KEY, body[:size])


def bomb(blocks: int, claimed: int) -> bytes:
    """A frame of run-length blocks of 128 KiB, four bytes each, that claims another size."""
    head = b"\x28\xb5\x2f\xfd" + bytes([0x80, 0x38]) + struct.pack("<I", claimed)
    body = b"".join(
        struct.pack("<I", (131_072 << 3) | (1 << 1) | (number == blocks - 1))[:3] + b"a" for number in range(blocks)
    )
    return head + body


GOOD = stored({"v": 1})
SKIPPABLE = b"\x50\x2a\x4d\x18\x04\x00\x00\x00skip"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", "not a zstd frame"),
        (b"{}", "not a zstd frame"),
        (b"<Error><Code>NoSuchKey</Code></Error>", "not a zstd frame"),
        (GOOD + b"x", "1 bytes follow"),
        (GOOD + GOOD, "bytes follow"),
        (GOOD + SKIPPABLE, "bytes follow"),
        (SKIPPABLE + GOOD, "."),
        (frame(content(), size=False), "does not say its size"),
        (frame(b""), "."),
        (frame(b"no newline"), "header line is not JSON"),
        (frame(b"\xff\xfe\n{}"), "header line is not JSON"),
        (frame(b"[" * 100_000 + b"\n{}"), "header line is not JSON"),
        (frame(b"[]\n{}"), "not an s3capture object"),
        (frame(b'{"kind":"entry"}\n{}'), "not an s3capture object"),
        (frame(content(s3capture="1")), "not an s3capture object"),
        (frame(content(kind=...)), "names no kind"),
        (frame(content(kind=1)), "names no kind"),
        (frame(content(sha256=...)), "digest"),
        (frame(content(sha256=None)), "digest"),
        (frame(b"{" + b" " * (2 << 20) + b"}\n{}"), "header line has"),
        (b"\x28\xb5\x2f\xfd\xa0" + struct.pack("<I", 2**32 - 1) + b"\x01\x00\x00", "claims 4294967295 bytes"),
        (b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 2**40) + b"\x01\x00\x00", "claims 1099511627776 bytes"),
        (bomb(1000, 300), "damaged frame"),
        (bomb(1000, 131_072_000), "claims 131072000 bytes"),
    ],
    ids=range(24),
)
def test_anything_else_is_corrupt(body: bytes, problem: str) -> None:
    """Junk, more than one frame, missing sizes, bombs and half headers are one kind of error that names the key."""
    with pytest.raises(CorruptObjectError, match=problem) as caught:
        decode(KEY, body, limit=64 << 20)
    assert KEY in str(caught.value)
    assert not isinstance(caught.value, UnknownFormatError)


def test_the_limit_is_on_content() -> None:
    """An object of exactly the limit is read and one byte less is refused before it is unpacked."""
    size = zstandard.get_frame_parameters(GOOD).content_size
    assert decode(KEY, GOOD, limit=size).value() == {"v": 1}
    with pytest.raises(CorruptObjectError, match=f"the limit is {size - 1}"):
        decode(KEY, GOOD, limit=size - 1)


def test_a_newer_format_is_refused_and_says_so() -> None:
    """An object of a later version is never guessed at: the error names both versions and what to do."""
    with pytest.raises(UnknownFormatError, match=f"format {FORMAT + 1}.*reads format {FORMAT}.*upgrade"):
        decode(KEY, frame(content(s3capture=FORMAT + 1)))


def test_unknown_header_fields_are_kept() -> None:
    """A field that this version does not know is no damage."""
    assert decode(KEY, frame(content(colour="red"))).header["colour"] == "red"


def test_a_mapping_view_is_a_mapping() -> None:
    """Header fields may come as any mapping."""
    fields: Mapping[str, Any] = MappingProxyType({"call": "c"})
    assert decode(KEY, encode("entry", fields, canonical(None))).header["call"] == "c"


@pytest.mark.parametrize("call", ["x" * (MAX_HEADER + 1), "\ud800" * 200_000])
def test_what_no_reader_would_take_is_refused_by_the_writer(call: str) -> None:
    """Ids that make a header longer than readers accept are refused when the object is made, not when it is read."""
    with pytest.raises(UnstorableValueError, match="ids"):
        encode("entry", {"call": call}, canonical(1))
