"""The native matcher proves a parent or says why not, whatever the dialect, and never matches by luck."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from s3capture.errors import UnrepresentableHistoryError
from s3capture.matching import (
    FINGERPRINT_VERSION,
    NativeMatcher,
    ParentDecision,
    context_digest,
    stamp_continuation,
)
from s3capture.records import TokenEntry

MATCHER = NativeMatcher()
Item = dict[str, Any]

# Every code point, lone surrogates included: chat texts hold whatever a model can emit.
texts = st.text(st.characters(exclude_categories=()), min_size=1, max_size=12)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(texts, json_values, min_size=1, max_size=3)


@dataclass
class Turn:
    """One exchange in no dialect: what a user says, and what the model answers and calls."""

    user: str
    answer: str
    calls: list[tuple[str, dict[str, Any], str]] = field(default_factory=list)


turns = st.builds(Turn, texts, texts, st.lists(st.tuples(texts, arguments, texts), max_size=2))
conversations = st.lists(turns, min_size=1, max_size=3)


def ids(turn_index: int, count: int) -> list[str]:
    return [f"call-{turn_index}-{number}" for number in range(count)]


def chat(index: int, turn: Turn) -> tuple[list[Item], list[Item], list[Item]]:
    """Return the turn as (user items, model items, tool results) of Chat Completions."""
    calls = list(zip(ids(index, len(turn.calls)), turn.calls, strict=True))
    made = [
        {"id": i, "type": "function", "function": {"name": name, "arguments": json.dumps(args)}}
        for i, (name, args, _) in calls
    ]
    answer: Item = {"role": "assistant", "content": turn.answer, **({"tool_calls": made} if made else {})}
    results = [{"role": "tool", "tool_call_id": i, "content": result} for i, (_, _, result) in calls]
    return [{"role": "user", "content": turn.user}], [answer], results


def responses(index: int, turn: Turn) -> tuple[list[Item], list[Item], list[Item]]:
    """Return the turn as Responses items, reasoning and item ids included."""
    calls = list(zip(ids(index, len(turn.calls)), turn.calls, strict=True))
    answer: list[Item] = [
        {"type": "reasoning", "id": f"rs-{index}", "summary": [{"type": "summary_text", "text": "hm"}]},
        {
            "type": "message",
            "id": f"msg-{index}",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": turn.answer, "annotations": []}],
        },
    ]
    answer += [
        {"type": "function_call", "id": f"fc-{i}", "call_id": i, "name": name, "arguments": json.dumps(args)}
        for i, (name, args, _) in calls
    ]
    results = [{"type": "function_call_output", "call_id": i, "output": result} for i, (_, _, result) in calls]
    user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": turn.user}]}
    return [user], answer, results


def anthropic(index: int, turn: Turn) -> tuple[list[Item], list[Item], list[Item]]:
    """Return the turn as Anthropic messages, thinking and cache marks included."""
    calls = list(zip(ids(index, len(turn.calls)), turn.calls, strict=True))
    blocks: list[Item] = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "text", "text": turn.answer, "cache_control": {"type": "ephemeral"}},
    ]
    blocks += [{"type": "tool_use", "id": i, "name": name, "input": args} for i, (name, args, _) in calls]
    results = [{"type": "tool_result", "tool_use_id": i, "content": result} for i, (_, _, result) in calls]
    user = {"role": "user", "content": [{"type": "text", "text": turn.user}]}
    return [user], [{"role": "assistant", "content": blocks}], [{"role": "user", "content": results}] if results else []


DIALECTS = [chat, responses, anthropic]


def split(dialect: Any, conversation: list[Turn]) -> tuple[list[Item], list[Item], list[Item]]:
    """Return (request that led to the last call, its output, the tool results after it)."""
    spoken = [dialect(index, turn) for index, turn in enumerate(conversation)]
    request = [item for parts in spoken[:-1] for part in parts for item in part]
    user, output, results = spoken[-1]
    return request + user, output, results


def entry(call_id: str, request: list[Item], output: list[Item], **given: Any) -> TokenEntry:
    fields: dict[str, Any] = {
        "rollout_id": "7-3",
        "model_call_id": call_id,
        "prompt_token_ids": [1],
        "generation_token_ids": [2],
        "generation_log_probs": [-0.5],
        "output_items": output,
        "digest": "d" * 64,
        "cum_len": 2,
    }
    return stamp_continuation(TokenEntry(**{**fields, **given}), request)


def user(text: Any) -> Item:
    return {"role": "user", "content": text}


def assistant(content: Any, **more: Any) -> Item:
    return {"role": "assistant", "content": content, **more}


def chat_call(args: Any, name: str = "f", call_id: str = "1") -> Item:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": args}}


RESOLVED = ParentDecision("c1")
NO_MATCH = ParentDecision(None, "no_match")
AMBIGUOUS = ParentDecision(None, "ambiguous")


@pytest.mark.parametrize("dialect", DIALECTS)
@given(conversation=conversations, following=texts)
@settings(max_examples=40, deadline=None)
def test_a_faithful_continuation_resolves(dialect: Any, conversation: list[Turn], following: str) -> None:
    """A request that repeats context and output and adds to them continues the call, in every dialect."""
    request, output, results = split(dialect, conversation)
    parent = entry("c1", request, output)
    continued = [*copy.deepcopy(request + output + results), user(following)]
    assert MATCHER.decide([parent], continued) == RESOLVED


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of everything in request items that shapes the prompt."""
    if isinstance(value, dict):
        ignored = {"type", "id", "status", "annotations", "cache_control", "signature", "thinking", "summary"}
        return [leaf for key in value if key not in ignored for leaf in leaves(value[key], (*path, key))]
    if isinstance(value, list):
        return [leaf for index, inner in enumerate(value) for leaf in leaves(inner, (*path, index))]
    return [path] if value not in (None, "") else []


