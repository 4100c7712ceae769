"""The conformance kits: they pass what is correct, catch what is broken under the right name, and our endpoints pass.

The rule of this module: a check that no broken transport fails is no check, so each of them is the one that must catch
at least one.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import broken_ledgers
import broken_transports
import gym_env
import pytest
from broken_transports import PlainSink, Resolver, Sink, Source, Transport

from s3capture import S3CaptureLedger, S3LineageResolver, S3TokenSink, S3TokenSource
from s3capture.cli import main
from s3capture.errors import StoreUnavailableError, UnsupportedStoreError
from s3capture.local import EmbeddedServer
from s3capture.preflight import RunInUseError
from s3capture.seaweed import connect
from s3capture.settings import Settings
from s3capture.store.memory import MemoryStore
from s3capture.testing import (
    ConformanceError,
    Ending,
    ErrorKinds,
    Verdict,
    judge_ledger,
    judge_transport,
    run_conformance,
    run_ledger_conformance,
)
from s3capture.testing.bucket_conformance import judge_bucket
from s3capture.testing.conformance import CHECKS, CLOSE_CHECK
from s3capture.testing.ledger_conformance import LEDGER_CHECKS

NAMES = [*(check.name for check in CHECKS), CLOSE_CHECK]
LEDGER_NAMES = [*(check.name for check in LEDGER_CHECKS), CLOSE_CHECK]
PUBLIC = [
    "put_then_freeze_visibility",
    "idempotent_reput",
    "conflicting_reput",
    "mark_incomplete_durability",
    "freeze_idempotency",
    "post_freeze_write_safety",
    "conditional_retirement",
    "lineage_visibility",
    "fresh_client_lineage_visibility",
    "begin_call_custody",
    "unconditional_retirement",
    "delete_clears_retirement",
    "refusal_resolution",
]
DOC = Path(__file__).parent.parent / "docs" / "conformance.md"


def every(verdicts: AsyncGenerator[Verdict, None]) -> list[Verdict]:
    """All verdicts of a run."""

    async def run() -> list[Verdict]:
        return [verdict async for verdict in verdicts]

    return asyncio.run(run())


def failed(verdicts: list[Verdict]) -> dict[str, str]:
    return {verdict.check: verdict.detail for verdict in verdicts if verdict.ending is Ending.FAILED}


def makers(transport: Transport) -> tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any]]:
    return lambda: Sink(transport), lambda: Source(transport), lambda: Resolver(transport)


# -- the kits themselves --------------------------------------------------------------------------------------


def test_every_public_check_is_there() -> None:
    """The kit has each check of the public one and of its newest version, under the same name."""
    assert set(PUBLIC) <= set(NAMES)
    assert len(set(NAMES)) == len(NAMES)
    assert len(set(LEDGER_NAMES)) == len(LEDGER_NAMES)


@pytest.mark.parametrize("kind", broken_transports.CORRECT, ids=lambda kind: kind.__name__)
def test_a_correct_transport_passes(kind: type[Transport]) -> None:
    """A foreign transport passes every check: with a strict fence, a relaxed one, and conflicts left to the reader."""
    passed = asyncio.run(run_conformance(*makers(kind())))
    assert passed == NAMES
    assert passed.skipped == {}


@pytest.mark.parametrize(("kind", "check"), broken_transports.BROKEN, ids=lambda part: getattr(part, "__name__", part))
def test_a_broken_transport_is_caught(kind: type[Transport], check: str) -> None:
    """Each broken transport fails the check that is named for its fault, with a detail that says what was seen."""
    found = failed(every(judge_transport(*makers(kind()))))
    assert found.get(check), f"{kind.__doc__} Failed instead: {sorted(found)}"
    assert "unexpected" not in found[check] or check in ("idempotent_reput", "unknown_rollout_freezes_empty")


@pytest.mark.parametrize("kind", broken_ledgers.CORRECT, ids=lambda kind: kind.__name__)
def test_a_correct_ledger_passes(kind: type[broken_ledgers.Backend]) -> None:
    """A foreign ledger passes every check, whether or not its manifest names open calls."""
    backend = kind()
    passed = asyncio.run(run_ledger_conformance(lambda: broken_ledgers.Ledger(backend)))
    assert passed == LEDGER_NAMES


@pytest.mark.parametrize(("kind", "check"), broken_ledgers.BROKEN, ids=lambda part: getattr(part, "__name__", part))
def test_a_broken_ledger_is_caught(kind: type[broken_ledgers.Backend], check: str) -> None:
    """Each broken ledger fails the check that is named for its fault."""
    backend = kind()
    found = failed(every(judge_ledger(lambda: broken_ledgers.Ledger(backend))))
    assert found.get(check), f"{kind.__doc__} Failed instead: {sorted(found)}"


def test_every_check_catches_something() -> None:
    """No check is idle: each is the one that must catch some broken transport or ledger."""
    assert {check for _, check in broken_transports.BROKEN} == set(NAMES)
    assert {check for _, check in broken_ledgers.BROKEN} == set(LEDGER_NAMES) - {CLOSE_CHECK}
    for variants in (broken_transports.BROKEN, broken_ledgers.BROKEN):
        assert len({kind for kind, _ in variants}) == len(variants)


def test_the_first_failure_is_raised_by_name() -> None:
    """run_conformance raises ConformanceError, an AssertionError with check and detail, and closes what it made."""
    transport = broken_transports.Overwrites()
    made: list[Any] = []
    closed: list[Any] = []

    def sink() -> Any:
        client = Sink(transport)
        client.close = lambda: _closing(client)  # type: ignore[method-assign]
        made.append(client)
        return client

    async def _closing(client: Any) -> None:
        closed.append(client)

    _, source, resolver = makers(transport)
    with pytest.raises(AssertionError) as caught:
        asyncio.run(run_conformance(sink, source, resolver))
    assert isinstance(caught.value, ConformanceError)
    assert caught.value.check == "conflicting_reput"
    assert str(caught.value) == f"conflicting_reput: {caught.value.detail}"
    assert made and closed == made


def test_what_is_absent_is_skipped_and_said() -> None:
    """Without extensions, resolver and races those checks are skipped with the reason, and the others still run."""
    transport = Transport()
    passed = asyncio.run(
        run_conformance(lambda: PlainSink(transport), lambda: Source(transport), races=False, rollout_id="mine")
    )
    assert sorted([*passed, *passed.skipped]) == sorted(NAMES)
    assert passed.skipped["lineage_visibility"] == "no lineage_factory was given"
    assert passed.skipped["begin_twice"] == "the sink has no begin_call"
    assert "record_engine_refusal" in passed.skipped["late_refusal"]
    assert passed.skipped["racing_puts"] == "races=False"
    assert {"put_then_freeze_visibility", "unconditional_retirement"} <= set(passed)
    assert transport.rollouts and all(name.startswith("mine-") for name in transport.rollouts)


def test_a_ledger_without_admissions_is_judged_without_them() -> None:
    """The admission checks are skipped for a ledger that has no such extensions."""
    backend = broken_ledgers.Backend()
    passed = asyncio.run(run_ledger_conformance(lambda: broken_ledgers.PlainLedger(backend), races=False))
    skipped = {"admission_boundary", "retired_admissions", "refused_call_is_excluded"}
    assert {name for name in passed.skipped if not name.startswith("racing_")} == skipped


def test_the_older_names_of_the_refusal_are_known() -> None:
    """A sink that calls the extension refuse_call, and a snapshot that calls its field refusals, are judged as well."""
    transport = Transport()

    class OldSink(PlainSink):
        async def refuse_call(self, rollout_id: str, *, model_call_id: str, code: str | None) -> None:
            await self.transport.refuse(rollout_id, model_call_id, code, {})

    class OldSource(Source):
        async def freeze(self, rollout_id: str) -> Any:
            new = await super().freeze(rollout_id)
            names = ("rollout_id", "entries", "incomplete", "snapshot_id", "version")
            return broken_transports.SimpleNamespace(
                **{name: getattr(new, name) for name in names}, refusals=new.engine_refusals
            )

    passed = asyncio.run(run_conformance(lambda: OldSink(transport), lambda: OldSource(transport), races=False))
    assert {"refusal_resolution", "conflicting_refusal", "late_refusal", "refusal_after_retirement"} <= set(passed)


def test_errors_of_other_names_can_be_given() -> None:
    """A transport whose errors have names of their own passes once they are given, and fails without."""

    class Mine(RuntimeError):
        pass

    class MineToo(Mine):
        pass

    class Renamed(Transport):
        def frozen_error(self) -> Exception:
            return Mine("frozen")

        def retired_error(self) -> Exception:
            return MineToo("retired")

    assert "typed_errors" in failed(every(judge_transport(*makers(Renamed()))))
    kinds = ErrorKinds(frozen=(Mine,), retired=(MineToo,))
    assert failed(every(judge_transport(*makers(Renamed()), errors=kinds))) == {}


# -- our endpoints --------------------------------------------------------------------------------------------


def ours(settings: dict[str, Any]) -> tuple[Callable[[], Any], ...]:
    """Makers of our endpoints; every instance has a runtime of its own, as in processes of their own."""
    number = itertools.count()

    def given() -> dict[str, Any]:
        return {**settings, "op_timeout_s": 30.0 + next(number) % 3}

    return (
        lambda: S3TokenSink(**given()),
        lambda: S3TokenSource(**given()),
        lambda: S3LineageResolver(**given()),
        lambda: S3CaptureLedger(**given()),
    )


def expect_all(settings: dict[str, Any], **options: Any) -> None:
    sink, source, resolver, ledger = ours(settings)
    passed = asyncio.run(run_conformance(sink, source, resolver, **options))
    assert sorted([*passed, *passed.skipped]) == sorted(NAMES)
    of_ledger = asyncio.run(run_ledger_conformance(ledger, **options))
    assert sorted([*of_ledger, *of_ledger.skipped]) == sorted(LEDGER_NAMES)
    assert all(why == "races=False" for why in [*passed.skipped.values(), *of_ledger.skipped.values()])


@pytest.mark.parametrize("retention", ["delete", "keep"])
def test_our_endpoints_pass_in_memory(retention: str, tmp_path: Path) -> None:
    """Sink, source, resolver and ledger pass every check on the store in memory, also when nothing is deleted."""
    expect_all(
        {
            "url": "s3://capture/p",
            "run": "r",
            "store": MemoryStore(),
            "spill_dir": str(tmp_path),
            "retention": retention,
        }
    )


def test_our_endpoints_pass_on_moto(moto_server: str, moto_bucket: str, tmp_path: Path) -> None:
    """They pass on moto; its races are not judged, since it does not promise one winner."""
    settings = {"url": f"s3://{moto_bucket}/p", "run": "r", "endpoint_url": moto_server, "spill_dir": str(tmp_path)}
    expect_all(settings, races=False)


# -- a bucket, from the command line --------------------------------------------------------------------------


def keys_of(seaweed: EmbeddedServer, bucket: str) -> list[str]:
    client = connect(seaweed.endpoint_url, seaweed.access_key, seaweed.secret_key)
    try:
        return [row["Key"] for row in client.list_objects_v2(Bucket=bucket).get("Contents", [])]
    finally:
        client.close()


def test_the_command_judges_a_bucket_and_leaves_nothing(
    seaweed: EmbeddedServer, bucket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Our endpoints pass on a real server, races included; the command says so and removes all that it wrote."""
    status = main(["conformance", f"s3://{bucket}/p", "--endpoint-url", seaweed.endpoint_url, "--json"])
    said = capsys.readouterr()
    rows = [json.loads(line) for line in said.out.splitlines()]
    assert status == 0, said
    assert [row["check"] for row in rows if row["kit"] == "transport"] == NAMES
    assert [row["check"] for row in rows if row["kit"] == "ledger"] == LEDGER_NAMES
    assert {row["ending"] for row in rows} == {"passed"}
    assert all(set(row) == {"kit", "check", "ending", "detail"} for row in rows)
    assert re.search(r"passed, 0 failed, 0 skipped; run 'conformance-[0-9a-f]{16}' was removed", said.err)
    assert keys_of(seaweed, bucket) == []
    assert main(["ls", f"s3://{bucket}/p", "--endpoint-url", seaweed.endpoint_url]) == 0
    assert capsys.readouterr().out == ""


