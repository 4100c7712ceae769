"""The command line: what is typed comes in here, and every way out has its exit status here.

The rule of this package: data on stdout, talk on stderr. An error that the package raises on purpose is one line and
no traceback unless one asks; commands import what is slow inside their bodies, so that ``--help`` answers at once. It
is the only package that prints.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from s3capture import __version__
from s3capture.cli import spill
from s3capture.cli.archive import archive
from s3capture.cli.audit import audit
from s3capture.cli.common import (
    EXIT_BAD_DATA,
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_PIPE_CLOSED,
    EXIT_UNUSABLE,
    say,
)
from s3capture.cli.conformance import conformance
from s3capture.cli.costs import costs
from s3capture.cli.demo import demo
from s3capture.cli.doctor import doctor
from s3capture.cli.explore import explore
from s3capture.cli.gymdir import export_gym, import_gym
from s3capture.cli.ls import ls
from s3capture.cli.replay import replay
from s3capture.cli.retention import delete, retire, sweep
from s3capture.cli.serve import serve
from s3capture.cli.show import show
from s3capture.errors import CaptureError, CorruptObjectError

if TYPE_CHECKING:
    import io


class _Interrupted(BaseException):
    """Ctrl-C, on its way past typer, which has an ending of its own for it."""


class _Group(TyperGroup):
    """Carries what the commands raise to ``main``, whatever the version of typer would make of it."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; see ``TyperGroup``."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise _Interrupted from error
        except BrokenPipeError:
            # The reader has seen enough. What is still buffered must not be flushed into the closed pipe at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(EXIT_PIPE_CLOSED) from None


app = typer.Typer(
    name="s3capture",
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Keep the training tokens of reinforcement-learning rollouts safe on object storage.",
    epilog="Exit status: 0 done; 1 bad data found, check failed, or no such run; 2 could not run; 130 interrupted.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"s3capture {__version__}")
        raise typer.Exit


_options = {"debug": False}


@app.callback()
def _common(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error. May stand anywhere.")] = False,
    _show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    _options["debug"] = debug
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="s3capture: %(message)s")


app.command()(serve)
app.command()(demo)
app.command()(ls)
app.command()(show)
app.command()(audit)
app.command()(replay)
app.command()(doctor)
app.add_typer(spill.app, name="spill")
app.command()(archive)
app.command()(explore)
app.command()(conformance)
app.command()(retire)
app.command()(delete)
app.command()(sweep)
app.command()(import_gym)
app.command()(export_gym)
app.command()(costs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; ``arguments`` default to those of the process."""
    stdout: io.TextIOWrapper | Any = sys.stdout
    if hasattr(stdout, "reconfigure"):  # a C locale must not turn an id into a UnicodeEncodeError
        stdout.reconfigure(errors="backslashreplace")
    _options["debug"] = False
    try:
        app(args=_debug_first(sys.argv[1:] if arguments is None else arguments), prog_name="s3capture")
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else EXIT_UNUSABLE if ending.code else 0
    except _Interrupted:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        # Threads may be waiting for a store that hangs, and the interpreter would wait for them.
        os._exit(EXIT_INTERRUPTED)
    except CaptureError as error:
        if _options["debug"]:
            traceback.print_exception(error)
        else:
            say(" ".join(str(error).split()))
        return EXIT_BAD_DATA if isinstance(error, CorruptObjectError) else EXIT_UNUSABLE
    except Exception as error:  # noqa: BLE001 - a bug, told in one line; --debug shows all of it
        if _options["debug"]:
            traceback.print_exception(error)
        else:
            say(
                f"unexpected {type(error).__name__}: {' '.join(str(error).split())}; this is a bug, and "
                "'s3capture --debug ...' shows where"
            )
        return EXIT_BUG
    return 0


def _debug_first(arguments: Sequence[str]) -> list[str]:
    """Let ``--debug`` stand anywhere: it is asked for after an error, at the end of the line that failed."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = [argument for argument in arguments[:end] if argument != "--debug"]
    return [*(["--debug"] if len(options) < end else []), *options, *arguments[end:]]
