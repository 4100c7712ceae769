"""Checks of a capture ledger: its rows, how it is left, and the extensions that admit calls.

The rule of this module: a ledger never holds tokens, so lineage is judged by staging chain, length and chain hash; and
what a manifest says of calls without an outcome is left open, as the contract leaves it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from s3capture.ledger_records import ROW_MISSING_RESPONSE_ID_REASON
from s3capture.testing.conformance.bench import QUESTION, continuation
from s3capture.testing.conformance.capturing import BAD_IDS
from s3capture.testing.conformance.ledger_bench import LedgerCase, digest_of
from s3capture.testing.conformance.verdicts import Check, check, expect, refusal_of, refusals_of_all, said

# One key under contention is slow on real servers (losers wait), so fewer meet there than elsewhere.
_ROUNDS, _CALLS, _RIVALS = 6, 6, 3


# -- rows -----------------------------------------------------------------------------------------------------


async def record_then_manifest_visibility(case: LedgerCase) -> None:
    """A row whose record returned is in every other instance's manifest, field for field, without token ids."""
    reader, commit = case.ledger(), case.commit()
    await case.ledger().record(commit)
    for ledger in (reader, case.ledger()):
        expect(await ledger.has_rows(case.rollout) is True, "has_rows is not True")
        manifest = await ledger.manifest(case.rollout)
        wanted = commit.record.model_dump(mode="json")
        expect([_known(row, wanted) for row in manifest["records"]] == [wanted], "the row is not the one recorded")
        expect(manifest["failures"] == [], f"a clean ledger has failures: {manifest['failures']}")