def test_the_command_refuses_a_run_that_holds_data(
    seaweed: EmbeddedServer, bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A named run with data in it is refused with exit status 2, and none of its data is touched."""
    settings: dict[str, Any] = {
        "url": f"s3://{bucket}/p",
        "run": "run-7",
        "endpoint_url": seaweed.endpoint_url,
        "spill_dir": str(tmp_path),
    }
    asyncio.run(S3TokenSink(**settings).mark_incomplete("7-3"))
    before = keys_of(seaweed, bucket)
    arguments = ["conformance", f"s3://{bucket}/p", "--endpoint-url", seaweed.endpoint_url, "--run", "run-7"]
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert "run 'run-7'" in said
    assert "choose another --run, or leave it out" in said
    assert keys_of(seaweed, bucket) == before != []


def test_the_command_says_when_it_could_not_run(capsys: pytest.CaptureFixture[str], seaweed: EmbeddedServer) -> None:
    """A bucket that does not exist is exit status 2 and one line, not a failed check."""
    assert main(["conformance", "s3://no-such-bucket-here/p", "--endpoint-url", seaweed.endpoint_url]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1


class Overwriting(MemoryStore):
    """A store that honours create-if-absent for the probe, and for nothing else."""

    def create(self, key: str, body: bytes) -> bool:
        if "/probe/" in key:
            return super().create(key, body)
        self.overwrite(key, body)
        return True


def verdicts_of(store: MemoryStore, run: str = "throw-away") -> list[Verdict]:
    async def collect() -> list[Verdict]:
        settings = Settings.of(url="s3://capture/p", run=run)
        return [verdict async for _, verdict in judge_bucket(settings, store=store)]

    return asyncio.run(collect())


def test_a_store_that_overwrites_fails_by_name_and_is_cleaned_up() -> None:
    """On a store that lies about create-if-absent the conflict checks fail, and nothing is left behind."""
    store = Overwriting()
    found = failed(verdicts_of(store))
    assert "conflicting_reput" in found
    assert store.list("") == []


def test_a_store_without_conditional_creates_is_not_judged_at_all() -> None:
    """Where the probe fails there is no verdict, but the error that names the missing ability."""

    class Plain(MemoryStore):
        def create(self, key: str, body: bytes) -> bool:
            self.overwrite(key, body)
            return True

    with pytest.raises(UnsupportedStoreError):
        verdicts_of(Plain())


def test_an_outage_is_no_verdict() -> None:
    """A store that goes away in a check ends the run with its own error; what could be removed is removed."""

    class Leaving(MemoryStore):
        gone = False

        def get(self, key: str) -> bytes | None:
            if self.gone and key.endswith("/fence/closing"):
                raise StoreUnavailableError("gone")
            self.gone = True
            return super().get(key)

    store = Leaving()
    with pytest.raises(StoreUnavailableError):
        verdicts_of(store)
    assert store.list("") == []


def test_a_run_in_use_is_refused_before_anything_is_written() -> None:
    """A run that holds data is refused, and stays as it was."""
    store = MemoryStore()
    store.create("p/mine/attempts/00/x/call/y", b"data")
    with pytest.raises(RunInUseError, match="mine"):
        verdicts_of(store, run="mine")
    assert [row.key for row in store.list("")] == ["p/mine/attempts/00/x/call/y"]


# -- nemo_gym's own types -------------------------------------------------------------------------------------


def test_the_endpoints_for_nemo_gym_pass_with_its_own_types(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Sink, source, resolver and ledger of s3capture.gym pass with nemo_gym's records, stamps and resolutions."""
    settings = {"url": "s3://capture/p", "run": "r", "spill_dir": str(tmp_path)}
    found = gym_env.beside(request.config).run(str(Path(__file__).parent / "gym_types.py"), given=settings)
    assert found == {"transport": NAMES, "ledger": LEDGER_NAMES}


# -- the page -------------------------------------------------------------------------------------------------


def test_the_page_lists_every_check() -> None:
    """docs/conformance.md has one row for each check of both kits, saying what the code says, and none besides."""
    transport, ledger = DOC.read_text("utf-8").split("## The transport kit")[1].split("## The ledger kit")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", transport, re.MULTILINE))
    assert rows.pop(CLOSE_CHECK)
    assert rows == {check.name: check.promise for check in CHECKS}
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", ledger, re.MULTILINE))
    assert rows == {check.name: check.promise for check in LEDGER_CHECKS}
