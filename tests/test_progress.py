"""Progress bars: a person at a terminal sees how far a command is, and a program reads nothing of it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

_SCRIPT = """
from s3capture.cli.progress import Bars
with Bars("rollouts", 7, quiet={quiet}) as bars:
    bars.advance(2)
    bars.show("[red]run", 3, 7)
    bars.phase("\\x1b[2Jledgers", 9)
    bars.advance()
"""


def _at_a_terminal(script: str) -> str:
    """What a terminal of 80 columns gets on stderr."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "NO_COLOR": "1"}
    with subprocess.Popen([sys.executable, "-c", script], stderr=theirs, env=environment) as process:
        os.close(theirs)
        said = b""
        try:
            while part := os.read(ours, 65536):
                said += part
        except OSError:  # Linux says that the other end is closed by an error
            pass
        os.close(ours)
    assert process.returncode == 0
    return said.decode()


def test_a_terminal_shows_how_far_it_is_as_plain_text() -> None:
    """Counts of each phase are shown; names are text, not markup, and no control character of theirs gets through."""
    said = _at_a_terminal(_SCRIPT.format(quiet=False))
    assert "3/7" in said and "1/9" in said and "[red]run" in said
    assert "\\x1b[2Jledgers" in said and "\x1b[2J" not in said


def test_where_no_person_looks_nothing_is_shown() -> None:
    """Neither a pipe gets a bar, nor a terminal that the data itself goes to."""
    assert not _at_a_terminal(_SCRIPT.format(quiet=True)).strip()
    piped = subprocess.run([sys.executable, "-c", _SCRIPT.format(quiet=False)], capture_output=True, check=True)
    assert piped.stderr == b""
