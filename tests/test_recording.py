"""The recording reader: what it takes, and how it refuses."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from s3capture.demo.recording import SHOWN_FAULTS, RecordedCall, RecordingError, read_recording, write_recording
from s3capture.demo.script import Request, Script, rebuild
from s3capture.demo.workload import built_in

PAGE = (Path(__file__).parent.parent / "docs" / "recording-format.md").read_text("utf-8")


def line(call: str = "a", parent: str | None = None, rollout: str = "7-3", **more: Any) -> dict[str, Any]:
    """One good line; ``more`` replaces or adds fields."""
    return {
        "rollout_id": rollout,
        "model_call_id": call,
        "parent_call_id": parent,
        "new_request_items": [{"role": "user", "content": f"question of {call}"}],
        "output_items": [{"role": "assistant", "content": f"answer of {call}"}],
        "prompt_suffix_ids": [1, 2],
        "generation_token_ids": [3, 4],
        "generation_log_probs": [-0.5, -0.25],
        **more,
    }


def text_of(*lines: dict[str, Any]) -> bytes:
    """The lines as a file holds them."""
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Script]:
    """Write the given lines, or bytes, to a file and read it."""

    def write_and_read(*lines: dict[str, Any] | bytes) -> Script:
        path = tmp_path / "made.jsonl"
        path.write_bytes(b"".join(one if isinstance(one, bytes) else text_of(one) for one in lines))
        return read_recording(path)

    return write_and_read


def faults_of(read: Callable[..., Script], *lines: dict[str, Any] | bytes) -> list[str]:
    """The faults of a bad recording as ``LINE: problem``, the path taken off; every one of them has it."""
    with pytest.raises(RecordingError) as caught:
        read(*lines)
    head, *faults = str(caught.value).splitlines()
    assert "nothing was played" in head
    found = [re.fullmatch(r".*/made\.jsonl:(\d+: .*)", fault) for fault in faults if not fault.startswith("(")]
    assert all(found)
    return [match[1] for match in found if match]


def same_calls(one: Script, other: Script) -> bool:
    """Whether two scripts rebuild to the same requests and generations."""

    def flat(script: Script) -> list[tuple[str, list[tuple[str, Request, list[int], list[float]]]]]:
        rows = []
        for rollout in script.rollouts:
            requests = rebuild(rollout)
            calls = [(c.call_id, requests[c.call_id], c.generation_ids, c.log_probs) for c in rollout.calls]
            rows.append((rollout.rollout_id, calls))
        return sorted(rows, key=lambda row: row[0])

    return flat(one) == flat(other)


def test_a_call_is_rebuilt_from_its_parents(read: Callable[..., Script]) -> None:
    """Items and prompt of a call are its parent's, then what the parent generated, then its own."""
    script = read(line("a"), line("b", "a"), line("c", "b", prompt_suffix_ids=[]))
    requests = rebuild(script.rollouts[0])
    assert requests["a"].prompt == [1, 2]
    assert requests["c"].prompt == [1, 2, 3, 4, 1, 2, 3, 4]
    assert [item["content"] for item in requests["c"].items] == [
        *("question of a", "answer of a", "question of b", "answer of b", "question of c"),
    ]


def test_calls_with_one_parent_are_branches(read: Callable[..., Script]) -> None:
    """Each branch is rebuilt from the common parent alone."""
    requests = rebuild(read(line("a"), line("b", "a"), line("c", "a", prompt_suffix_ids=[9])).rollouts[0])
    assert requests["b"].prompt == [1, 2, 3, 4, 1, 2]
    assert requests["c"].prompt == [1, 2, 3, 4, 9]


def test_lines_of_rollouts_may_be_mixed(read: Callable[..., Script]) -> None:
    """A rollout goes on after lines of another, and both may use the same call ids."""
    script = read(line("a"), line("a", rollout="7-4"), line("b", "a"), line("b", "a", rollout="7-4"))
    assert {r.rollout_id: [c.call_id for c in r.calls] for r in script.rollouts} == {
        "7-3": ["a", "b"],
        "7-4": ["a", "b"],
    }


@pytest.mark.parametrize(
    "pack",
    [
        lambda data: data,
        gzip.compress,
        zstandard.compress,
        lambda data: gzip.compress(data[:100]) + gzip.compress(data[100:]),
        lambda data: zstandard.compress(data[:100]) + zstandard.compress(data[100:]),
        lambda data: data.replace(b"\n", b"\r\n\n").rstrip(),
    ],
    ids=["plain", "gzip", "zstd", "gzip members", "zstd frames", "blank lines, no newline at the end"],
)
def test_a_recording_is_read_however_it_is_packed(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    """Plain, gzip and zstd files give the same calls, whatever they are named."""
    script, plain, packed = built_in(rollouts=8), tmp_path / "plain", tmp_path / "packed.bin"
    write_recording(script, plain)
    packed.write_bytes(pack(plain.read_bytes()))
    assert same_calls(read_recording(packed), script)


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress], ids=["gzip", "zstd"])
@pytest.mark.parametrize("keep", [0.5, 0.999])
def test_a_truncated_file_is_a_fault(tmp_path: Path, pack: Callable[[bytes], bytes], keep: float) -> None:
    """A compressed file that is cut short is refused, never played as far as it goes."""
    path = tmp_path / "cut"
    data = pack(text_of(*(line(str(n)) for n in range(500))))
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(RecordingError, match="cut short or damaged"):
        read_recording(path)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    """A missing file is named."""
    with pytest.raises(RecordingError, match=r"cannot read recording .*/none\.jsonl: No such file"):
        read_recording(tmp_path / "none.jsonl")


