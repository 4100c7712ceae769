"""Checks of a resolver: which recorded call does a request continue?

The rule of this module: UNRESOLVED is always safe, so a check accepts it wherever a parent is not certain, and demands
RESOLVED only for the plain faithful continuation. A wrong parent is never accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from s3capture.testing.conformance.bench import ANSWER, QUESTION, Case, answer, continuation
from s3capture.testing.conformance.verdicts import Check, check, expect, refusal_of


async def lineage_visibility(case: Case) -> None:
    """A resolver that existed before the put finds the call at once, with its cumulative tokens and digest."""
    resolver = case.resolver()
    expect(isinstance(resolver.is_process_shared(), bool), "is_process_shared() is no bool")
    await _visible(case, resolver)


async def fresh_client_lineage_visibility(case: Case) -> None:
    """A resolver that is made after the put finds the call as well, and so does one that found nothing before it."""
    early = case.resolver()
    nothing = await early.resolve(case.rollout, continuation())
    expect(nothing.status == "unresolved", f"a call that was not put yet resolved as {nothing.status}")
    await _visible(case, None)
    await _resolved(early, case, continuation(), "call-1", [11, 12, 13, 14])


async def _visible(case: Case, resolver: Any) -> None:
    entry = case.entry()
    await case.sink().put(entry)
    resolver = case.resolver() if resolver is None else resolver
    for _ in range(2):
        resolution = await _resolved(resolver, case, continuation(), "call-1", [11, 12, 13, 14])
        expect(resolution.match.digest == entry.digest, "the match has another digest than the record")
    root = await resolver.resolve(case.rollout, [{"role": "user", "content": "Something else."}])
    expect(root.status == "root" and root.match is None, f"a request without model history resolved as {root.status}")


async def rewritten_context(case: Case) -> None:
    """A request whose earlier items differ from the recorded ones, in any place, has no parent."""
    system = {"role": "system", "content": "Be brief."}
    request = [system, *QUESTION]
    await case.sink().put(case.entry(request=request))
    resolver = case.resolver()
    await _resolved(resolver, case, continuation(request), "call-1", [11, 12, 13, 14])
    tail = [answer(ANSWER), {"role": "user", "content": "And through Budapest?"}]
    rewritten: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": "REWRITTEN"}, *tail],
        [*QUESTION, *tail],
        [{**system, "content": "Be verbose."}, *QUESTION, *tail],
        [*QUESTION, system, *tail],
        [*request, answer("The Danube!"), tail[1]],
        [system, {"role": "system", "content": "Be kind."}, *QUESTION, *tail],
    ]
    for number, items in enumerate(rewritten):
        resolution = await resolver.resolve(case.rollout, items)
        expect(resolution.status == "unresolved", f"rewritten history {number} resolved as {resolution.status}")
        expect(resolution.match is None, "an unresolved request has a match")


async def ambiguous_candidates(case: Case) -> None:
    """Two calls with the same request and output but other tokens are no parent: nothing is guessed."""
    sink = case.sink()
    await sink.put(case.entry("call-1", prompt=(1, 2)))
    await _resolved(case.resolver(), case, continuation(), "call-1", [1, 2, 13, 14])
    resolver = case.resolver()
    await resolver.resolve(case.rollout, continuation())
    await sink.put(case.entry("call-2", prompt=(3, 4)))
    for one in (resolver, case.resolver()):
        resolution = await one.resolve(case.rollout, continuation())
        expect(resolution.status == "unresolved", f"two different candidates resolved as {resolution.status}")


async def conflict_is_no_candidate(case: Case) -> None:
    """Of a call with conflicting payloads the loser is never a parent, and neither is one when both were taken."""
    sink, entry = case.sink(), case.entry()
    other = case.other(entry)
    early = case.resolver()
    await sink.put(entry)
    await _resolved(early, case, continuation(), "call-1", [11, 12, 13, 14])
    error = await refusal_of(case.sink().put(other))
    for resolver in (early, case.resolver()):
        lost = await resolver.resolve(case.rollout, continuation(text="The Rhine."))
        expect(lost.status == "unresolved", f"the payload that lost resolved as {lost.status}")
        won = await resolver.resolve(case.rollout, continuation())
        if error is None:
            expect(won.status == "unresolved", f"a call with two accepted payloads resolved as {won.status}")
        elif won.status == "resolved":
            expect(list(won.match.cumulative_token_ids) == [11, 12, 13, 14], "a conflict resolved to other tokens")


async def delta_prompt_is_materialized(case: Case) -> None:
    """The parent's cumulative tokens are complete, also through a chain of records that hold only a suffix."""
    sink, warm = case.sink(), case.resolver()
    tokens: list[int] = [11, 12, 13, 14]
    parent = case.entry()
    await sink.put(parent)
    request: Sequence[dict[str, Any]] = continuation()
    for number in (2, 3):
        text = f"Answer {number}."
        child = case.entry(
            f"call-{number}",
            prompt=(number * 10,),
            generation=(number * 10 + 1,),
            request=request,
            text=text,
            parent=parent,
            delta_of=tokens,
        )
        await sink.put(child)
        tokens = [*tokens, number * 10, number * 10 + 1]
        request, parent = continuation(request, text), child
        for resolver in (warm, case.resolver()):
            resolution = await _resolved(resolver, case, request, child.model_call_id, tokens)
            expect(resolution.match.digest == child.digest, "the match has another digest than the record")


async def lineage_is_per_rollout(case: Case) -> None:
    """A call of another rollout is no parent."""
    other = case.another("other")
    text = "Said in another rollout alone."
    await other.sink().put(other.entry(text=text))
    await _resolved(case.resolver(), other, continuation(text=text), "call-1", [11, 12, 13, 14])
    resolution = await case.resolver().resolve(case.rollout, continuation(text=text))
    expect(resolution.status == "unresolved", f"a call of another rollout resolved as {resolution.status}")


async def lineage_after_delete(case: Case) -> None:
    """A rollout that was deleted has no parents, not in a resolver's memory either; its new calls resolve."""
    resolver = case.resolver()
    await case.sink().put(case.entry())
    await _resolved(resolver, case, continuation(), "call-1", [11, 12, 13, 14])
    await case.source().retire([case.rollout])
    await case.source().delete([case.rollout])
    for one in (resolver, case.resolver()):
        resolution = await one.resolve(case.rollout, continuation())
        expect(resolution.status == "unresolved", f"a deleted call resolved as {resolution.status}")
    await case.sink().put(case.entry(prompt=(31, 32)))
    for one in (resolver, case.resolver()):
        await _resolved(one, case, continuation(), "call-1", [31, 32, 13, 14])


async def _resolved(resolver: Any, case: Case, items: Sequence[Any], call: str, tokens: list[int]) -> Any:
    resolution = await resolver.resolve(case.rollout, list(items))
    reason = f" ({resolution.reason})" if resolution.reason else ""
    expect(resolution.status == "resolved", f"a faithful continuation of {call} is {resolution.status}{reason}")
    expect(resolution.match.model_call_id == call, f"it resolved to {resolution.match.model_call_id!r}, not {call!r}")
    expect(list(resolution.match.cumulative_token_ids) == tokens, f"the tokens of {call} are not its cumulative tokens")
    return resolution


CHECKS: tuple[Check[Case], ...] = tuple(
    check(run, "lineage")
    for run in (
        lineage_visibility,
        fresh_client_lineage_visibility,
        rewritten_context,
        ambiguous_candidates,
        conflict_is_no_candidate,
        delta_prompt_is_materialized,
        lineage_is_per_rollout,
        lineage_after_delete,
    )
)
