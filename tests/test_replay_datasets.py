"""docs/datasets.md shows what its examples print."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_page_is_what_its_examples_print() -> None:
    """DuckDB, pandas and Hugging Face datasets open the Parquet files as they are, and print what the page shows."""
    program = "import make_datasets, sys; sys.stdout.write(make_datasets.page())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT / "tests" / "pages",
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    page = (ROOT / "docs" / "datasets.md").read_text("utf-8")
    assert done.stdout == page, "run python tests/pages/make_datasets.py"
    assert page.count("```text\n") == 5
