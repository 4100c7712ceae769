"""What a run costs: the arithmetic of storage classes, and requests and sizes held against what is really sent."""

from __future__ import annotations

import asyncio
import json
import random
import re
import uuid
from collections import Counter
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import pytest
from captures import ROLLOUT, answered, continued, on_fake
from fakes3 import FakeS3
from hypothesis import given
from hypothesis import strategies as st

from s3capture import S3LineageResolver, S3TokenSink, S3TokenSource
from s3capture.cli import main
from s3capture.costs import CLASSES, STEPS, Requests, StorageClass, Usage, prices, storage_class
from s3capture.errors import SettingsError
from s3capture.run_costs import Scenario, estimate

GB, KB = 2**30, 2**10
OPERATIONS = Path(__file__).resolve().parent.parent / "docs" / "operations.md"
CALLS = 7


def _usage(*sizes: int) -> Usage:
    usage = Usage()
    for size in sizes:
        usage.add(size)
    return usage


# Storage classes


def test_a_gb_costs_its_price_in_standard() -> None:
    """In STANDARD bytes are billed as they are, however small the objects."""
    assert _usage(GB // 2, GB // 2).monthly_cost(CLASSES["STANDARD"]) == pytest.approx(0.023)
    assert _usage(1, 1, 1).billed_bytes(CLASSES["STANDARD"]) == 3


@pytest.mark.parametrize("name", ["STANDARD_IA", "GLACIER_IR"])
def test_small_objects_are_billed_as_the_minimum(name: str) -> None:
    """Each object below 128 KB is billed as 128 KB, one at it or above as it is."""
    usage = _usage(1, 128 * KB - 1, 128 * KB, 128 * KB + 1, GB)
    assert usage.billed_bytes(CLASSES[name]) == 2 * 128 * KB + 128 * KB + 128 * KB + 1 + GB


def test_archive_classes_add_an_overhead_to_each_object() -> None:
    """GLACIER and DEEP_ARCHIVE add 32 KB at their own price and 8 KB at that of STANDARD."""
    usage = Usage()
    usage.add(0, count=2**15)  # 2**15 times 32 KB are 1 GB, and 8 KB a quarter of it
    assert usage.monthly_cost(CLASSES["DEEP_ARCHIVE"]) == pytest.approx(0.00099 + 0.25 * 0.023)
    dearer = storage_class("DEEP_ARCHIVE", {"STANDARD": 0.046})
    assert usage.monthly_cost(dearer) == pytest.approx(0.00099 + 0.25 * 0.046), "the overhead follows STANDARD's price"


@given(st.lists(st.integers(0, 2**19), max_size=40), st.integers(0, 256 * KB), st.integers(0, 64 * KB))
def test_usage_is_the_sum_over_all_objects(sizes: list[int], least: int, overhead: int) -> None:
    """Whatever the sizes, the minimum and the overhead: the histogram bills what object by object adds up to."""
    one = StorageClass("ANY", 1.0, 0, 0, minimum_bytes=least, overhead_bytes=overhead)
    usage = _usage(*sizes)
    assert usage.billed_bytes(one) == sum(max(size, least) + overhead for size in sizes)
    assert (usage.objects, usage.bytes) == (len(sizes), sum(sizes))


def test_usage_holds_no_more_for_more_objects() -> None:
    """A million objects of one size, and any number of large ones, take no more memory than one."""
    usage = Usage()
    usage.add(20_000, count=1_000_000)
    for size in range(GB, GB + 1000):
        usage.add(size)
    assert len(usage._small) == 1
    assert usage.objects == 1_001_000


def test_creating_and_reading_are_billed_by_object_and_byte() -> None:
    """Creating costs a PUT for each object; reading a GET for each, and the retrieval of its bytes."""
    usage, instant = _usage(*[GB // 1000] * 1000), CLASSES["GLACIER_IR"]
    assert usage.creation_cost(instant) == pytest.approx(0.02)
    assert usage.reading_cost(instant) == pytest.approx(0.01 + 0.03, rel=1e-3)


def test_prices_of_ones_own_replace_the_examples() -> None:
    """``CLASS=`` is the price of storage, ``CLASS.PRICE=`` any other, and nothing else of a class changes."""
    overrides = prices(["GLACIER_IR=0.005", "GLACIER_IR.get_1000=0.02", "STANDARD=1"])
    mine = storage_class("GLACIER_IR", overrides)
    assert (mine.gb_month, mine.get_1000, mine.put_1000, mine.minimum_bytes) == (0.005, 0.02, 0.02, 128 * KB)
    assert storage_class("STANDARD_IA", overrides) == CLASSES["STANDARD_IA"]


@pytest.mark.parametrize(
    "text", ["GLACIER", "GLACIER=", "GLACIER=cheap", "GLACIAL=1", "GLACIER.minimum_days=1", "=1", "GLACIER.=x"]
)
def test_a_price_that_cannot_be_read_is_refused(text: str) -> None:
    """A price without a number, of an unknown class or of an unknown kind is a ``SettingsError``."""
    with pytest.raises(SettingsError, match="price"):
        prices([text])


@pytest.mark.parametrize("amount", [-0.1, float("nan"), float("inf")])
def test_a_price_is_a_number_of_dollars(amount: float) -> None:
    """A negative or non-finite price is refused."""
    with pytest.raises(SettingsError, match=r"STANDARD\.gb_month"):
        storage_class("STANDARD", {"STANDARD": amount})


def test_an_unknown_class_is_refused_with_the_known_ones() -> None:
    """The error names every class that there is."""
    with pytest.raises(SettingsError) as caught:
        storage_class("GLACIAL")
    assert all(name in str(caught.value) for name in CLASSES)


# Requests and sizes, against the wire


class Wire:
    """Endpoints on a server that counts; ``cost`` runs one operation and returns its requests by kind."""

    def __init__(self, s3: FakeS3, spill: Path) -> None:
        self.s3, self.settings = s3, on_fake(s3, spill, read_timeout_s=10.0)
        self.sink, self.source = S3TokenSink(**self.settings), S3TokenSource(**self.settings)
        self.resolver = S3LineageResolver(**self.settings)
        asyncio.run(self.sink.mark_incomplete("another"))  # the check at first use is behind us

    def cost(self, operation: Awaitable[Any]) -> Requests:
        async def run() -> Any:
            return await operation

        before = Counter(request.operation for request in self.s3.requests)
        asyncio.run(run())
        sent = Counter(request.operation for request in self.s3.requests) - before
        sent.pop("DeleteObjects", None)  # deletes are free
        assert set(sent) <= {"PutObject", "GetObject", "ListObjectsV2"}
        return Requests(sent["PutObject"], sent["GetObject"], sent["ListObjectsV2"])


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    with FakeS3() as s3:
        yield Wire(s3, tmp_path / "spill")


def _large(call: str, number: int = 0) -> Any:
    """A record that is no seal by its size, like every real one."""
    tokens = random.Random(number)
    prompt, generation = ([tokens.randrange(150_000) for _ in range(count)] for count in (2000, 200))
    request = [{"role": "user", "content": f"question {number}"}]
    return answered(call, request, f"answer {number}", prompt=prompt, generation=generation)


def test_the_requests_of_each_step_are_those_on_the_wire(wire: Wire) -> None:
    """What the costs count for a step is what its operation sends, by kind of request."""
    assert wire.cost(wire.sink.begin_call(ROLLOUT, "c0")) == STEPS["begin_call"].base
    assert wire.cost(wire.sink.put(_large("c0"))) == STEPS["put"].base
    for number in range(1, CALLS):
        assert wire.cost(wire.sink.put(_large(f"c{number}", number))) == STEPS["put, not begun here"].base
    again = continued([{"role": "user", "content": "question 0"}], "answer 0")
    assert wire.cost(wire.resolver.resolve(ROLLOUT, again)) == STEPS["resolve, cold"].base
    assert wire.cost(wire.resolver.resolve(ROLLOUT, again)) == STEPS["resolve, in memory"].base
    assert wire.cost(wire.source.freeze(ROLLOUT)) == STEPS["freeze"].of(CALLS)
    snapshot = asyncio.run(wire.source.freeze(ROLLOUT))
    exact: dict[str, Any] = {"snapshot_id": snapshot.snapshot_id, "version": snapshot.version}
    assert wire.cost(wire.source.drop(ROLLOUT, **exact)) == STEPS["drop"].base


def test_the_requests_of_retiring_are_those_on_the_wire(wire: Wire) -> None:
    """To retire a frozen rollout, as archiving does, sends what the costs count for it, whatever its length."""
    for number in range(CALLS):
        asyncio.run(wire.sink.put(_large(f"c{number}", number)))
    asyncio.run(wire.source.freeze(ROLLOUT))
    assert wire.cost(wire.source.retire([ROLLOUT])) == STEPS["retire, frozen"].base


def test_the_page_and_the_code_have_the_same_budgets() -> None:
    """The table of docs/operations.md gives the PUTs, GETs and LISTs of each step that the costs count."""
    rows = re.findall(r"^\| (.+?) \| [^|]+ \| [^|]+ \| (\d+) / ([^/|]+) / (\d+)[^|]*\|$", OPERATIONS.read_text(), re.M)
    table = {name: (put, get.strip(), listed) for name, put, get, listed in rows}
    for name, step in (
        ("`begin_call`", "begin_call"),
        ("`put` of a call begun here", "put"),
        ("`put`, otherwise", "put, not begun here"),
        ("first `freeze` of T calls", "freeze"),
        ("`drop`", "drop"),
    ):
        base, each = STEPS[step].base, STEPS[step].for_each_call
        assert each.put == each.list == 0 and each.get in (0, 1)
        gets = "T" if each.get and not base.get else str(base.get)
        assert table[name] == (str(base.put), gets, str(base.list)), name


@pytest.mark.parametrize("drop", [False, True])
def test_the_objects_of_a_run_are_counted_as_they_are_made(wire: Wire, drop: bool) -> None:
    """A scenario has as many objects as a real rollout, kept or dropped, and within a fifth as many bytes."""
    for number in range(CALLS):
        call = uuid.UUID(int=random.Random(number).getrandbits(128)).hex
        asyncio.run(wire.sink.begin_call(ROLLOUT, call))
        asyncio.run(wire.sink.put(_large(call, number)))
    snapshot = asyncio.run(wire.source.freeze(ROLLOUT))
    if drop:
        assert asyncio.run(wire.source.drop(ROLLOUT, snapshot_id=snapshot.snapshot_id, version=snapshot.version))
    sizes = {key: len(body) for key, body in wire.s3.objects.items() if f"/{ROLLOUT}/" in key}
    records = [size for key, size in sizes.items() if "/call/" in key]
    run = Scenario(1, CALLS, sum(records) // CALLS if records else 1)
    expected = run.dropped() if drop else run.kept()
    assert expected.objects == len(sizes)
    beside = sum(sizes.values()) - sum(records)
    assert expected.bytes - (0 if drop else sum(records)) == pytest.approx(beside, rel=0.2)


# The estimate and the command


def test_the_requests_of_a_run_are_its_steps_times_their_number() -> None:
    """Each call begins and puts once, all but the first of a rollout resolve, each rollout freezes and drops."""
    rows = {row.step: row for row in estimate(Scenario(10, 20, 1000, cold_share=0.5)).requests}
    assert (rows["begin_call"].times, rows["put"].times, rows["freeze"].times) == (200, 200, 10)
    assert (rows["resolve, cold"].times, rows["resolve, in memory"].times) == (95, 95)
    assert (rows["freeze"].put, rows["freeze"].get, rows["freeze"].list) == (20, 200, 20)
    assert rows["put"].dollars == pytest.approx(400 * 0.005 / 1000)


def test_packs_are_cheaper_in_every_cold_class_than_small_objects() -> None:
    """The reason for archiving: below the minimum, small objects cost more in each cold class than packs do."""
    found = estimate(Scenario(5000, 20, 20_000))
    monthly = {(row.kept_as, row.storage_class): row.monthly_dollars for row in found.storage}
    for name in CLASSES.keys() - {"STANDARD"}:
        assert monthly["small objects", name] > 5 * monthly["packs", name]
        assert monthly["small objects", name] > monthly["small objects", "STANDARD"]


def test_packs_hold_every_byte() -> None:
    """Packs have the bytes of the small objects, in as few objects as their size allows."""
    run = Scenario(100, 20, 50_000, pack_bytes=10**7)
    assert run.packed().bytes == run.kept().bytes
    assert run.packed().objects == -(-run.kept().bytes // 10**7)


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    """``--json`` is one object with the run, every price used and the estimate."""
    assert main(["costs", "--rollouts", "10", "--price", "GLACIER_IR=0.1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["run"]["rollouts"] == 10
    assert {one["name"]: one["gb_month"] for one in found["prices"]}["GLACIER_IR"] == 0.1
    assert {row["kept_as"] for row in found["estimate"]["storage"]} == {"dropped", "small objects", "packs"}


@pytest.mark.parametrize("wrong", [["--price", "GLACIAL=1"], ["--rollouts", "0"], ["--cold-share", "2"]])
def test_the_command_refuses_what_cannot_be(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A price or number that cannot be is refused with status 2 and nothing on stdout."""
    assert main(["costs", *wrong]) == 2
    assert not capsys.readouterr().out


def test_the_worked_example_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """Each command line of the page's chapter is followed by its output of today."""
    chapter = OPERATIONS.read_text().split("\n## What it costs\n")[1].split("\n## ")[0]
    examples = re.findall(r"^```console\n\$ s3capture (costs[^\n]*)\n(.*?)^```", chapter, re.MULTILINE | re.DOTALL)
    assert examples
    for line, output in examples:
        assert main(line.split()) == 0
        assert capsys.readouterr().out == output, line


def test_the_table_of_prices_is_that_of_the_code() -> None:
    """The prices of the page are the examples of the code, class by class."""
    chapter = OPERATIONS.read_text().split("\n## What it costs\n")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `([A-Z_]+)` \| (.+) \|$", chapter, re.MULTILINE))
    assert set(rows) == set(CLASSES)
    for name, one in CLASSES.items():
        amounts = [float(cell) for cell in rows[name].split(" | ")[:4]]
        assert amounts == [one.gb_month, one.put_1000, one.get_1000, one.retrieval_gb], name
