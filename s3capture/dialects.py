"""One conversation, three dialects: what an item says, spelled out as events that all dialects share.

The rule of this module: Chat, Responses and Anthropic items that say the same become the same events, and
items that say something else do not. An event is a list of plain JSON values that begins with its kind:
``text``, ``refusal``, ``call``, ``result``, ``block`` (content of another type, whole) or ``item`` (a Responses
item of another type, whole). The hashes of ``matching`` are built from these events: change one, and
``matching.FINGERPRINT_VERSION`` must change too.

What does not shape the prompt is left out (ids of items, statuses, annotations, cache marks), and so is
reasoning in every form, because a harness need not echo it (contract.md, "Lineage").
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

Event: TypeAlias = list[Any]

_TEXT_BLOCKS = frozenset({"text", "input_text", "output_text"})
_REASONING_BLOCKS = frozenset({"thinking", "redacted_thinking", "reasoning", "reasoning_text"})
_RESULT_ITEMS = frozenset({"function_call_output", "custom_tool_call_output"})
_UNSTABLE_KEYS = frozenset({"id", "status", "cache_control"})


class Unrepresentable(Exception):
    """An item cannot be spelled out; whoever knows its index turns this into the public error."""


def is_model_authored(item: Mapping[str, Any]) -> bool:
    """Whether the model wrote this item: assistant messages and tool calls, but never reasoning."""
    kind = item.get("type")
    if kind == "reasoning":
        return False
    # Responses tool calls carry no role, and every type of them ends alike (function_call, mcp_call, ...).
    return item.get("role") == "assistant" or (isinstance(kind, str) and kind.endswith("_call"))


def context_event(item: dict[str, Any]) -> Event:
    """Return one item with its place: who speaks, under which name, and the events of what is said."""
    events = list(item_events(item))
    if role := item.get("role"):
        # The role makes the type redundant: "message" may be there or not.
        return ["role", role, item.get("name"), events]
    return ["type", item.get("type"), None, events]


def item_events(item: object) -> Iterator[Event]:
    """Spell out one item: texts, blocks, tool calls and tool results, in the order they stand.

    Raises ``Unrepresentable`` for what is no item, or has content that is no text and no list of typed blocks.
    """
    if not isinstance(item, dict):
        raise Unrepresentable(f"it is a {type(item).__name__}, not an object")
    kind, role = item.get("type"), item.get("role")
    if kind is not None and not isinstance(kind, str):
        raise Unrepresentable(f"its type is a {type(kind).__name__}, not a string")
    call_id = item.get("call_id") or item.get("id") or ""
    if kind == "function_call":
        name = item.get("name") or ""
        if item.get("namespace"):
            # Gym's server joins the two when it echoes a call that was streamed with them apart.
            name = f"{item['namespace']}__{name}"
        yield ["call", call_id, name, canonical_arguments(item.get("arguments"))]
    elif kind == "custom_tool_call":
        yield ["call", call_id, item.get("name") or "", ["verbatim", item.get("input")]]
    elif kind in _RESULT_ITEMS:
        yield ["result", call_id, _result(item.get("output")), False]
    elif kind == "reasoning":
        return
    elif not role and kind not in (None, "message"):
        yield ["item", {key: value for key, value in item.items() if key not in _UNSTABLE_KEYS}]
    else:
        yield from _message_events(item, is_result=role in ("tool", "function"))


def canonical_arguments(value: object) -> Event:
    """Return a tool call's arguments as an event that survives re-serialisation.

    JSON text and the value that it spells are the same; key order and spacing do not count. Text that is no
    JSON, or names a key twice, stands for itself to the letter. None and blank text are no arguments.
    """
    if value is None:
        return ["none"]
    if not isinstance(value, str):
        return ["json", value]
    if not value.strip():
        return ["none"]
    try:
        return ["json", json.loads(value, object_pairs_hook=_distinct_keys)]
    except (ValueError, RecursionError):
        return ["text", value]


def _message_events(message: dict[str, Any], *, is_result: bool) -> Iterator[Event]:
    events = list(_content_events(message.get("content")))
    if is_result:
        yield ["result", message.get("tool_call_id") or "", events, False]
    else:
        yield from events
    if message.get("refusal"):
        yield ["refusal", message["refusal"]]
    calls = message.get("tool_calls") or []
    if not isinstance(calls, (list, tuple)):
        raise Unrepresentable(f"its tool_calls is a {type(calls).__name__}, not a list")
    for call in calls:
        yield _chat_call(call)
    if message.get("function_call"):
        yield _chat_call({"function": message["function_call"]})


def _chat_call(call: object) -> Event:
    function = (call.get("function") or call.get("custom") or {}) if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise Unrepresentable("one of its tool calls is not an object")
    arguments = canonical_arguments(function.get("arguments"))
    if not call.get("function") and call.get("custom"):
        arguments = ["verbatim", function.get("input")]
    return ["call", call.get("id") or "", function.get("name") or "", arguments]


def _content_events(content: object) -> Iterator[Event]:
    if content is None:
        return
    if isinstance(content, str):
        content = [content]
    if not isinstance(content, (list, tuple)):
        raise Unrepresentable(f"its content is a {type(content).__name__}, not text or a list of blocks")
    for position, block in enumerate(content):
        event = _block_event(block, position)
        # An empty text adds nothing to the prompt, and dialects differ in whether they send it.
        if event is not None and event != ["text", ""]:
            yield event


def _block_event(block: object, position: int) -> Event | None:
    """Return the event of one content block; None for reasoning, which leaves no trace."""
    if isinstance(block, str):
        return ["text", block]
    if not isinstance(block, dict):
        raise Unrepresentable(f"content block {position} is a {type(block).__name__}")
    kind, text = block.get("type") or "text", block.get("text")
    if not isinstance(kind, str):
        raise Unrepresentable(f"the type of content block {position} is a {type(kind).__name__}, not a string")
    if isinstance(text, str) and kind in _TEXT_BLOCKS:
        return ["text", text]
    if not block.get("type"):
        raise Unrepresentable(f"content block {position} has no type")
    if kind == "tool_use":
        return ["call", block.get("id") or "", block.get("name") or "", canonical_arguments(block.get("input"))]
    if kind == "tool_result":
        call_id = block.get("tool_use_id") or block.get("id") or ""
        return ["result", call_id, _result(block.get("content")), bool(block.get("is_error"))]
    if kind == "refusal":
        return ["refusal", block.get("refusal")]
    if kind in _REASONING_BLOCKS:
        return None
    return ["block", {key: value for key, value in block.items() if key != "cache_control"}]


def _result(output: object) -> list[Any]:
    """Return a tool's output as events when it reads as content, else whole: tools may answer anything."""
    try:
        return list(_content_events(output))
    except Unrepresentable:
        return [["json", output]]


def _distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keyed = dict(pairs)
    if len(keyed) != len(pairs):
        raise ValueError("an object names a key twice")
    return keyed