def changed(items: list[Item], path: tuple[Any, ...]) -> list[Item]:
    """Return a copy with the leaf at ``path`` changed; JSON text is changed inside."""
    items = copy.deepcopy(items)
    holder: Any = items
    for step in path[:-1]:
        holder = holder[step]
    last, value = path[-1], holder[path[-1]]
    if last == "arguments":
        holder[last] = json.dumps({**json.loads(value), "another": 1})
    elif isinstance(value, str):
        holder[last] = value + "'"
    else:
        holder[last] = "other" if isinstance(value, bool) else value + 1 if value + 1 != value else 0
    return items


@pytest.mark.parametrize("dialect", DIALECTS)
@given(conversation=conversations, data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_change_to_what_was_said_before_does_not_resolve(
    dialect: Any, conversation: list[Turn], data: st.DataObject
) -> None:
    """One changed text, role, tool result, call id, name or argument anywhere before makes it no continuation."""
    request, output, results = split(dialect, conversation)
    parent = entry("c1", request, output)
    path = data.draw(st.sampled_from(leaves(request + output)))
    tampered = changed(request + output, path)
    assert MATCHER.decide([parent], tampered + results) == NO_MATCH


@pytest.mark.parametrize("dialect", DIALECTS)
@given(conversation=st.lists(turns, min_size=2, max_size=3), data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_reordered_or_shortened_context_does_not_resolve(
    dialect: Any, conversation: list[Turn], data: st.DataObject
) -> None:
    """Swapping two items that differ, dropping one or putting one in between breaks the continuation."""
    request, output, _ = split(dialect, conversation)
    parent = entry("c1", request, output)
    first = data.draw(st.integers(0, len(request) - 2))
    swapped = list(request)
    swapped[first], swapped[first + 1] = swapped[first + 1], swapped[first]
    if context_digest(swapped) != context_digest(request):
        assert MATCHER.decide([parent], swapped + output) == NO_MATCH
    assert MATCHER.decide([parent], request[:first] + request[first + 1 :] + output) == NO_MATCH
    assert MATCHER.decide([parent], [*request[:first], user("more"), *request[first:], *output]) == NO_MATCH


def test_swapped_items_have_another_context() -> None:
    """The order of context items counts, also when the model wrote none of them."""
    assert context_digest([user("a"), user("b")]) != context_digest([user("b"), user("a")])


@given(conversation=conversations)
@settings(max_examples=60, deadline=None)
def test_one_conversation_has_one_fingerprint_in_every_dialect(conversation: list[Turn]) -> None:
    """Chat, Responses and Anthropic spell the same model-authored history the same."""
    prints = set()
    for dialect in DIALECTS:
        request, output, results = split(dialect, conversation)
        prints.add(MATCHER.fingerprint(request + output + results))
    assert len(prints) == 1
    assert prints != {""}


@given(args=arguments, indent=st.integers(0, 3), ascii_only=st.booleans())
@settings(max_examples=60, deadline=None)
def test_arguments_written_anew_still_match(args: dict[str, Any], indent: int, ascii_only: bool) -> None:
    """Key order, spacing and escapes of tool arguments do not count, in the output and in the context."""
    backwards = dict(reversed(list(args.items())))
    anew = json.dumps(backwards, indent=indent, ensure_ascii=ascii_only)
    was = [user("q"), assistant(None, tool_calls=[chat_call(json.dumps(args, separators=(",", ":")))])]
    echoed = [user("q"), assistant("", tool_calls=[chat_call(anew)])]
    assert MATCHER.decide([entry("c1", was[:1], was[1:])], echoed) == RESOLVED
    assert MATCHER.decide([entry("c1", was, [assistant("a")])], [*echoed, assistant("a")]) == RESOLVED


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1}', '{"a": 2}'),
        ('{"a": 1}', '{"a": "1"}'),
        ('{"a": 1}', '{"a": true}'),
        ('{"a": 1}', '{"a": 1.0}'),
        ('{"a": null}', "{}"),
        ('{"a": [1, 2]}', '{"a": [2, 1]}'),
        ('{"a": [[1], 2]}', '{"a": [[1, 2]]}'),
        ('{"a": {"b": 1}}', '{"a": {}, "b": 1}'),
        ("{}", ""),
        ("{broken", "{broken "),
        ("word", '"word"'),
        ('{"a": 1, "a": 2}', '{"a": 2}'),
        ('{"a": NaN}', '{"a": null}'),
        ('{"a": Infinity}', '{"a": -Infinity}'),
        ('{"a": 0.0}', '{"a": -0.0}'),
        (f'{{"a": {2**70}}}', f'{{"a": {2**70 + 1}}}'),
        ('{"a": -1}', '{"a": 255}'),
        ("[" * 100_000, "[" * 100_001),
    ],
)
def test_arguments_of_another_value_differ(one: str, other: str) -> None:
    """Arguments count by their JSON value and its type; text that is no JSON counts to the letter."""
    prints = [MATCHER.fingerprint([assistant(None, tool_calls=[chat_call(args)])]) for args in (one, other)]
    assert prints[0] != prints[1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([assistant("ab")], [assistant(["a", "b"])]),
        ([assistant(["a", "bc"])], [assistant(["ab", "c"])]),
        ([assistant("a"), assistant("bc")], [assistant("ab"), assistant("c")]),
        ([assistant(None, tool_calls=[chat_call("x", "fg")])], [assistant(None, tool_calls=[chat_call("gx", "f")])]),
        (
            [assistant(None, tool_calls=[chat_call("", "f", "12")])],
            [assistant(None, tool_calls=[chat_call("", "2f", "1")])],
        ),
        ([assistant("call")], [assistant(None, tool_calls=[chat_call("", "call", "")])]),
        ([assistant('["text","a"]')], [assistant("a")]),
        ([assistant(None, refusal="no")], [assistant("no")]),
        ([assistant([{"type": "image", "url": "a"}])], [assistant([{"type": "image", "url": "b"}])]),
        ([assistant([{"type": "image", "url": "a"}])], [assistant([{"type": "audio", "url": "a"}])]),
        ([assistant([{"type": "x", "a": "b", "c": ""}])], [assistant([{"type": "x", "a": "", "c": "b"}])]),
        ([assistant([{"type": "x", "a": ["b"]}])], [assistant([{"type": "x", "a": [["b"]]}])]),
        ([assistant("\ud83d\ude00")], [assistant("\U0001f600")]),
        ([assistant("\ud800")], [assistant("\ud801")]),
        ([assistant("é")], [assistant("e\u0301")]),
        ([assistant("a"), assistant("b")], [assistant("b"), assistant("a")]),
        (
            [assistant(None, tool_calls=[chat_call("1"), chat_call("2")])],
            [assistant(None, tool_calls=[chat_call("2"), chat_call("1")])],
        ),
        ([{"type": "web_search_call", "action": "a"}], [{"type": "web_search_call", "action": "b"}]),
        (
            [{"type": "custom_tool_call", "call_id": "1", "name": "f", "input": '{"a":1}'}],
            [{"type": "custom_tool_call", "call_id": "1", "name": "f", "input": '{"a": 1}'}],
        ),
    ],
)
def test_moving_text_across_a_boundary_changes_both_hashes(one: list[Item], other: list[Item]) -> None:
    """No text can pass for a neighbouring field, part, item or kind of item."""
    assert MATCHER.fingerprint(one) != MATCHER.fingerprint(other)
    assert context_digest(one) != context_digest(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([user("a")], [{"role": "system", "content": "a"}]),
        ([user("a"), user("b")], [user(["a", "b"])]),
        ([user("a")], [user("a"), user("")]),
        ([{"role": "user", "name": "x", "content": "a"}], [user("a")]),
        ([{"role": "tool", "content": "a"}], [{"role": "tool", "tool_call_id": "a", "content": ""}]),
        ([{"role": "tool", "content": "a"}], [user("a")]),
        (
            [{"type": "function_call_output", "call_id": "1", "output": "a"}],
            [{"type": "function_call_output", "call_id": "1", "output": "b"}],
        ),
        (
            [{"type": "function_call_output", "call_id": "1", "output": {"a": [1]}}],
            [{"type": "function_call_output", "call_id": "1", "output": {"a": [2]}}],
        ),
        (
            [user([{"type": "tool_result", "tool_use_id": "1", "content": [{"free": 1}]}])],
            [user([{"type": "tool_result", "tool_use_id": "1", "content": [{"free": 2}]}])],
        ),
        (
            [user([{"type": "tool_result", "tool_use_id": "1", "content": "a"}])],
            [user([{"type": "tool_result", "tool_use_id": "1", "content": "a", "is_error": True}])],
        ),
        ([{"type": "item_reference", "target": "a"}], [{"type": "item_reference", "target": "b"}]),
        ([{"type": "reasoning", "summary": []}], []),
        ([assistant("a")], [assistant("a"), assistant("")]),
    ],
)
def test_whatever_shapes_the_prompt_is_in_the_context(one: list[Item], other: list[Item]) -> None:
    """Roles, names, tool results of any shape, their errors and the number of items all count."""
    assert context_digest(one) != context_digest(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (user("a"), user([{"type": "text", "text": "a"}])),
        (user("a"), user([{"type": "input_text", "text": "a", "cache_control": {"type": "ephemeral"}}])),
        (user("a"), {"type": "message", "id": "m1", "status": "completed", **user("a")}),
        (assistant(None), assistant("")),
        (assistant("a"), assistant("a", tool_calls=None, refusal=None)),
        (assistant("a", reasoning_content="hm"), assistant("a")),
        ({"type": "reasoning", "summary": ["hm"], "encrypted_content": "x"}, {"type": "reasoning", "summary": []}),
        (assistant([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}]), assistant("a")),
        (
            {"type": "function_call", "call_id": "1", "namespace": "n", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "1", "name": "n__f", "arguments": " { } "},
        ),
        (
            {"type": "web_search_call", "id": "w1", "status": "completed", "action": "a"},
            {"type": "web_search_call", "action": "a"},
        ),
        (
            user([{"type": "image", "url": "a", "cache_control": {"type": "ephemeral"}}]),
            user([{"url": "a", "type": "image"}]),
        ),
    ],
)
def test_what_a_harness_may_rewrite_does_not_count(one: Item, other: Item) -> None:
    """Text as a string or as blocks, ids of items, statuses, cache marks and reasoning leave no trace."""
    assert context_digest([one]) == context_digest([other])
    assert MATCHER.fingerprint([assistant("x"), one]) == MATCHER.fingerprint([assistant("x"), other])


