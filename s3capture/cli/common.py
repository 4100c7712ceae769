"""What the commands share: their common options, how they reach a store, and how they speak.

The rule of this module: data goes to stdout and talk to stderr; nothing that a bucket holds reaches a terminal as
control characters, and JSON is strict JSON with times in Unix seconds. An option means the same in every command
because it is written here once.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from s3capture.settings import Settings

if TYPE_CHECKING:
    from rich.table import Table

    from s3capture.reader import Reader

EXIT_BAD_DATA = 1
"""Something was found that should not be, or what was named is not there: see docs/cli.md."""
EXIT_UNUSABLE = 2
"""The command could not run: usage, settings, address, credentials, bucket, or an unsupported store."""
EXIT_BUG = 3
"""An error that this package did not raise on purpose."""
EXIT_INTERRUPTED = 130
EXIT_PIPE_CLOSED = 141

Url = Annotated[str, typer.Argument(metavar="URL", help="Where captures are kept: s3://bucket/prefix.")]
Run = Annotated[str, typer.Option("--run", metavar="RUN", help="The run, as in the setting 'run'.")]
AnyRun = Annotated[str | None, typer.Option("--run", metavar="RUN", help="The run. Without it: all of them.")]
EndpointUrl = Annotated[
    str | None,
    typer.Option(
        "--endpoint-url",
        metavar="ADDRESS",
        envvar="S3CAPTURE_ENDPOINT_URL",
        help="An S3 server other than AWS. Without it boto3 decides, which honours AWS_ENDPOINT_URL and profiles.",
    ),
]
Region = Annotated[
    str | None, typer.Option("--region", metavar="REGION", help="The bucket's region. Without it boto3 decides.")
]
SpillDir = Annotated[
    str | None,
    typer.Option(
        "--spill-dir",
        metavar="DIR",
        help="The local spill, as in the setting 'spill_dir'. Without it: s3capture/spill under the user's state.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object on each line.")]

# A run is a required setting, while some commands look above the runs: their keys never use this name.
_NO_RUN = "any"


def settings_of(
    url: str,
    run: str | None = None,
    *,
    endpoint_url: str | None = None,
    region: str | None = None,
    spill_dir: str | None = None,
) -> Settings:
    """Return checked settings; raise ``SettingsError``. Credentials are boto3's own business."""
    return Settings.of(
        url=url, run=_NO_RUN if run is None else run, endpoint_url=endpoint_url, region=region, spill_dir=spill_dir
    )


@contextmanager
def opened(settings: Settings) -> Iterator[Reader]:
    """Open the bucket of ``settings`` for reading; nothing is sent yet."""
    from s3capture.reader import Reader  # noqa: PLC0415 - boto3 takes long to import; --help must not wait for it
    from s3capture.store.boto import BotoStore  # noqa: PLC0415

    store = BotoStore(settings)
    try:
        with Reader(store) as reader:
            yield reader
    finally:
        store.close()


def say(text: str) -> None:
    """Say something to the person, on stderr."""
    typer.echo(f"s3capture: {printable(text)}", err=True)


def out(text: str) -> None:
    """Print data."""
    typer.echo(text)


def out_json(value: Any) -> None:
    """Print one object as one line of strict, ASCII JSON; dataclasses as objects, non-finite numbers as null."""
    typer.echo(json.dumps(_plain(value), ensure_ascii=True, allow_nan=False))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


def printable(text: str) -> str:
    """Return ``text`` with everything that a terminal would act upon escaped; ids and reasons are anyone's."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def when(seconds: float | None) -> str:
    """Return Unix seconds as UTC, ``2026-12-01 15:05:09``, or ``-``."""
    if seconds is None:
        return "-"
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return "-"


def size(count: int) -> str:
    """Return bytes for people, in powers of 1000: ``17 B``, ``4.2 kB``, ``1.3 GB``."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def short(text: str, most: int = 110) -> str:
    """Return ``text`` cut to ``most`` characters; for tables, where ``--json`` has the whole."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def screen_width() -> int | None:
    """Return the columns of the terminal that stdout is; None where a program reads, which wants whole lines."""
    from shutil import get_terminal_size  # noqa: PLC0415

    return max(get_terminal_size().columns, 40) if sys.stdout.isatty() else None


def plural(count: int, word: str) -> str:
    """Return ``1 call``, ``2 calls``."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def out_table(title: str, table: Table) -> None:
    """Print a rich table under its title, as wide as the terminal (80 columns where there is none)."""
    from io import StringIO  # noqa: PLC0415
    from shutil import get_terminal_size  # noqa: PLC0415

    from rich.console import Console  # noqa: PLC0415 - only tables need it

    # Not to stdout itself: rich ends the process its own way when a pipe is closed.
    console = Console(file=StringIO(), width=get_terminal_size().columns, no_color=True, highlight=False)
    console.print(table)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined] # a StringIO, which rich types as IO
    out("\n".join(["", title, *(line.rstrip() for line in lines)]))
