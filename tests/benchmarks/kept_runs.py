"""What each command costs on a run of real size: requests, seconds and memory, before and after archiving.

    python tests/benchmarks/kept_runs.py [--rollouts 5000] [--calls 20] [--json] [--only replay audit ...]

Starts a SeaweedFS of its own and puts a made run into it (made_run.py; a sample of it is held against the real
endpoints first). Then every command that reads or archives a run is run upon it in a process of its own. The exit
status is 1 when a command needed more than 500 MB, ended otherwise than it should, or came to another result than the
run was made for. Seconds are of this machine, where server and command share the processors; requests are not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import made_run
import pyarrow.parquet as pq
from made_run import Place, Plan, Stored

import s3capture
from s3capture.local import EmbeddedServer
from s3capture.seaweed import connect

MOST_BYTES = 500_000_000
_BUCKET, _PREFIX, _RUN = "kept-runs", "exp", "run-7"
_RUNNER = Path(__file__).with_name("counted_cli.py")
_SHORT = {
    "ListObjectsV2": "list",
    "GetObject": "get",
    "PutObject": "put",
    "DeleteObjects": "delete batch",
    "DeleteObject": "delete",
}


@dataclass(frozen=True, slots=True)
class Step:
    """One command: ``status`` is how it must end, ``check`` returns what is wrong with its result, or nothing."""

    name: str
    arguments: tuple[str, ...]
    status: int = 0
    check: Callable[[Path], str] = lambda _: ""
    whole_run: bool = True


@dataclass(frozen=True, slots=True)
class Row:
    """What one command took; ``wrong`` says why it should not have come out like that."""

    name: str
    seconds: float
    cpu_s: float
    peak_bytes: int
    rollouts: int
    requests: dict[str, int] = field(default_factory=dict)
    wrong: str = ""

    def line(self) -> str:
        """The row of the table."""
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(self.requests.items(), key=lambda it: -it[1]))
        each = sum(self.requests.values()) / self.rollouts
        return (
            f"{self.name:<28} {self.seconds:>8.1f} {self.cpu_s:>8.1f} {1000 * self.seconds / self.rollouts:>11.2f}"
            f" {each:>12.2f} {self.peak_bytes / 1e6:>7.0f}  {kinds}{f'  WRONG: {self.wrong}' if self.wrong else ''}"
        )


HEAD = f"{'command':<28} {'seconds':>8} {'cpu s':>8} {'ms/rollout':>11} {'req/rollout':>12} {'peak MB':>7}  requests"


def steps(plan: Plan, folder: Path) -> Iterator[Step]:
    """Yield the commands in the order in which they are run; their files go into ``folder``."""
    url, run = f"s3://{_BUCKET}/{plan.prefix}", ("--run", plan.run)
    for archived in (False, True):
        after = " (archived)" if archived else ""
        if archived:
            yield Step("archive, dry", ("archive", url, *run, "--older-than", "0s", "--json"), check=_planned(plan))
            yield Step(
                "archive --yes", ("archive", url, *run, "--older-than", "0s", "--yes", "--json"), check=_archived(plan)
            )
        yield Step(f"ls{after}", ("ls", url, *run, "--json"), check=_listed(plan))
        show = ("show", url, plan.rollout_id(plan.rollouts - 1), *run, "--json")
        yield Step(f"show{after}", show, check=_shown(plan), whole_run=False)
        tables = folder / f"tables{archived:d}"
        to_tables = ("replay", url, *run, "--format", "parquet", "--to", str(tables))
        yield Step(f"replay, parquet{after}", to_tables, check=_replayed(plan, tables))
        findings = _audited(plan, archived=archived)
        yield Step(f"audit{after}", ("audit", url, *run, "--json"), status=1, check=findings)
        if not archived:
            yield Step("replay, entries", ("replay", url, *run, "--to", str(folder / "entries.jsonl.zst")))
            page = ("--html", str(folder / "page.html"))
            yield Step("audit --html", ("audit", url, *run, "--json", *page), status=1, check=findings)
    yield Step("sweep, dry (archived)", ("sweep", url, *run, "--older-than", "0s", "--json"))


# -- what each must come to -----------------------------------------------------------------------------------


def _unequal(what: str, wanted: Any, found: Any) -> str:
    return "" if wanted == found else f"{what}: {found} in place of {wanted}"


def _rows(out: Path) -> list[Any]:
    with out.open() as lines:
        return [json.loads(line) for line in lines]


def _listed(plan: Plan) -> Callable[[Path], str]:
    return lambda out: _unequal("rollouts listed", plan.rollouts, len(_rows(out)))


def _shown(plan: Plan) -> Callable[[Path], str]:
    return lambda out: _unequal("calls shown", plan.calls, len(_rows(out)[0]["calls"]))


def _replayed(plan: Plan, tables: Path) -> Callable[[Path], str]:
    def check(_: Path) -> str:
        rows = [pq.read_metadata(tables / f"{name}.parquet").num_rows for name in ("rollouts", "calls")]
        return _unequal("rollouts and calls", [plan.complete(), plan.complete() * plan.calls], rows)

    return check


def _audited(plan: Plan, *, archived: bool) -> Callable[[Path], str]:
    def check(out: Path) -> str:
        wanted = plan.findings(archived=archived)
        return _unequal("findings", dict(wanted), {k: n for k, n in _rows(out)[-1]["kinds"].items() if n})

    return check


def _planned(plan: Plan) -> Callable[[Path], str]:
    return lambda out: _unequal("rollouts to pack", _decided(plan), _rows(out)[0]["rollouts"].get("pack"))


def _archived(plan: Plan) -> Callable[[Path], str]:
    return lambda out: _unequal("rollouts archived", _decided(plan), _rows(out)[0]["archived"])


def _decided(plan: Plan) -> int:
    return sum(plan.end(index) is not made_run.End.OPEN for index in range(plan.rollouts))


# -- running --------------------------------------------------------------------------------------------------


def measure(step: Step, plan: Plan, folder: Path, most: int = MOST_BYTES) -> Row:
    """Run one command in a process of its own."""
    facts, out, err = folder / "facts.json", folder / "out", folder / "err"
    facts.unlink(missing_ok=True)
    start = time.perf_counter()
    with out.open("wb") as stdout, err.open("wb") as stderr:
        command = [sys.executable, str(_RUNNER), str(facts), *step.arguments]
        # What is measured is the package that this process has, installed or not.
        env = {**os.environ, "PYTHONPATH": str(Path(s3capture.__file__).parent.parent)}
        status = subprocess.run(command, stdout=stdout, stderr=stderr, env=env, check=False).returncode
    seconds = time.perf_counter() - start
    rollouts = plan.rollouts if step.whole_run else 1
    if not facts.exists():
        said = err.read_text(errors="replace")[-500:]
        return Row(step.name, seconds, 0.0, 0, rollouts, wrong=f"ended with {status}: {said}")
    told = json.loads(facts.read_text())
    requests = {_SHORT.get(name, name): count for name, count in told["requests"].items()}
    wrong = [_unequal("exit status", step.status, status) and f"ended with {status}: {err.read_text()[-500:]}"]
    if not wrong[0]:
        wrong.append(step.check(out))
    if told["peak_bytes"] > most:
        wrong.append(f"needed {told['peak_bytes'] / 1e6:.0f} MB, more than {most / 1e6:.0f}")
    return Row(
        step.name, seconds, told["cpu_s"], told["peak_bytes"], rollouts, requests, "; ".join(filter(None, wrong))
    )


def held(place: Place, prefix: str) -> Stored:
    """What the bucket holds below ``prefix``."""
    with closing(connect(place.endpoint_url, place.access_key, place.secret_key, read_timeout_s=120.0)) as client:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=place.bucket, Prefix=prefix)
        sizes = [item["Size"] for page in pages for item in page.get("Contents", ())]
    return Stored(objects=len(sizes), bytes=sum(sizes))


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _filled(plan: Plan, place: Place, processes: int) -> dict[str, Any]:
    """Put the run, telling how it goes."""
    sample = made_run.proved(plan)
    _say(f"{sample} rollouts, one of each story and end, are what the endpoints write")
    start, told = time.perf_counter(), [0]

    def progress(total: Stored) -> None:
        tenth = 10 * total.rollouts // plan.rollouts
        if tenth > told[0]:
            told[0] = tenth
            _say(f"{total.rollouts:,} rollouts, {total.objects:,} objects, {time.perf_counter() - start:.0f} s")

    total = made_run.put_run(plan, place, processes=processes, on_progress=progress)
    return {**asdict(total), "seconds": time.perf_counter() - start, "sample": sample}


def _once(note: Path, plan: Plan, fill: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Fill the bucket unless ``note`` says that it was done; return the figures of that."""
    wanted = asdict(plan)
    if not note.exists():
        note.write_text(json.dumps({"plan": wanted, "put": fill()}))
    told = json.loads(note.read_text())
    if told["plan"] != wanted:
        raise SystemExit(f"{note} is about another run: {told['plan']}")
    put: dict[str, Any] = told["put"]
    return put