def test_parallel_calls_may_come_back_between_their_results() -> None:
    """A harness that echoes each Responses call beside its result still continues the call."""
    calls = [{"type": "function_call", "call_id": str(n), "name": "f", "arguments": "{}"} for n in range(2)]
    results = [{"type": "function_call_output", "call_id": str(n), "output": "r"} for n in range(2)]
    parent = entry("c1", [user("q")], calls)
    interleaved = [user("q"), calls[0], results[0], calls[1], results[1]]
    assert MATCHER.decide([parent], interleaved) == RESOLVED


@pytest.mark.parametrize(
    "request_items",
    [
        [],
        [user("q")],
        [{"role": "system", "content": "s"}, user("q"), {"role": "tool", "content": "r"}],
        [user("q"), {"type": "reasoning", "summary": []}],
        [{"type": "function_call_output", "call_id": "1", "output": "r"}],
    ],
)
def test_a_request_without_model_authored_items_is_a_root(request_items: list[Item]) -> None:
    """The empty fingerprint means root, and no candidate is ever a root's parent."""
    assert MATCHER.fingerprint(request_items) == ""
    unstamped = entry("c1", request_items, [], continuation_fingerprint="")
    assert unstamped.continuation_fingerprint == ""
    assert MATCHER.decide([unstamped], request_items) == NO_MATCH


