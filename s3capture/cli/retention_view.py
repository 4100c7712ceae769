"""What ``s3capture retire``, ``delete`` and ``sweep`` print.

The rule of this module: the dry run and the real run print the same plan, and every key that is still there is named
with the store's reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from s3capture.cli.common import out, out_json, plural, say, size, when

if TYPE_CHECKING:
    from s3capture.retention import Leftovers, Outcome, Plan, SweepPlan, Tally
    from s3capture.settings import Settings

_NAMED = 20


def print_plan(plan: Plan, rest: Leftovers | None, settings: Settings, *, as_json: bool) -> None:
    """Print what would be done, by state; ``rest`` is what goes beside the rollouts of a whole run."""
    states, total = plan.by_state(), plan.total
    kinds = rest.tallies if rest is not None else {}
    ledgers = sum(candidate.ledger > 0 for candidate in plan.candidates)
    finishing = sum(candidate.finishing for candidate in plan.candidates)
    if as_json:
        out_json(
            {
                "plan": str(plan.request.act),
                "run": settings.run,
                "states": {str(state): tally for state, tally in states.items()},
                "total": total,
                "ledgers": ledgers,
                "finishing": finishing,
                "rest": {str(kind): tally for kind, tally in kinds.items()},
                "stays": [{"state": str(state), "why": str(why), "rollouts": n} for state, why, n in plan.stays],
                "absent": plan.absent,
            }
        )
        for candidate in plan.candidates:
            out_json({"rollout": candidate.rollout, "state": str(candidate.state), **_counts(candidate.tally)})
        return
    out(f"{plan.request.act} in run {settings.run} at {settings.url}")
    out(f"{'STATE':<10} {'ROLLOUTS':>10} {'CALLS':>10} {'OBJECTS':>10} {'SIZE':>9}")
    for state, tally in states.items():
        out(_line(str(state), tally))
    out(_line("total", total))
    if ledgers:
        out(f"with the {'ledger' if ledgers == 1 else 'ledgers'} of {plural(ledgers, 'rollout')}")
    if finishing:
        out(f"{plural(finishing, 'rollout')} of these only to be finished: it was begun before")
    for kind, tally in kinds.items():
        out(f"{kind:<21} {'':>10} {tally.objects:>10,} {size(tally.bytes):>9}")
    for state, why, count in plan.stays:
        out(f"stays: {count:,} {state}: {why}")
    if states_left := protected(plan):
        keeping = ", or retire with --retention keep, which deletes nothing" if plan.request.act == "retire" else ""
        names = " ".join(f"--state {state}" for state in states_left)
        say(f"what nobody consumed is taken by name: its id in full, or {names}{keeping}")


def protected(plan: Plan) -> list[str]:
    """The states of rollouts that stay because nobody named them."""
    from s3capture.retention.choosing import Stays  # noqa: PLC0415 - see common.opened

    return [str(state) for state, why, _ in plan.stays if why is Stays.PROTECTED]


def _line(name: str, tally: Tally) -> str:
    return f"{name:<10} {tally.rollouts:>10,} {tally.calls:>10,} {tally.objects:>10,} {size(tally.bytes):>9}"


def _counts(tally: Tally) -> dict[str, int]:
    return {"calls": tally.calls, "objects": tally.objects, "bytes": tally.bytes}


def print_sweep(plan: SweepPlan, settings: Settings, until: float, *, as_json: bool) -> None:
    """Print what would be swept, line by line, and what stays."""
    if as_json:
        out_json(
            {
                "plan": "sweep",
                "run": settings.run,
                "until": until,
                "lines": {what.name.lower(): tally for what, tally in plan.tallies.items()},
                "kept": {what.name.lower(): tally for what, tally in plan.kept.items()},
            }
        )
        return
    out(f"sweep in run {settings.run} at {settings.url}, of what was last changed before {when(until)} UTC")
    out(f"{'WHAT':<38} {'ROLLOUTS':>10} {'OBJECTS':>10} {'SIZE':>9}")
    for what, tally in plan.tallies.items():
        out(f"{what:<38} {tally.rollouts or '-':>10} {tally.objects:>10,} {size(tally.bytes):>9}")
    for what, tally in plan.kept.items():
        out(
            f"stays: {plural(tally.objects, 'object')} of {plural(tally.rollouts, 'rollout')}: {what}; "
            "--kept takes them"
        )


def tell_problems(problems: Iterable[str], strays: Iterable[str]) -> bool:
    """Say what is damaged or not ours; return whether there was nothing."""
    sound = True
    for problem in problems:
        sound = False
        say(problem)
    for key in strays:
        sound = False
        say(f"foreign key {key}, left alone")
    return sound


def report(outcomes: Iterable[Outcome], done: str, *, as_json: bool) -> bool:
    """Say what could not be done, key by key, and how much was; return whether all was."""
    good, bad, shown = 0, 0, 0
    for outcome in outcomes:
        if outcome.done:
            good += 1
            continue
        bad += 1
        if as_json:
            out_json(
                {
                    "failed": outcome.what,
                    "error": outcome.error or None,
                    "left": [{"key": key, "reason": reason} for key, reason in outcome.left],
                    "came_back": outcome.came_back,
                }
            )
        for line in _failures(outcome):
            shown += 1
            if shown <= _NAMED or not as_json:  # JSON has all of them
                say(line)
    if as_json:
        out_json({"done": done, "succeeded": good, "failed": bad})
    else:
        out(f"{done}: {good:,}" + (f"; not wholly: {bad:,}" if bad else ""))
    if bad:
        say("the same command again does the rest")
    return not bad


def _failures(outcome: Outcome) -> Iterator[str]:
    if outcome.error:
        yield f"{outcome.what}: {outcome.error}"
    for key, reason in outcome.left:
        yield f"not deleted: {key}: {reason}"
    if outcome.came_back:
        yield (
            f"{outcome.what}: {plural(outcome.came_back, 'object')} came while it was deleted: a writer is still at "
            "work; stop it and repeat"
        )