def _known(row: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    return {name: row.get(name) for name in wanted}


async def empty_ledger(case: LedgerCase) -> None:
    """A rollout that nobody wrote has no rows and an empty manifest."""
    ledger = case.ledger()
    expect(await ledger.has_rows(case.rollout) is False, "has_rows is not False")
    expect(not await case.rows() and not await case.failures(), "the manifest is not empty")


async def idempotent_rerecord(case: LedgerCase) -> None:
    """The same row again, from any instance, changes nothing."""
    ledger = case.ledger()
    for again in (ledger, ledger, case.ledger()):
        error = await refusal_of(again.record(case.commit()))
        expect(error is None, f"the same row again: {said(error)}")
    expect(list(await case.rows()) == ["call-1"] and not await case.failures(), "a repeated row left a trace")


async def conflicting_rerecord(case: LedgerCase) -> None:
    """The same call with any field changed is a ValueError, also fields that lineage does not use; the row stays."""
    await case.ledger().record(case.commit())
    before = await case.rows()
    changed: dict[str, Any] = {
        "weight_version": 4,
        "digest": digest_of("other"),
        "extras_digest": digest_of("other"),
        "staging_key": "staging/other",
        "chain_hash": digest_of("other"),
        "cumulative_hash": digest_of("other"),
        "response_id": "other",
        "admitted_at": 1_700_000_001.5,
    }
    for name, value in changed.items():
        error = await refusal_of(case.ledger().record(case.commit(**{name: value})))
        conflict = error is not None and case.kinds.is_conflict(error)
        expect(conflict, f"a row with another {name}: {said(error)}, not a ValueError")
    expect(await case.rows() == before, "a conflicting row replaced the first one")


async def failure_rows(case: LedgerCase) -> None:
    """Failures are reported once for each call and reason, also beside a committed row, and count as rows."""
    ledger = case.ledger()
    for call, reason in (("lost", "a"), ("lost", "a"), ("lost", "b"), ("call-1", "a")):
        await ledger.record_failure(case.rollout, call, reason)
    await case.ledger().record_failure(case.rollout, "lost", "a")
    expect(await case.ledger().has_rows(case.rollout) is True, "a failure is no row")
    await ledger.record(case.commit())
    expect(list(await case.rows()) == ["call-1"], "a failure hides the committed row")
    failures = await case.failures()
    expect(failures == [("call-1", "a"), ("lost", "a"), ("lost", "b")], f"the manifest reports {failures}")


async def incomplete_row_is_a_failure(case: LedgerCase) -> None:
    """A row without response id is refused, or reported as a failure of its call; it never breaks the manifest."""
    whole, commit = case.commit(), case.commit("call-2", text="The Rhine.")
    await case.ledger().record(whole)
    record = commit.record.model_copy(update={"response_id": None})
    error = await refusal_of(case.ledger().record(commit.model_copy(update={"record": record})))
    expect(list(await case.rows()) == ["call-1"], "a row without response id is reported as committed, or hides others")
    reported = await case.failures()
    wanted = ("call-2", ROW_MISSING_RESPONSE_ID_REASON)
    expect(error is not None or reported == [wanted], f"the row was taken and the failures are {reported}")


async def lineage(case: LedgerCase) -> None:
    """A committed row is found at once by its faithful continuation, with staging chain, length and chain hash."""
    resolver, commit = case.ledger(), case.commit(chain=("staging/root",))
    await resolver.resolve(case.rollout, continuation())
    await case.ledger().record(commit)
    for ledger in (resolver, case.ledger()):
        found = await ledger.resolve(case.rollout, continuation())
        expect(found.status == "resolved", f"a faithful continuation resolved as {found.status} ({found.reason})")
        match = found.match
        seen = (match.model_call_id, list(match.staging_chain), match.prev_len, match.chain_hash)
        wanted = ("call-1", ["staging/root", "staging/call-1"], 5, commit.record.chain_hash)
        expect(seen == wanted, f"the match is {seen}, not {wanted}")
        root = await ledger.resolve(case.rollout, list(QUESTION))
        expect(root.status == "root", f"a request without model history resolved as {root.status}")
        rewritten = [{"role": "user", "content": "REWRITTEN"}, *continuation()[1:]]
        for name, items in (("rewritten", rewritten), ("unknown", continuation(text="Never said."))):
            nothing = await ledger.resolve(case.rollout, items)
            expect(nothing.status == "unresolved", f"{name} history resolved as {nothing.status}")


async def no_doubtful_parents(case: LedgerCase) -> None:
    """A failed call never resolves as a parent, and two rows with other tokens are not guessed between."""
    ledger = case.ledger()
    await ledger.record_failure(case.rollout, "call-1", "worker_capture_failed")
    found = await ledger.resolve(case.rollout, continuation())
    expect(found.status == "unresolved", f"a failed call resolved as {found.status}")
    for call in ("call-2", "call-3"):
        await ledger.record(case.commit(call))
    for one in (ledger, case.ledger()):
        found = await one.resolve(case.rollout, continuation())
        expect(found.status == "unresolved", f"two different candidates resolved as {found.status}")


# -- leaving --------------------------------------------------------------------------------------------------


async def retirement(case: LedgerCase) -> None:
    """After retire reads raise RolloutRetiredError, late rows are discarded without an error, nothing resolves."""
    ledger = case.ledger()
    await ledger.record(case.commit())
    report = await case.ledger().retire([case.rollout])
    expect(list(report["removed"]) == [case.rollout], f"retire reported {dict(report)}")
    for one in (ledger, case.ledger()):
        await case.expect_retired(one)
    await case.ledger().retire([case.rollout])
    await case.expect_retired(ledger)
    unknown = case.another("unknown")
    report = await ledger.retire([unknown.rollout])
    expect(list(report["absent"]) == [unknown.rollout], f"retire of an unknown rollout reported {dict(report)}")
    await unknown.expect_retired(ledger)


async def delete_clears_retirement(case: LedgerCase) -> None:
    """After delete the id reads as unused: no rows, no parents, and new rows are kept."""
    ledger = case.ledger()
    await ledger.record(case.commit())
    await ledger.record_failure(case.rollout, "lost", "a")
    await ledger.retire([case.rollout])
    await case.ledger().delete([case.rollout])
    report = await case.ledger().delete([case.rollout])
    expect(list(report["absent"]) == [case.rollout], f"deleting again reported {dict(report)}")
    for one in (ledger, case.ledger()):
        expect(await one.has_rows(case.rollout) is False, "a deleted ledger has rows")
        found = await one.resolve(case.rollout, continuation())
        expect(found.status == "unresolved", f"a deleted row resolved as {found.status}")
    await ledger.record(case.commit(weight_version=9))
    rows = await case.rows()
    expect([row["weight_version"] for row in rows.values()] == [9], "the id holds something old")
    expect(not await case.failures(), "the id holds an old failure")


async def removal_report(case: LedgerCase) -> None:
    """Retire and delete report removed and absent in the order asked, duplicates once."""
    ledger = case.ledger()
    for action in ("retire", "delete"):
        ids = [case.another(f"{action}-{letter}").rollout for letter in "cab"]
        for rollout in ids[:2]:
            await ledger.record(case.commit(rollout=rollout))
        report = await getattr(case.ledger(), action)([*ids, ids[0]])
        seen = (list(report["removed"]), list(report["absent"]))
        expect(seen == (ids[:2], ids[2:]), f"{action} of {ids} reported {seen}")


async def id_and_batch_validation(case: LedgerCase) -> None:
    """Invalid rollout ids are a ValueError, a bare string a TypeError, and a refused batch changes nothing."""
    ledger = case.ledger()
    await ledger.record(case.commit())
    for bad in (bad for bad in BAD_IDS if bad):
        attempts = [
            ("manifest", ledger.manifest(bad)),
            ("has_rows", ledger.has_rows(bad)),
            ("record", ledger.record(case.commit(rollout=bad))),
            ("record_failure", ledger.record_failure(bad, "call-1", "a")),
        ]
        for what, error in await refusals_of_all(attempts):
            expect(isinstance(error, ValueError), f"{what} of rollout id {bad[:20]!r}: {said(error)}, not a ValueError")
    for action in (ledger.retire, ledger.delete):
        error = await refusal_of(action(case.rollout))
        expect(isinstance(error, TypeError), f"a bare string: {said(error)}, not a TypeError")
        error = await refusal_of(action([case.rollout, ".."]))
        expect(isinstance(error, ValueError), f"a batch with an invalid id: {said(error)}, not a ValueError")
    expect(list(await case.rows()) == ["call-1"], "a refused batch removed a row")


# -- admissions -----------------------------------------------------------------------------------------------


async def admission_boundary(case: LedgerCase) -> None:
    """After a close new calls are refused by every instance; admitted ones may still commit, and closing repeats."""
    ledger, other = case.ledger(), case.ledger()
    for call in ("call-1", "call-2"):
        await ledger.begin_call(case.rollout, call)
    await ledger.record(case.commit())
    manifest = await ledger.close_admissions(case.rollout)
    expect([row["model_call_id"] for row in manifest["records"]] == ["call-1"], "close did not return the manifest")
    for one in (ledger, other, case.ledger()):
        error = await refusal_of(one.begin_call(case.rollout, "late"))
        expect(error is not None and case.kinds.is_admission(error), f"begin behind the close: {said(error)}")
    await other.record(case.commit("call-2", text="The Rhine."))
    again = await other.close_admissions(case.rollout)
    committed = sorted(row["model_call_id"] for row in again["records"])
    expect(committed == ["call-1", "call-2"], f"closing again returned the rows {committed}")
    expect(not again["failures"], f"settled calls are failures: {again['failures']}")
    expect(again == await case.ledger().manifest(case.rollout), "close and manifest differ")


async def retired_admissions(case: LedgerCase) -> None:
    """After retire no call is admitted, and closing raises RolloutRetiredError."""
    await case.ledger().begin_call(case.rollout, "call-1")
    await case.ledger().retire([case.rollout])
    for call in ("call-1", "call-2"):
        error = await refusal_of(case.ledger().begin_call(case.rollout, call))
        fine = error is not None and (case.kinds.is_admission(error) or case.kinds.is_ledger_retired(error))
        expect(fine, f"begin behind the retirement: {said(error)}")
    error = await refusal_of(case.ledger().close_admissions(case.rollout))
    expect(error is not None and case.kinds.is_ledger_retired(error), f"close behind the retirement: {said(error)}")


async def refused_call_is_excluded(case: LedgerCase) -> None:
    """A call that the worker refused is settled: it is neither a row nor a failure of the manifest, nor a parent."""
    ledger = case.ledger()
    await ledger.begin_call(case.rollout, "call-1")
    await ledger.begin_call(case.rollout, "refused")
    await ledger.refuse_call(case.rollout, "refused")
    await case.ledger().refuse_call(case.rollout, "refused")
    await ledger.record(case.commit())
    closed = await ledger.close_admissions(case.rollout)
    expect(not closed["failures"], f"the refused call is a failure: {closed['failures']}")
    expect(list(await case.rows()) == ["call-1"], "the refused call is a row")


async def racing_admissions(case: LedgerCase) -> None:
    """Begins beside a close are admitted or refused for good: the admitted may commit, and close knows each of them."""
    reports = await _reports_open_calls(case.another("open"))
    for number in range(_ROUNDS):
        one = case.another(number)
        calls = [f"call-{index}" for index in range(_CALLS)]
        acts: list[Any] = [refusal_of(one.ledger().begin_call(one.rollout, call)) for call in calls]
        acts.insert(number % (_CALLS + 1), one.ledger().close_admissions(one.rollout))
        errors = await asyncio.gather(*acts)
        manifest = errors.pop(number % (_CALLS + 1))
        for error in errors:
            fine = error is None or case.kinds.is_admission(error)
            expect(fine, f"begin beside a close: {said(error)}, not an admission error")
        admitted = {call for call, error in zip(calls, errors, strict=True) if error is None}
        if reports:
            open_calls = {failure["model_call_id"] for failure in manifest["failures"]}
            expect(open_calls == admitted, f"close knows {sorted(open_calls)}, admitted are {sorted(admitted)}")
        for call in {*calls, "new"} - admitted:
            error = await refusal_of(one.ledger().begin_call(one.rollout, call))
            expect(
                error is not None and case.kinds.is_admission(error), f"begin of {call} behind the close: {said(error)}"
            )
        for call in sorted(admitted):
            await one.ledger().record(one.commit(call, text=call))
        expect(set(await one.rows()) == admitted, "an admitted call could not commit")


async def _reports_open_calls(case: LedgerCase) -> bool:
    """Whether the manifest names admitted calls without outcome as failures, which the contract leaves open."""
    await case.ledger().begin_call(case.rollout, "open")
    manifest = await case.ledger().close_admissions(case.rollout)
    return [failure["model_call_id"] for failure in manifest["failures"]] == ["open"]


async def racing_records(case: LedgerCase) -> None:
    """Of several rows recorded at once for one call exactly one stands, and the others are told."""
    for number in range(_ROUNDS):
        one = case.another(number)
        commits = [one.commit(weight_version=version) for version in range(_RIVALS)]
        errors = await asyncio.gather(*(refusal_of(one.ledger().record(commit)) for commit in commits))
        winners = [version for version, error in enumerate(errors) if error is None]
        wrong = [error for error in errors if error is not None and not case.kinds.is_conflict(error)]
        expect(not wrong, f"a loser: {said(wrong[0]) if wrong else ''}, not a ValueError")
        stands = [row["weight_version"] for row in (await one.rows()).values()]
        expect(stands == winners and len(winners) == 1, f"rows {winners} were acknowledged, {stands} stands")


async def racing_retirement(case: LedgerCase) -> None:
    """Rows recorded beside a retire are gone or discarded; none starts a new ledger."""
    for number in range(_ROUNDS):
        one = case.another(number)
        acts: list[Any] = [one.ledger().record(one.commit(f"call-{index}", text=str(index))) for index in range(_CALLS)]
        acts.insert(number % (_CALLS + 1), one.ledger().retire([one.rollout]))
        await asyncio.gather(*acts)
        await one.expect_retired(one.ledger())
        await one.ledger().delete([one.rollout])
        expect(await one.ledger().has_rows(one.rollout) is False, "a deleted ledger has rows")


LEDGER_CHECKS: tuple[Check[LedgerCase], ...] = (
    check(record_then_manifest_visibility),
    check(empty_ledger),
    check(idempotent_rerecord),
    check(conflicting_rerecord),
    check(failure_rows),
    check(incomplete_row_is_a_failure),
    check(lineage),
    check(no_doubtful_parents),
    check(retirement),
    check(delete_clears_retirement),
    check(removal_report),
    check(id_and_batch_validation),
    check(admission_boundary, "admissions"),
    check(retired_admissions, "admissions"),
    check(refused_call_is_excluded, "admissions", "refuse_call"),
    check(racing_admissions, "admissions", "races"),
    check(racing_records, "races"),
    check(racing_retirement, "races"),
)
"""Every check of the ledger kit, in the order in which they run."""