@pytest.mark.parametrize(
    "item",
    [
        assistant(None),
        assistant([{"type": "thinking", "thinking": "hm"}]),
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": ""},
        {"type": "web_search_call", "action": "a"},
        {"type": "custom_tool_call", "call_id": "1", "name": "f", "input": "x"},
    ],
)
def test_anything_the_model_wrote_makes_the_request_no_root(item: Item) -> None:
    """An empty message or a roleless call is history too: taking it for a root would cut the chain."""
    assert MATCHER.fingerprint([user("q"), item]) != ""


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("text", "it is a str"),
        (None, "it is a NoneType"),
        ({"role": "user", "content": 7}, "content is a int"),
        ({"role": "user", "content": {"text": "a"}}, "content is a dict"),
        ({"role": "user", "content": [{"image": "a"}]}, "block 0 has no type"),
        ({"role": "user", "content": ["a", 7]}, "block 1 is a int"),
        ({"role": "user", "content": [{"type": ["text"], "text": "a"}]}, "type of content block 0"),
        ({"type": ["message"], "role": "user", "content": "a"}, "type is a list"),
        ({"role": "assistant", "content": "a", "tool_calls": "f"}, "tool_calls is a str"),
        ({"role": "assistant", "content": "a", "tool_calls": ["f"]}, "tool calls is not an object"),
        ({"role": "assistant", "content": "a", "tool_calls": [{"function": "f"}]}, "tool calls is not an object"),
        ({"role": "assistant", "content": [{"type": "x", "data": b"a"}]}, "holds a bytes"),
        ({"role": "assistant", "content": [{"type": "x", "data": {0: 1}}]}, "key of type int"),
    ],
)
def test_what_cannot_be_represented_is_refused_with_its_index(bad: Any, says: str) -> None:
    """The error names request or output item and what is wrong with it, and a stamp writes nothing."""
    good = [user("q"), assistant("a")]
    with pytest.raises(UnrepresentableHistoryError, match="request item 2 ") as caught:
        MATCHER.fingerprint([*good, bad])
    assert says in str(caught.value)
    with pytest.raises(UnrepresentableHistoryError, match="request item 2 "):
        MATCHER.decide([entry("c1", good[:1], good[1:])], [*good, bad])
    untouched = TokenEntry(
        rollout_id="7-3", model_call_id="c1", prompt_token_ids=[], generation_token_ids=[], generation_log_probs=[]
    )
    before = untouched.model_dump()
    with pytest.raises(UnrepresentableHistoryError, match="request item 0 "):
        stamp_continuation(untouched, [bad])
    assert untouched.model_dump() == before
    untouched.output_items = [assistant("a"), bad]
    with pytest.raises(UnrepresentableHistoryError, match="output item 1 "):
        stamp_continuation(untouched, good)


