"""Ask the very bucket whether create-if-absent holds there, before anything rests on it.

The rule of this module: one scratch key, created twice. A store that takes the second create, or shows its body,
would let two writers both believe they were first. It cannot catch a store that is wrong only under
contention; ``s3capture doctor`` races for that.
"""

from __future__ import annotations

from s3capture import codec
from s3capture.effects import Create, Delete, Exists, Get, Steps
from s3capture.keys import RunKeys
from s3capture.protocol.steps import found


def probe(keys: RunKeys, nonce: str) -> Steps[bool]:
    """Return whether the store honours create-if-absent; the scratch key is removed where that is allowed."""
    key = keys.probe(nonce)
    first, second = (codec.encode("probe", {"run": keys.run}, codec.canonical(n)) for n in (1, 2))
    yield (Create(key, first),)
    (again,) = yield (Create(key, second),)
    (answer,) = yield (Get(key),)
    yield (Delete((key,)),)
    return isinstance(again, Exists) and found(answer) == first
