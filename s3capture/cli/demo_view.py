"""What ``s3capture demo`` shows a person: bars while it plays, then one table and the verdict.

The rule of this module: numbers come from the outcome and are named with their unit; nothing is called verified that
was not compared, and what was not compared is said.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from shutil import get_terminal_size

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from s3capture.cli.common import out, out_table, plural, printable, size
from s3capture.demo.observing import percentile
from s3capture.demo.outcome import Fate, Outcome, RolloutOutcome
from s3capture.demo.place import Place
from s3capture.demo.script import Script
from s3capture.records import ParentResolutionStatus

SHOWN_DIFFERENCES = 20
_SHOWN_LOG = 10
_WHOLE_ID = 16
_WITH_UNIT = re.compile(r"(\d) (s|ms|B|kB|MB|GB)\b")
_OPERATIONS = ("resolve", "begin_call", "put", "record_engine_refusal", "mark_incomplete", "freeze", "drop")


class Terminal:
    """A ``Show`` on stderr: with bars on a terminal, in plain lines elsewhere."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, markup=False)
        self._progress = Progress(
            TextColumn("{task.description:<8}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._calls = self._rollouts = TaskID(0)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._progress.stop()

    def opening(self, script: Script, place: Place, workers: int) -> None:
        """Say what is played, and where."""
        self.event(
            f"playing {script.title}: {plural(len(script.rollouts), 'rollout')}, {plural(script.calls, 'call')}, "
            f"{plural(workers, 'worker')}"
        )
        self.event(f"on {place.url}, as run {place.run}")
        self.event(f"at {place.describe()}")

    def begin(self, calls: int, rollouts: int) -> None:
        """Show two bars."""
        self._calls = self._progress.add_task("calls", total=calls)
        self._rollouts = self._progress.add_task("rollouts", total=rollouts)
        self._progress.start()

    def call_done(self) -> None:
        """Move the upper bar."""
        self._progress.advance(self._calls)

    def rollout_done(self) -> None:
        """Move the lower bar."""
        self._progress.advance(self._rollouts)

    def event(self, text: str) -> None:
        """Print a line, above the bars if there are any."""
        self._console.print(printable(text))


def print_outcome(outcome: Outcome) -> None:
    """Print the table and the verdict to stdout."""
    out_table(f"WHAT WAS PLAYED, {outcome.title}", _facts(outcome))
    out_table(f"WHAT IT COST, in {plural(outcome.workers, 'worker')} and the trainer", _operations(outcome))
    for line in _cost_notes(outcome):
        _print_wrapped(line)
    out("")
    for line in _verdict(outcome):
        _print_wrapped(line)


def _print_wrapped(line: str) -> None:
    width = max(get_terminal_size().columns, 40)
    # A number and its unit stay together; in what ``printable`` returns there is no such space yet.
    joined = _WITH_UNIT.sub("\\1\u00a0\\2", printable(line))
    wrapped = textwrap.wrap(joined, width, subsequent_indent="  ", break_on_hyphens=False)
    out("\n".join(wrapped).replace("\u00a0", " "))


def _facts(outcome: Outcome) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    groups = (_played(outcome), _stored(outcome), _lineage(outcome), _fates(outcome))
    for number, group in enumerate(groups):
        if number:
            table.add_row()
        for row in group:
            table.add_row(*map(_cell, row))
    return table


def _cell(text: str) -> str:
    return "\n".join(printable(line) for line in text.split("\n")).replace("[", "\\[")


_Rows = Iterator[tuple[str, str, str]]


def _played(outcome: Outcome) -> _Rows:
    tokens, troubles = outcome.tokens, outcome.troubles
    calls = [f"{outcome.puts:,} put"]
    calls += [f"{troubles.refusals:,} refused by the engine"] if troubles.refusals else []
    calls += [f"{troubles.deaths:,} died with the worker"] if troubles.deaths else []
    calls += [f"{troubles.spilled:,} lost in the outage"] if troubles.spilled else []
    deltas = sum(rollout.deltas for rollout in outcome.rollouts)
    yield "rollouts", f"{len(outcome.rollouts):,}", ""
    yield "calls", f"{outcome.calls:,}", ", ".join(calls)
    total = tokens.prompt + tokens.generated
    yield "tokens", f"{total:,}", f"{tokens.prompt:,} in prompts, {tokens.generated:,} generated"
    if deltas:
        stored = tokens.stored_prompt + tokens.generated
        yield "tokens stored", f"{stored:,}", f"since {plural(deltas, 'record')} {_holds(deltas)} as a delta"


def _stored(outcome: Outcome) -> _Rows:
    sizes = outcome.sizes
    share = f", {sizes.records / sizes.raw:.0%} of that" if sizes.raw else ""
    yield "bytes raw", size(sizes.raw), "all records as JSON"
    yield "bytes stored", size(sizes.records), f"the same records in the bucket{share}"
    yield "bytes in all", size(sizes.all_objects), f"{sizes.objects:,} objects, with intents, lineage, marks and fences"
    parts = ["the fences of what was dropped"] if outcome.of_fate(Fate.DROPPED) else []
    parts += ["what was retained"] if outcome.of_fate(Fate.RETAINED) else []
    yield "bytes left", size(sizes.left), f"{sizes.objects_left:,} objects: {' and '.join(parts)}"


def _lineage(outcome: Outcome) -> _Rows:
    lineage = outcome.lineage
    resolved, unresolved = (
        lineage.by_status[status] for status in (ParentResolutionStatus.RESOLVED, ParentResolutionStatus.UNRESOLVED)
    )
    roots = lineage.by_status[ParentResolutionStatus.ROOT]
    yield "root", f"{roots:,}", f"{_word(roots, 'request')} that {'continues' if roots == 1 else 'continue'} no call"
    continues = "continues" if lineage.crossed == 1 else "continue"
    crossed = f"; {lineage.crossed:,} {continues} a call that another process put" if resolved else ""
    yield "resolved", f"{resolved:,}", f"{_word(resolved, 'request')}{crossed}"
    in_conflict = unresolved and outcome.troubles.conflicts
    why = "; its parent is in conflict, and nothing is guessed" if in_conflict else ""
    yield "unresolved", f"{unresolved:,}", f"{_word(unresolved, 'request')}{why}"


def _fates(outcome: Outcome) -> _Rows:
    incomplete = [rollout for rollout in outcome.rollouts if not rollout.complete]
    complete = len(outcome.rollouts) - len(incomplete)
    yield "complete", f"{complete:,}", _word(complete, "rollout")
    yield "incomplete", f"{len(incomplete):,}", "\n".join(map(_reasons, incomplete)) or "rollouts"
    dropped, retained = outcome.of_fate(Fate.DROPPED), outcome.of_fate(Fate.RETAINED)
    yield (
        "dropped",
        f"{len(dropped):,}",
        _word(len(dropped), "rollout") + (": complete and verified" if dropped else ""),
    )
    by_why: dict[str, list[str]] = {}
    for rollout in retained:
        by_why.setdefault(rollout.why, []).append(rollout.rollout)
    why = "\n".join(f"{reason}: {_some(rollouts)}" for reason, rollouts in by_why.items())
    yield "retained", f"{len(retained):,}", why or "rollouts"


def _reasons(rollout: RolloutOutcome) -> str:
    """One line for a rollout; reasons of one call stand together."""
    by_call: dict[str, list[str]] = {}
    for why in rollout.reasons:
        by_call.setdefault(why.call, []).append(str(why.reason))
    parts = [" and ".join(found) + (f" of call {_short(call)}" if call else "") for call, found in by_call.items()]
    return f"{rollout.rollout}: {', '.join(parts) or 'the bucket does not say why'}"


def _operations(outcome: Outcome) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("operation", no_wrap=True)
    for name in ("count", "failed", "p50 ms", "p95 ms", "max ms", "requests", "each"):
        table.add_column(name, justify="right", no_wrap=True)
    known = [op for op in _OPERATIONS if op in outcome.operations]
    for op in [*known, *sorted(outcome.operations.keys() - set(known))]:
        stats = outcome.operations[op]
        requests = stats.requests + stats.retries
        table.add_row(
            op,
            f"{stats.count:,}",
            f"{sum(stats.failures.values()):,}",
            *(f"{percentile(stats.seconds, percent) * 1000:,.0f}" for percent in (50, 95, 100)),
            f"{requests:,}",
            f"{requests / stats.count:.1f}",
        )
    return table


def _cost_notes(outcome: Outcome) -> Iterator[str]:
    """What in the table of costs would puzzle: failures in a play that went well, and counts that do not add up."""
    failed = [
        f"{op} {', '.join(f'{number} {error}' for error, number in sorted(stats.failures.items()))}"
        for op, stats in outcome.operations.items()
        if stats.failures
    ]
    if failed:
        yield f"failed{', as staged' if outcome.ok else ''}: {'; '.join(failed)}"
    resolve = outcome.operations.get("resolve")
    decided = sum(outcome.lineage.by_status.values())
    if resolve is not None and resolve.count != decided:
        late = "; that of the late call is" if outcome.troubles.late_writes else ""
        yield f"resolve: a root that holds nothing a model wrote asks nothing, and is not counted{late}"
    if any(stats.count and not stats.requests + stats.retries for stats in outcome.operations.values()):
        yield "requests 0: it got no further than the check of the store at first use, whose requests are not counted"


def _verdict(outcome: Outcome) -> Iterator[str]:
    if outcome.ok:
        for line in _staged(outcome):
            yield f"as it must be: {line}"
    for one in outcome.differences[:SHOWN_DIFFERENCES]:
        yield f"DIFFERS: {f'rollout {one.rollout}: ' if one.rollout else ''}{one.what}"
    hidden = len(outcome.differences) - SHOWN_DIFFERENCES
    if hidden > 0:
        yield f"({hidden:,} more differences; --json has them all)"
    if not outcome.ok:
        for line in outcome.log[-_SHOWN_LOG:]:
            yield f"log: {line}"
    for what in outcome.skipped:
        yield f"not played: {what}"
    without = outcome.calls - outcome.verified
    if without:
        yield f"not compared: {plural(without, 'call')} without an entry to compare{_without_entry(outcome)}"
    verified = f"{plural(outcome.verified, 'entry').replace('entrys', 'entries')} read back equal, bit for bit"
    if outcome.ok:
        deltas = sum(rollout.deltas for rollout in outcome.rollouts)
        rebuilt = f", with {plural(deltas, 'prompt')} rebuilt from {'a delta' if deltas == 1 else 'deltas'}"
        yield f"{verified}{rebuilt if deltas else ''}, in {outcome.seconds:.1f} s"
    else:
        yield f"FAILED: {plural(len(outcome.differences), 'difference')}; {verified}"


def _staged(outcome: Outcome) -> Iterator[str]:
    """The troubles that were staged, each with what came of it."""
    troubles = outcome.troubles
    if troubles.retries:
        yield "a retry with the same bytes changed nothing"
    if troubles.conflicts:
        yield "another payload under a used call id was refused and masks its rollout"
    if troubles.deaths:
        yield "a worker killed between begin_call and put left its intent, which masks its rollout"
    if troubles.refusals:
        yield "an engine refusal settled its intent, and its rollout is complete"
    if troubles.late_writes:
        were = "was" if troubles.late_writes == 1 else "were"
        yield f"{plural(troubles.late_writes, 'late write')} {were} refused as frozen and changed nothing"
    if troubles.spilled:
        yield (
            f"S3 was away for {troubles.down_s:.1f} s: {plural(troubles.spilled, 'mark')} spilled, "
            f"{troubles.drained} came back, and the freeze counted it"
        )


def _without_entry(outcome: Outcome) -> str:
    """Which calls have no entry; only known when everything went as it must."""
    troubles = outcome.troubles
    counts = {
        "in conflict": troubles.conflicts,
        "refused": troubles.refusals,
        "died": troubles.deaths,
        "lost in the outage": troubles.spilled,
    }
    found = ", ".join(f"{number} {what}" for what, number in counts.items() if number)
    return f" ({found})" if found and outcome.ok else ""


def _word(count: int, word: str) -> str:
    return word if count == 1 else f"{word}s"


def _holds(count: int) -> str:
    return "holds its prompt" if count == 1 else "hold their prompt"


def _short(call: str) -> str:
    return call if len(call) <= _WHOLE_ID else f"{call[:8]}..."


def _some(names: list[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
