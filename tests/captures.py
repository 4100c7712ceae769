"""What tests of the endpoints share: a record, its lineage, and settings for a store.

The rule of this module: plain makers without expectations; what must hold is said in the tests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fakes3 import FakeS3

from s3capture import S3TokenSink
from s3capture.errors import StoreUnavailableError
from s3capture.matching import stamp_continuation
from s3capture.records import ParentResolutionStatus, TokenEntry, stamp_lineage

ROLLOUT = "7-3"
QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris?"}]


def entry(call: str = "c1", rollout: str = ROLLOUT, **more: Any) -> TokenEntry:
    """A small valid record without lineage; ``more`` are fields of ``TokenEntry``."""
    fields: dict[str, Any] = {
        "prompt_token_ids": [1, 2, 3],
        "generation_token_ids": [4, 5],
        "generation_log_probs": [-0.25, -0.5],
        "created_at": 1_700_000_000.0,
        **more,
    }
    return TokenEntry(rollout_id=rollout, model_call_id=call, **fields)


def said(text: str) -> dict[str, Any]:
    """One output item of the model."""
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def answered(
    call: str,
    request: Sequence[dict[str, Any]] = QUESTION,
    text: str = "It is sunny.",
    *,
    rollout: str = ROLLOUT,
    prompt: Sequence[int] = (1, 2, 3),
    generation: Sequence[int] = (4, 5),
    parent: TokenEntry | None = None,
    before: Sequence[int] | None = None,
    **more: Any,
) -> TokenEntry:
    """A record stamped so that a continuation of ``request`` + ``text`` finds it.

    With ``before`` (the cumulative tokens of ``parent``) it is a delta whose suffix is ``prompt``.
    """
    delta = before is not None
    made = entry(
        call,
        rollout,
        prompt_token_ids=list(prompt),
        generation_token_ids=list(generation),
        generation_log_probs=[-0.1] * len(generation),
        output_items=[said(text)],
        token_item_index=0,
        **more,
    )
    if parent is not None:
        made.parent_call_id, made.parent_resolution = parent.model_call_id, ParentResolutionStatus.RESOLVED
    made.prompt_is_delta = delta
    stamp_continuation(made, list(request))
    return stamp_lineage(
        made,
        made.parent_call_id,
        parent_resolution=made.parent_resolution or ParentResolutionStatus.ROOT,
        cumulative=[*(before or ()), *prompt, *generation],
    )


def continued(request: Sequence[dict[str, Any]] = QUESTION, text: str = "It is sunny.") -> list[dict[str, Any]]:
    """The request of a harness that goes on after ``text``."""
    return [*request, said(text), {"role": "user", "content": f"And after {text!r}?"}]


def on_fake(s3: FakeS3, spill: Path, **more: Any) -> dict[str, Any]:
    """Settings of an endpoint on a scripted server, with waits short enough for tests."""
    return {
        "url": f"s3://{s3.bucket}/p",
        "run": "r",
        "endpoint_url": s3.endpoint_url,
        "region": "us-east-1",
        "addressing_style": "path",
        "spill_dir": str(spill),
        "read_timeout_s": 1.0,
        "op_timeout_s": 20.0,
        **more,
    }


async def warm_up(sink: S3TokenSink) -> None:
    """Put call ``c0`` however long the first use takes: what comes after it is judged by a short timeout."""
    for _ in range(100):
        with contextlib.suppress(StoreUnavailableError):
            await sink.put(entry("c0"))
            return
    raise AssertionError("the server of the test does not answer")


def captures(keys: Sequence[str]) -> list[str]:
    """The keys that are not the scratch keys of the check at first use."""
    return sorted(key for key in keys if "/probe/" not in key)
