"""Write docs/cli.md from the commands themselves: ``python tests/pages/make_cli.py``.

The rule of this script: what a command takes is read from its definition, and only the JSON is described by hand, in
``cli_json.md``; tests hold both to the code. It reads signatures, not typer's rendered help, which changes with typer.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PAGE = ROOT / "docs" / "cli.md"
JSON_PART = HERE / "cli_json.md"

_HEAD = """# The command line

<!-- Made by tests/pages/make_cli.py from the commands and from cli_json.md beside it: change those, and run it. -->

Data goes to stdout and talk to stderr, so that output can be piped. Credentials are boto3's own chain: environment,
profile, role. `--debug` shows the traceback of an error, and may stand anywhere. Words are explained in the
[glossary](glossary.md), settings and environment variables in [settings](settings.md).

| exit status | meaning |
|---|---|
| 0 | done, and nothing bad was found |
| 1 | damaged data, a breached invariant, a failed check, a mark that was not published, or no such run or rollout |
| 2 | could not run: usage, settings, address, credentials, bucket, or a store that cannot hold captures |
| 3 | a bug in s3capture |
| 130 | interrupted by Ctrl-C |
| 141 | the reader of stdout went away, as in `s3capture ls ... \\| head` |

An error is one line, `s3capture: <what happened, and what to do>`; [errors.md](errors.md) lists the kinds. Two are
longer, both with status 2: a command that was typed wrongly is answered with its usage and the mistake, and a recording
that cannot be played with a line for each of its faults.
"""


def page() -> str:
    """Return the page as it should be."""
    sys.path.insert(0, str(ROOT))
    from s3capture.cli import app  # noqa: PLC0415 - the path comes first

    parts = [_HEAD, *_sections(app, "s3capture"), JSON_PART.read_text("utf-8")]
    return "\n".join(part.strip() + "\n" for part in parts)


def _sections(app: typer.Typer, name: str) -> list[str]:
    found = [
        _section(command.callback, f"{name} {command.name or command.callback.__name__}")
        for command in app.registered_commands
        if command.callback is not None
    ]
    for group in app.registered_groups:
        if group.typer_instance is not None:
            found += _sections(group.typer_instance, f"{name} {group.name}")
    return found


def _section(function: Callable[..., Any], name: str) -> str:
    hints = get_type_hints(function, include_extras=True)
    arguments, options = [], []
    for param in inspect.signature(function).parameters.values():
        kind, info = get_args(hints[param.name])
        given = "" if param.default is inspect.Parameter.empty else param.default
        required = param.default is inspect.Parameter.empty
        if isinstance(info, ArgumentInfo):
            word = (info.metavar or param.name.upper()).strip("[]")
            arguments.append((word if required else f"[{word}]", _meaning(info, "", required=False)))
        else:
            options.append((_option(info, param.name, kind), _meaning(info, given, required=required)))
    usage = " ".join([name, *(word for word, _ in arguments), "[OPTIONS]" if options else ""]).strip()
    rows = "\n".join(f"| `{word}` | {meaning} |" for word, meaning in [*arguments, *options])
    return f"## `{name}`\n\n`{usage}`\n\n{inspect.cleandoc(function.__doc__ or '')}\n\n| | |\n|---|---|\n{rows}\n"


def _option(info: OptionInfo, name: str, kind: Any) -> str:
    # In an annotation, typer's first positional argument is a name as well.
    given = [part for part in (info.default, *(info.param_decls or ())) if isinstance(part, str) and part[:1] == "-"]
    names = ", ".join(given or ["--" + name.replace("_", "-")])
    kinds = [part for part in (get_args(kind) or (kind,)) if part is not type(None)]
    if kinds == [bool]:
        return names
    if isinstance(kinds[0], type) and issubclass(kinds[0], Enum):
        return f"{names} {' or '.join(item.value for item in kinds[0])}"
    words = {int: "NUMBER", Path: "PATH"}
    return f"{names} {info.metavar or words.get(kinds[0], 'TEXT')}"


def _meaning(info: OptionInfo | ArgumentInfo, given: Any, *, required: bool) -> str:
    notes = ["required"] if required else []
    if given is not None and given is not False and given != "":
        notes.append(f"default `{given}`")
    if info.envvar:
        notes.append(f"environment: `{info.envvar}`")
    return f"{info.help or ''} ({'; '.join(notes)})" if notes else info.help or ""


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