def test_an_empty_file_is_an_error(read: Callable[..., Script]) -> None:
    """A recording without calls is not played as if it were fine."""
    with pytest.raises(RecordingError, match="holds no calls"):
        read(b"\n\n")


def test_bad_json_is_told_with_its_line(read: Callable[..., Script]) -> None:
    """Text that is no JSON object is a fault of its line."""
    faults = faults_of(read, line("a"), b"{oops\n", b"[1]\n", b'{"rollout_id": "\xff"}\n')
    assert [fault.split(";")[0].split(" (")[0] for fault in faults] == [
        "2: not JSON",
        "3: a JSON list, not an object",
        "4: not JSON",
    ]


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"parent_call_id": ...}, "field 'parent_call_id' is missing"),
        ({"logprobs": []}, "unknown field 'logprobs'"),
        ({"generation_log_probs": [-0.5]}, "1 generation_log_probs for 2 generation_token_ids"),
        ({"prompt_suffix_ids": [1, -2]}, "token ids must lie between"),
        ({"prompt_suffix_ids": [1, True]}, "token ids must be whole numbers"),
        ({"prompt_suffix_ids": [1, 2.0]}, "token ids must be whole numbers"),
        ({"generation_log_probs": [None, -0.1]}, "generation_log_probs[0]: must be a number"),
        ({"new_request_items": {}}, "new_request_items: must be a list"),
        ({"rollout_id": 7}, "rollout_id: must be a string"),
        ({"rollout_id": ""}, "empty rollout id"),
        ({"token_item_index": 0.5}, "token_item_index: must be a whole number"),
        ({"token_item_index": 1}, "token_item_index 1 lies outside output_items"),
        ({"created_at": math.nan}, "created_at: must be a number, and neither NaN nor infinite"),
        ({"rollout_id": "7/3"}, "invalid rollout id '7/3'"),
        ({"new_request_items": [{"role": "user", "content": 7}]}, "cannot be represented"),
        ({"output_items": ["text"]}, "output_items[0]: must be a JSON object"),
    ],
)
def test_a_bad_field_is_named(read: Callable[..., Script], more: dict[str, Any], problem: str) -> None:
    """Each rule of the format is checked, and its fault names the field, never the values of an array."""
    bad = {key: value for key, value in line("b", **more).items() if value is not ...}
    (fault,) = faults_of(read, line("a"), bad)
    assert fault.startswith("2: ")
    assert problem in fault


def test_a_parent_must_stand_before_its_children(read: Callable[..., Script]) -> None:
    """A parent that comes later, is missing, or is the call itself is a fault."""
    faults = faults_of(read, line("b", "a"), line("a"), line("c", "c"))
    assert [fault.split(";")[0] for fault in faults] == [
        "1: call 'b' continues call 'a', which is on no line before this one",
        "3: call 'c' continues call 'c', which is itself",
    ]


def test_a_parent_must_be_of_the_same_rollout(read: Callable[..., Script]) -> None:
    """A parent id of an earlier rollout is told with where it stands."""
    (fault,) = faults_of(read, line("a", rollout="1-0"), line("b", "a"))
    assert "belongs to rollout '1-0' (line 1), not to '7-3'" in fault


def test_a_call_id_must_be_unique_in_its_rollout(read: Callable[..., Script]) -> None:
    """The second line of a call names the first."""
    (fault,) = faults_of(read, line("a"), line("b", "a"), line("a"))
    assert "3: call 'a' of rollout '7-3' stands on line 1 already" in fault


def test_children_of_a_bad_line_are_not_blamed(read: Callable[..., Script]) -> None:
    """One bad line is one fault, although others continue it."""
    faults = faults_of(read, line("a", generation_log_probs=[]), line("b", "a"), line("c", "b"))
    assert len(faults) == 1


def test_all_faults_are_reported_up_to_a_bound(read: Callable[..., Script]) -> None:
    """Every fault is counted, and the first twenty are shown."""
    with pytest.raises(RecordingError) as caught:
        read(*[b"{\n"] * 33)
    lines = str(caught.value).splitlines()
    assert "33 faults" in lines[0]
    assert len(lines) == 2 + SHOWN_FAULTS
    assert lines[-1] == f"({33 - SHOWN_FAULTS} more not shown)"


def test_every_second_continuation_asks_for_a_delta(read: Callable[..., Script]) -> None:
    """Half of the calls with a parent are to be stored as deltas, and no root ever is."""
    calls = read(line("0"), *(line(str(n), str(n - 1)) for n in range(1, 7))).rollouts[0].calls
    assert [call.delta for call in calls] == [False, False, True, False, True, False, True]


def test_non_finite_log_probs_survive(tmp_path: Path) -> None:
    """-Infinity and NaN are read as themselves."""
    path = tmp_path / "odd"
    path.write_bytes(text_of(line("a", generation_log_probs=[-math.inf, math.nan])))
    low, strange = read_recording(path).rollouts[0].calls[0].log_probs
    assert low == -math.inf
    assert math.isnan(strange)


def test_the_page_describes_every_field() -> None:
    """docs/recording-format.md has one row for each field, and no others."""
    table = PAGE[PAGE.index("| field |") : PAGE.index("Items are what")]
    assert sorted(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == sorted(RecordedCall.model_fields)


def test_the_example_of_the_page_is_a_recording(read: Callable[..., Script]) -> None:
    """The example can be played as it stands."""
    example = re.search(r"```jsonl\n(.*?)```", PAGE, re.DOTALL)
    assert example
    script = read(example[1].encode())
    assert rebuild(script.rollouts[0])["b"].prompt == [11, 12, 13, 21, 22, 31]