def test_nesting_has_no_limit() -> None:
    """Content nested deeper than the interpreter's stack is hashed like any other."""
    deep: Any = "end"
    for _ in range(50_000):
        deep = [deep]
    assert len(MATCHER.fingerprint([assistant([{"type": "x", "data": deep}])])) == 64


def test_the_stamp_is_what_the_contract_says() -> None:
    """A stamp holds the fingerprint of request and output, the number of request items and their digest."""
    request, output = [user("q"), assistant("a"), user("q2")], [assistant("a2")]
    stamped = entry("c1", request, output)
    assert stamped.continuation_fingerprint == MATCHER.fingerprint(request + output)
    assert stamped.continuation_context_len == 3
    assert stamped.continuation_context_digest == context_digest(request)
    assert stamped.fingerprint_version == FINGERPRINT_VERSION == 1_000_001


def test_stored_stamps_stay_valid() -> None:
    """The hashes of a fixed conversation never change while the version stays."""
    request = [user("q"), assistant("a", tool_calls=[chat_call('{"x": [1, 2.5, null, true]}')])]
    assert MATCHER.fingerprint(request) == "6411415d477fb4d54a3105cc67fc9699c39ce42fe047b44d5e01b54614628508"
    assert context_digest(request) == "485e72825542205be76cdb4ba0ae391f06766c3f400df3772e8d3018a249aca7"


