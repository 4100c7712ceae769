"""Write docs/cli.md from the commands themselves: ``python docs/make_cli.py``.

The rule of this script: what a command takes is read from its definition, and only the JSON is described by hand, in
``cli_json.md``; tests hold both to the code. It reads attributes that every version of typer has, not its rendered
help, so that the page does not change with typer.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PAGE = HERE / "cli.md"
JSON_PART = HERE / "cli_json.md"

_HEAD = """# The command line

<!-- Made by docs/make_cli.py from the commands and from cli_json.md: change those, and run it. -->

Data goes to stdout and talk to stderr, so that output can be piped. Credentials are boto3's own chain: environment, profile,
role. `--debug` stands before the command: `s3capture --debug ls ...`.

| exit status | meaning |
|---|---|
| 0 | done, and nothing bad was found |
| 1 | something is bad: damaged data, a breached invariant, a failed check, a mark that cannot be published, nothing to show |
| 2 | could not run: usage, settings, address, credentials, bucket, or a store that cannot hold captures |
| 3 | a bug in s3capture |
| 130 | interrupted by Ctrl-C |
| 141 | the reader of stdout went away, as in `s3capture ls ... \\| head` |

Every error is one line, `s3capture: <what happened, and what to do>`. [errors.md](errors.md) lists the kinds behind them.
"""


def page() -> str:
    """Return the page as it should be."""
    sys.path.insert(0, str(HERE.parent))
    from typer.main import get_command  # noqa: PLC0415 - the path comes first

    from s3capture.cli import app  # noqa: PLC0415

    parts = [_HEAD, *_sections(get_command(app), "s3capture"), JSON_PART.read_text("utf-8")]
    return "\n".join(part.strip() + "\n" for part in parts)


def _sections(command: Any, name: str) -> list[str]:
    found: list[str] = []
    commands = getattr(command, "commands", None)
    if commands is None:
        found.append(_section(command, name))
    for child in commands or ():
        found += _sections(commands[child], f"{name} {child}")
    return found


def _section(command: Any, name: str) -> str:
    params = [param for param in command.params if param.name != "help"]
    arguments = [param for param in params if param.param_type_name == "argument"]
    usage = " ".join(_argument(param) for param in arguments)
    rows = [f"| `{_argument(param)}` | {_meaning(param)} |" for param in arguments]
    rows += [f"| `{_option(param)}` | {_meaning(param)} |" for param in params if param.param_type_name == "option"]
    table = "\n".join(["| | |", "|---|---|", *rows]) if rows else "It takes no options."
    text = inspect.cleandoc(command.help or "")
    return f"## `{name}`\n\n```\n{f'{name} [OPTIONS] {usage}'.strip()}\n```\n\n{text}\n\n{table}\n"


def _argument(param: Any) -> str:
    name = (param.metavar or param.name.upper()).strip("[]{}")
    return name if param.required else f"[{name}]"


def _option(param: Any) -> str:
    names = ", ".join([*param.opts, *param.secondary_opts])
    if param.is_flag:
        return names
    choices = getattr(param.type, "choices", None)
    kind = "|".join(map(str, choices)) if choices else param.metavar or param.type.name.upper()
    return f"{names} {kind}"


def _meaning(param: Any) -> str:
    text = (param.help or "").replace("|", "\\|")
    notes = []
    if param.required and param.param_type_name == "option":
        notes.append("required")
    if param.default not in (None, False, (), []) and not param.required and not callable(param.default):
        notes.append(f"default `{param.default}`")
    if param.envvar:
        notes.append(f"environment: `{param.envvar}`")
    return f"{text} ({'; '.join(notes)})" if notes else text


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
