"""docs/layout.md says what the key module does."""

from __future__ import annotations

import re
from pathlib import Path

from s3capture import codec
from s3capture.keys import Kind, PackName, RunKeys, parse, shard
from s3capture.protocol.bodies import SEAL_LIMIT

PAGE = (Path(__file__).parent.parent / "docs" / "layout.md").read_text("utf-8")
NAMES = {
    "CALL": "9f2c4e1ab0d34c7d8e5f60718293a4b5",
    "DIGEST": "ab" * 32,
    "FINGERPRINT": "cd" * 32,
    "NONCE": "0b" * 16,
    "FIRST": "00" * 8,
    "LAST": "ff" * 8,
}


def _keys_of_the_page() -> list[str]:
    found = re.findall(r"^captures/\S+", PAGE, re.MULTILINE)
    return [re.sub("|".join(NAMES), lambda m: NAMES[m[0]], key) for key in found]


def test_every_key_of_the_page_is_one_that_the_module_builds() -> None:
    """The keys of the page are exactly what the builders give for the same ids."""
    rollout = RunKeys("captures", "run-7").rollout("7-3-a1")
    ledger = rollout.of.ledger("7-3-a1")
    archive, name = rollout.of.archive, PackName(NAMES["FIRST"], NAMES["LAST"], NAMES["DIGEST"])
    call, digest, fingerprint, nonce = NAMES["CALL"], NAMES["DIGEST"], NAMES["FINGERPRINT"], NAMES["NONCE"]
    assert _keys_of_the_page() == [
        rollout.intent(call),
        rollout.call(call),
        rollout.conflict(call, digest),
        rollout.mark(nonce),
        rollout.closing,
        rollout.frozen,
        rollout.retiring(13),
        rollout.drop(13),
        rollout.retired,
        rollout.lineage_call(fingerprint, call),
        rollout.lineage_conflict(fingerprint, call),
        ledger.intent(call),
        ledger.call(call),
        ledger.failure(call, digest),
        ledger.closing,
        ledger.closed,
        ledger.retired,
        ledger.lineage_call(fingerprint, call),
        rollout.of.probe(nonce),
        archive.pack(name),
        archive.index(name),
        archive.done(name, nonce),
        archive.deleted("7-3-a1", digest),
    ]


def test_the_page_shows_every_kind_of_key() -> None:
    """Each kind of key that is written today stands on the page; kinds of later formats would have to be added."""
    shown = {found.kind for key in _keys_of_the_page() if (found := parse("captures/run-7/", key))}
    assert shown == set(Kind)


def test_the_numbers_of_the_page_are_those_of_the_code() -> None:
    """Shard, format version, nesting and seal bound are quoted as they are."""
    assert f"`{shard('7-3-a1')}` is its shard" in PAGE
    assert f"format version, {codec.FORMAT}." in PAGE
    assert f"more than {codec.MAX_DEPTH} levels" in PAGE
    assert f"A seal is at most {SEAL_LIMIT:,} bytes" in PAGE
