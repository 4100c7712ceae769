"""The two files of an archive: the pack (all objects of many rollouts) and its index (what lies where).

The rule of this module: an object comes back with the content it had. One of ours is kept as the content of its frame,
header line and payload to the byte, because many of them compress far better together than each alone; whatever else
lies there (markers, damaged objects) is kept as it is. A file names its kind, its version and its run, and a reader
refuses what it does not know.

A flipped bit is an error, never another answer. Pages carry checksums; what says how to read them (page headers and
footer) has none, so names and sizes of all that comes out of a row group are compared with a digest in the metadata.

A pack is sorted by place in the key space, and cut into row groups of a few MiB, so that one rollout is one or two
ranges of it. The index repeats the rows without the large contents: a LIST of an archived run, and everything that is
said of a rollout without reading its tokens, costs the index alone.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import zstandard

from s3capture import codec
from s3capture.archive.needs import parquet
from s3capture.errors import CaptureError, CorruptObjectError, UnknownFormatError
from s3capture.keys import RunKeys

FORMAT = 1
GROUP_BYTES = 4 * 1024 * 1024
"""Content of a row group before compression, in bytes: what is fetched and unpacked to read one small rollout."""
INLINE_BYTES = 1024
"""Contents up to here stand in the index as well: marks, intents, seals."""
INLINE_FENCE_BYTES = 64 * 1024
"""So do fences up to here: a manifest grows with the calls, and a list of rollouts reads every one of them."""
_LEVEL = 9
_PAGE_BYTES = 8 * 1024 * 1024
_KIND, _VERSION, _RUN = b"s3capture.kind", b"s3capture.version", b"s3capture.run"
_ROWS, _NONCE = b"s3capture.rows", b"s3capture.nonce"


@dataclass(frozen=True, slots=True)
class Item:
    """One object to be packed, or unpacked.

    ``place`` is what its key is called within the rollout, ``stamp`` the store's time of its last change (ISO 8601),
    ``size`` its bytes when it was live. ``content`` is that of its frame when ``framed``, else the object as it was.
    """

    rollout: str
    place: str
    stamp: str
    size: int
    framed: bool
    content: bytes

    @property
    def digest(self) -> bytes:
        """SHA-256 over what must come back."""
        return hashlib.sha256((b"\1" if self.framed else b"\0") + self.content).digest()


_ITEM = ("rollout", "place", "stamp", "size", "framed", "content")


def content_of(key: str, body: bytes) -> tuple[bool, bytes]:
    """Return ``(framed, content)`` of a live object."""
    try:
        stored = codec.decode(key, body)
    except CorruptObjectError:
        return False, body
    content = zstandard.ZstdDecompressor().decompress(body)
    # Only what is sure to read the same again is taken apart.
    return (True, content) if content.endswith(stored.payload) else (False, body)


def body_of(framed: bool, content: bytes) -> bytes:
    """Return an object that reads like the one that was packed."""
    if not framed:
        return content
    return zstandard.ZstdCompressor(level=codec.LEVEL, write_checksum=True, write_content_size=True).compress(content)


def _schema(kind: str) -> Any:
    pyarrow, _ = parquet()
    columns: list[tuple[str, Any]] = [
        ("rollout", pyarrow.string()),
        ("place", pyarrow.string()),
        ("stamp", pyarrow.string()),
        ("size", pyarrow.int64()),
        ("framed", pyarrow.bool_()),
        ("content", pyarrow.binary()),
    ]
    if kind == "index":
        columns.append(("row_group", pyarrow.int32()))
    return pyarrow.schema(columns)


def _told(kind: str, keys: RunKeys, digests: list[bytes], nonce: str = "") -> dict[bytes, bytes]:
    told = {_KIND: kind.encode(), _VERSION: str(FORMAT).encode(), _RUN: keys.run.encode(), _ROWS: b",".join(digests)}
    return told | ({_NONCE: nonce.encode()} if nonce else {})


class PackWriter:
    """Writes one pack to a local file, row group by row group; at most one group is held in memory.

    The same objects make the same bytes, unless ``nonce`` makes them the file of one writer.
    """

    def __init__(self, keys: RunKeys, path: Path, *, nonce: str = "") -> None:
        _, pq = parquet()
        self.keys, self.path = keys, path
        self._schema = _schema("pack")
        # Statistics and dictionaries of contents would only cost; the file has its own digest.
        self._writer = pq.ParquetWriter(
            path, self._schema, compression="zstd", compression_level=_LEVEL, data_page_size=_PAGE_BYTES,
            use_dictionary=["rollout"], write_statistics=["rollout"], write_page_checksum=True, store_schema=False,
        )  # fmt: skip
        self._nonce = nonce
        self._held: list[Item] = []
        self._held_bytes = 0
        self._digests: list[bytes] = []
        self.index: list[tuple[Item, int]] = []

    def add(self, item: Item) -> None:
        """Append one object; those of a rollout come together."""
        self._held.append(item)
        self._held_bytes += len(item.content)
        if self._held_bytes >= GROUP_BYTES:
            self._flush()

    @property
    def bytes(self) -> int:
        """Bytes of the file so far; the open row group is counted as half its content."""
        return int(self.path.stat().st_size) + self._held_bytes // 2

    def close(self) -> list[tuple[Item, int]]:
        """Finish the file and return the index rows: each item, large contents left out, and its row group."""
        if self._held:
            self._flush()
        self._writer.add_key_value_metadata(_told("pack", self.keys, self._digests, self._nonce))
        self._writer.close()
        return self.index

    def _flush(self) -> None:
        table = _table(self._held, self._schema)
        self._writer.write_table(table, row_group_size=len(self._held))
        for item in self._held:
            inline = item.content if self._is_inline(item) else b""
            self.index.append((replace(item, content=inline), len(self._digests)))
        self._digests.append(_digest(table))
        self._held, self._held_bytes = [], 0

    def _is_inline(self, item: Item) -> bool:
        rollout = self.keys.rollout(item.rollout)
        most = INLINE_FENCE_BYTES if rollout.at(item.place).startswith(rollout.fences) else INLINE_BYTES
        return len(item.content) <= most


def _table(items: list[Item], schema: Any, groups: list[int] | None = None) -> Any:
    pyarrow, _ = parquet()
    columns: dict[str, list[Any]] = {
        "rollout": [item.rollout for item in items],
        "place": [item.place for item in items],
        "stamp": [item.stamp for item in items],
        "size": [item.size for item in items],
        "framed": [item.framed for item in items],
        "content": [item.content for item in items],
    }
    if groups is not None:
        # A content is never empty where it stands in the index, but for empty objects, which are given as such.
        columns["content"] = [item.content if item.content or not item.size else None for item in items]
        columns["row_group"] = groups
    return pyarrow.table(columns, schema=schema)


def index_bytes(keys: RunKeys, rows: list[tuple[Item, int]]) -> bytes:
    """Return the file of an index. The same rows give the same bytes."""
    _, pq = parquet()
    out = io.BytesIO()
    table = _table([item for item, _ in rows], _schema("index"), [group for _, group in rows])
    with pq.ParquetWriter(
        out, table.schema, compression="zstd", compression_level=_LEVEL, use_dictionary=["rollout", "row_group"],
        write_page_checksum=True, store_schema=False,
    ) as writer:  # fmt: skip
        writer.write_table(table, row_group_size=len(rows) or 1)
        writer.add_key_value_metadata(_told("index", keys, [_digest(table)]))
    return out.getvalue()


def _digest(table: Any) -> bytes:
    """Digest which rows there are: names, numbers, and how long all else is.

    Not the contents: the checksums of their pages hold them, and hashing them would cost as much as reading them. What
    a bent header does (rows left out or taken from elsewhere, another encoding) shows in the lengths.
    """
    pyarrow, _ = parquet()
    compute = import_module("pyarrow.compute")
    digest = hashlib.sha256()
    for name, column in zip(table.column_names, table.columns, strict=True):
        variable = pyarrow.types.is_string(column.type) or pyarrow.types.is_binary(column.type)
        numbers = compute.binary_length(column) if variable else column.cast(pyarrow.int64())
        for chunk in compute.fill_null(numbers, -1).chunks:
            digest.update(_bytes_of(chunk, 1, chunk.offset, len(chunk), chunk.type.bit_width // 8))
        if name in ("rollout", "place"):
            for chunk in column.chunks:
                ends = memoryview(chunk.buffers()[1]).cast("i")
                start = ends[chunk.offset] if len(chunk) else 0
                stop = ends[chunk.offset + len(chunk)] if len(chunk) else 0
                digest.update(_bytes_of(chunk, 2, start, stop - start, 1))
    return digest.hexdigest()[:32].encode()


def _bytes_of(array: Any, buffer: int, start: int, count: int, width: int) -> memoryview:
    # A copy by way of Python objects would take longer than all the rest of reading an index.
    held = array.buffers()[buffer] if count else None
    return memoryview(held or b"")[start * width : (start + count) * width]


@contextmanager
def decoding(key: str) -> Iterator[None]:
    """Turn whatever decoding a damaged file raises into a ``CorruptObjectError`` that names ``key``.

    Reading a table finds most damage, but not all: text that is no UTF-8, say, is found by ``to_pylist``.
    """
    pyarrow, _ = parquet()
    try:
        yield
    except CaptureError:  # some are ValueErrors; they say what is wrong already
        raise
    except (pyarrow.ArrowException, OSError, LookupError, ValueError, ArithmeticError, MemoryError, TypeError) as error:
        why = " ".join(str(error).split())[:200]
        raise CorruptObjectError(f"{key}: damaged ({type(error).__name__}: {why})") from error


def opened(key: str, source: Any, kind: str, keys: RunKeys, footer: Any = None) -> Any:
    """Return the ``ParquetFile`` of an archive file of ours. Raise ``UnknownFormatError``, ``CorruptObjectError``."""
    _, pq = parquet()
    with decoding(key):
        # Not read_table: it goes by way of pyarrow.dataset, which imports pandas where there is one (60 MB, a second).
        file = pq.ParquetFile(source, metadata=footer, pre_buffer=True, page_checksum_verification=True)
        told = file.metadata.metadata or {}
        if told.get(_KIND) != kind.encode() or told.get(_RUN) != keys.run.encode():
            raise CorruptObjectError(f"{key}: not the {kind} of an archive of run {keys.run!r}")
        if told.get(_VERSION) != str(FORMAT).encode():
            raise UnknownFormatError(
                f"{key}: written in archive format {told.get(_VERSION, b'').decode('ascii', 'replace')!r}, this "
                f"version reads format {FORMAT}; upgrade s3capture"
            )
        if not file.schema_arrow.equals(_schema(kind), check_metadata=False):
            raise CorruptObjectError(f"{key}: its columns are not those of the {kind} of an archive")
        return file


def rows_of(key: str, file: Any, group: int) -> Any:
    """Return a row group of a file that ``opened`` gave, as a table. Raise ``CorruptObjectError``."""
    with decoding(key):
        digests = (file.metadata.metadata or {}).get(_ROWS, b"").split(b",")
        if not group < len(digests) == file.num_row_groups:
            raise CorruptObjectError(
                f"{key}: has {file.num_row_groups} row groups, not number {group} of those written"
            )
        table = file.read_row_group(group)
        if _digest(table) != digests[group]:
            raise CorruptObjectError(f"{key}: row group {group} does not hold the rows that were written")
        return table


def read_index(key: str, body: bytes, keys: RunKeys) -> Any:
    """Return the table of an index. Raise ``CorruptObjectError`` for anything else."""
    return rows_of(key, opened(key, io.BytesIO(body), "index", keys), 0)


def items_of(table: Any) -> Iterator[Item]:
    """Yield the rows of a table of a pack."""
    for row in zip(*(table.column(name).to_pylist() for name in _ITEM), strict=True):
        yield Item(*row)


def read_pack(key: str, body: bytes, keys: RunKeys) -> Iterator[Item]:
    """Yield every object of a whole pack, row group by row group. Raise ``CorruptObjectError``."""
    file = opened(key, io.BytesIO(body), "pack", keys)
    for group in range(file.num_row_groups):
        with decoding(key):
            items = list(items_of(rows_of(key, file, group)))
        yield from items