def _is_chosen(name: str, only: Sequence[str], names: Sequence[str]) -> bool:
    return any(name == one if one in names else name.startswith(one) for one in only)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; the exit status is 1 when something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=5000)
    parser.add_argument("--calls", type=int, default=20, help="records of each rollout")
    parser.add_argument("--processes", type=int, default=2, help="processes that put the run")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="COMMAND", help="only these, or what begins so; archive counts"
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="put the run there once, and use it again as it is then"
    )
    parser.add_argument("--json", action="store_true", help="print one object, with all figures")
    given = parser.parse_args(arguments)
    plan = Plan(_PREFIX, _RUN, given.rollouts, given.calls)
    rows: list[Row] = []
    with EmbeddedServer(given.data) as server, tempfile.TemporaryDirectory(prefix="kept-runs-") as temporary:
        spill = Path(temporary) / "state"
        os.environ.update(
            server.environment() | {"S3CAPTURE_ENDPOINT_URL": server.endpoint_url, "XDG_STATE_HOME": str(spill)}
        )
        server.make_bucket(_BUCKET)
        place = Place(server.endpoint_url, server.access_key, server.secret_key, _BUCKET)
        put = _once(server.data_dir / "made-run.json", plan, lambda: _filled(plan, place, given.processes))
        before = after = held(place, plan.keys.root)
        if not given.json:
            sys.stdout.write(
                f"{given.rollouts:,} rollouts of {given.calls} calls: {before.objects:,} objects, "
                f"{before.bytes / 1e6:,.1f} MB, put in {put['seconds']:.0f} s\n\n{HEAD}\n"
            )
        planned = list(steps(plan, Path(temporary)))
        for step in planned:
            if _is_chosen(step.name, given.only, [one.name for one in planned]):
                rows.append(measure(step, plan, Path(temporary)))
                if not given.json:
                    sys.stdout.write(f"{rows[-1].line()}\n")
                    sys.stdout.flush()
                if step.name == "archive --yes":
                    after = held(place, plan.keys.root)
    wrong = [row.name for row in rows if row.wrong]
    if given.json:
        told = {"put": put, "before": asdict(before), "after": asdict(after), "commands": [asdict(row) for row in rows]}
        sys.stdout.write(f"{json.dumps(told)}\n")
    else:
        sys.stdout.write(
            f"\nbefore archiving {before.objects:,} objects, {before.bytes / 1e6:,.1f} MB; "
            f"after it {after.objects:,} objects, {after.bytes / 1e6:,.1f} MB\n"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
