"""Write docs/datasets.md: run the code of ``datasets.md`` beside this, and put in what it prints.

The rule of this script: an example that is followed by an output is run as it stands, in one session, on tables that a
replay wrote; so the page cannot say what does not happen. Tests compare the page with a new run.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PAGE = ROOT / "docs" / "datasets.md"
TEXT = HERE / "datasets.md"


def page() -> str:
    """Return the page as it should be; changes the working directory while it runs."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_HOME"] = f"{folder}/hf"
        _tables(Path(folder) / "tables")
        with contextlib.chdir(folder):
            return _filled(TEXT.read_text("utf-8"))


def _tables(folder: Path) -> None:
    from replayed import capture, small  # noqa: PLC0415 - the path comes first

    from s3capture.replay import replay  # noqa: PLC0415
    from s3capture.replay.writers import ParquetWriter  # noqa: PLC0415
    from s3capture.store.memory import MemoryStore  # noqa: PLC0415

    given = {"url": "s3://bucket/captures", "run": "run-7", "store": MemoryStore()}
    asyncio.run(capture(small(24), **given))
    with replay(**given) as rollouts, ParquetWriter(folder) as writer:
        for rollout in rollouts:
            writer.write(rollout)
        writer.finish()


def _filled(text: str) -> str:
    session: dict[str, object] = {}

    def run(found: re.Match[str]) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(found[1], TEXT.name, "exec"), session)
        lines = "\n".join(line.rstrip() for line in printed.getvalue().strip("\n").splitlines())
        return f"```python\n{found[1]}```\n\n```text\n{lines}\n```\n"

    return re.sub(r"```python\n((?:(?!```).)*?)```\n\n```text\n```\n", run, text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
