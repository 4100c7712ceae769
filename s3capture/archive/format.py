"""The two files of an archive: the pack (all objects of many rollouts) and its index (what lies where).

The rule of this module: an object comes back with the content it had. One of ours is kept as the content of its frame,
header line and payload to the byte, because many of them compress far better together than each alone; whatever else
lies there (markers, damaged objects) is kept as it is. A file names its kind, its version and its run, and a reader
refuses what it does not know.

A pack is sorted by place in the key space, and cut into row groups of a few MiB, so that one rollout is one or two
ranges of it. The index repeats the rows without the large contents: a LIST of an archived run, and everything that is
said of a rollout without reading its tokens, costs the index alone.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import zstandard

from s3capture import codec
from s3capture.archive.needs import parquet
from s3capture.errors import CorruptObjectError, UnknownFormatError
from s3capture.keys import RunKeys

FORMAT = 1
GROUP_BYTES = 4 * 1024 * 1024
"""Content of a row group before compression, in bytes: what is fetched and unpacked to read one small rollout."""
INLINE_BYTES = 1024
"""Contents up to here stand in the index as well: fences, marks, intents, seals."""
_LEVEL = 9
_PAGE_BYTES = 8 * 1024 * 1024
_KIND, _VERSION, _RUN = b"s3capture.kind", b"s3capture.version", b"s3capture.run"


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


def _schema(kind: str, keys: RunKeys) -> Any:
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
    told = {_KIND: kind.encode(), _VERSION: str(FORMAT).encode(), _RUN: keys.run.encode()}
    return pyarrow.schema(columns, metadata=told)


class PackWriter:
    """Writes one pack to a local file, row group by row group; at most one group is held in memory."""

    def __init__(self, keys: RunKeys, path: Path) -> None:
        _, pq = parquet()
        self.keys, self.path = keys, path
        self._schema = _schema("pack", keys)
        # Statistics and dictionaries of contents would only cost; the file has its own digest.
        self._writer = pq.ParquetWriter(
            path, self._schema, compression="zstd", compression_level=_LEVEL, data_page_size=_PAGE_BYTES,
            use_dictionary=["rollout"], write_statistics=["rollout"],
        )  # fmt: skip
        self._held: list[Item] = []
        self._held_bytes = 0
        self._groups = 0
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
        self._writer.close()
        return self.index

    def _flush(self) -> None:
        self._writer.write_table(_table(self._held, self._schema), row_group_size=len(self._held))
        for item in self._held:
            inline = item.content if len(item.content) <= INLINE_BYTES else b""
            self.index.append((replace(item, content=inline), self._groups))
        self._held, self._held_bytes, self._groups = [], 0, self._groups + 1


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
    table = _table([item for item, _ in rows], _schema("index", keys), [group for _, group in rows])
    pq.write_table(
        table, out, compression="zstd", compression_level=_LEVEL, use_dictionary=["rollout", "row_group"],
        row_group_size=len(rows) or 1,
    )  # fmt: skip
    return out.getvalue()


def check_schema(schema: Any, key: str, kind: str, keys: RunKeys) -> None:
    """Raise ``UnknownFormatError`` or ``CorruptObjectError`` unless ``schema`` is that of a file of ours."""
    told = schema.metadata or {}
    if told.get(_KIND) != kind.encode() or told.get(_RUN) != keys.run.encode():
        raise CorruptObjectError(f"{key}: not the {kind} of an archive of run {keys.run!r}")
    if told.get(_VERSION) != str(FORMAT).encode():
        raise UnknownFormatError(
            f"{key}: written in archive format {told.get(_VERSION, b'').decode('ascii', 'replace')!r}, this version "
            f"reads format {FORMAT}; upgrade s3capture"
        )


def read_index(key: str, body: bytes, keys: RunKeys) -> Any:
    """Return the table of an index. Raise ``CorruptObjectError`` for anything else."""
    pyarrow, pq = parquet()
    try:
        # Not read_table: it goes by way of pyarrow.dataset, which imports pandas where there is one (60 MB, a second).
        table = pq.ParquetFile(io.BytesIO(body)).read()
    except (pyarrow.ArrowException, OSError) as error:
        raise CorruptObjectError(f"{key}: not a Parquet file ({_line(error)})") from error
    check_schema(table.schema, key, "index", keys)
    return table


def items_of(table: Any) -> Iterator[Item]:
    """Yield the rows of a table of a pack."""
    for row in zip(*(table.column(name).to_pylist() for name in _ITEM), strict=True):
        yield Item(*row)


def read_pack(key: str, body: bytes, keys: RunKeys) -> Iterator[Item]:
    """Yield every object of a whole pack, row group by row group. Raise ``CorruptObjectError``."""
    pyarrow, pq = parquet()
    try:
        file = pq.ParquetFile(io.BytesIO(body))
        check_schema(file.schema_arrow, key, "pack", keys)
        for group in range(file.num_row_groups):
            yield from items_of(file.read_row_group(group))
    except (pyarrow.ArrowException, OSError) as error:
        raise CorruptObjectError(f"{key}: damaged ({_line(error)})") from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