REQUEST, OUTPUT = [user("q")], [assistant("a")]
CONTINUED = [*REQUEST, *OUTPUT, user("more")]


@pytest.mark.parametrize(
    "broken",
    [
        {"continuation_context_digest": ""},
        {"continuation_context_digest": "0" * 64},
        {"continuation_fingerprint": ""},
        {"continuation_fingerprint": "0" * 64},
        {"fingerprint_version": None},
        {"fingerprint_version": 2},
        {"continuation_context_len": 4},
        {"continuation_context_len": -2},
    ],
)
def test_an_unproved_candidate_is_none(broken: dict[str, Any]) -> None:
    """A missing, foreign or longer stamp makes an entry invisible, also beside a good one."""
    hidden = entry("c0", REQUEST, OUTPUT)
    for name, value in broken.items():
        setattr(hidden, name, value)
    assert MATCHER.decide([hidden], CONTINUED) == NO_MATCH
    assert MATCHER.decide([hidden, entry("c1", REQUEST, OUTPUT)], CONTINUED) == RESOLVED


def test_no_candidates_is_no_match() -> None:
    """History that nobody recorded is unresolved and not a root."""
    assert MATCHER.decide([], CONTINUED) == NO_MATCH


def test_interchangeable_candidates_resolve_to_the_smallest_call_id() -> None:
    """Calls with the same tokens stand for each other, in whatever order they are listed."""
    twins = [entry(call_id, REQUEST, OUTPUT) for call_id in ("c3", "c1", "c2")]
    assert MATCHER.decide(twins, CONTINUED) == RESOLVED
    assert MATCHER.decide(twins[::-1], CONTINUED) == RESOLVED


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"digest": "d" * 64}, {"digest": "e" * 64}),
        ({"cum_len": 2}, {"cum_len": 3}),
        ({"digest": None}, {"digest": None}),
        ({"digest": ""}, {"digest": ""}),
    ],
)
def test_candidates_with_other_or_unknown_tokens_are_ambiguous(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Two calls that may differ in tokens are never guessed between."""
    candidates = [entry("c1", REQUEST, OUTPUT, **one), entry("c2", REQUEST, OUTPUT, **other)]
    assert MATCHER.decide(candidates, CONTINUED) == AMBIGUOUS


def test_a_single_candidate_needs_no_digest() -> None:
    """Where there is nothing to confuse it with, an entry without lineage digest is a parent."""
    assert MATCHER.decide([entry("c1", REQUEST, OUTPUT, digest=None)], CONTINUED) == RESOLVED


def test_a_call_id_with_two_payloads_counts_as_none() -> None:
    """Conflicting stamps of one call exclude the call, and identical copies of it count once."""
    good, rival = entry("c1", REQUEST, OUTPUT), entry("c1", REQUEST, OUTPUT, digest="e" * 64)
    elsewhere = entry("c1", [user("other")], OUTPUT)
    assert MATCHER.decide([good, good], CONTINUED) == RESOLVED
    assert MATCHER.decide([good, rival], CONTINUED) == NO_MATCH
    assert MATCHER.decide([good, elsewhere], CONTINUED) == NO_MATCH
    assert MATCHER.decide([elsewhere, good], CONTINUED) == NO_MATCH
    assert MATCHER.decide([good, rival, entry("c2", REQUEST, OUTPUT)], CONTINUED) == ParentDecision("c2")


def test_the_same_output_after_another_context_is_told_apart() -> None:
    """Of two calls with one output, the one whose request is repeated is the parent."""
    other = entry("c0", [user("p")], OUTPUT, digest="e" * 64)
    assert MATCHER.decide([other, entry("c1", REQUEST, OUTPUT)], CONTINUED) == RESOLVED
