"""The README tells the truth: its example runs, its links lead somewhere, its commands are those that CI runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from s3capture.local import EmbeddedServer

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def test_the_example_runs_as_it_stands(seaweed: EmbeddedServer, bucket: str, tmp_path: Path) -> None:
    """The Python example, with the bucket's name put in, stores a call, reads it back and drops it."""
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(code.replace("s3://s3capture/", f"s3://{bucket}/"), "utf-8")
    environment = {**os.environ, "AWS_ENDPOINT_URL": seaweed.endpoint_url, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["root call stored", "1 call read back, incomplete: False", "dropped: True"]


def test_ci_runs_the_test_command_of_the_readme() -> None:
    """Exactly one line of the README is what .ci/run takes for the test command."""
    pattern = re.search(r"grep -E '(.*)' README.md", (ROOT / ".ci" / "run").read_text("utf-8"))
    assert pattern
    assert len(re.findall(pattern[1], README, re.MULTILINE)) == 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    """Every relative link of a page names a file of the repository."""
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text("utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing
