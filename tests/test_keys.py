"""Every key is built and parsed back, no two ids share one, and the limits of real stores are kept."""

from __future__ import annotations

import hashlib
import unicodedata
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from s3capture.ids import MAX_PREFIX, MAX_ROLLOUT_ID, MAX_RUN, validate_prefix, validate_rollout_id, validate_run
from s3capture.keys import (
    Kind,
    LedgerKeys,
    PackName,
    ParsedKey,
    RolloutKeys,
    RunKeys,
    escape,
    parse,
    position,
    run_folder,
    shard,
    unescape,
)

HEX = hashlib.sha256(b"").hexdigest()
NAME_ALPHABET = "ABab01._-"

# Whatever a string can hold: lone surrogates, separators, what looks like an escape, and very long tails.
texts = st.one_of(
    st.text(st.characters(exclude_categories=()), max_size=30),
    st.text(st.sampled_from("/!~.-_%2Ee\u0301é😀\ud800\x00 \\"), max_size=12),
    st.builds(
        lambda head, size, tail: head + "x" * size + tail,
        st.text("ab/😀", max_size=3),
        st.integers(90, 400),
        st.text("ab", max_size=2),
    ),
)
names = st.text(NAME_ALPHABET, min_size=1, max_size=MAX_ROLLOUT_ID).filter(lambda name: name not in (".", ".."))
runs = st.text(NAME_ALPHABET, min_size=1, max_size=MAX_RUN).filter(lambda name: name not in (".", ".."))
prefixes = st.sampled_from(["", "p", "a/b=c/d+e"])
digests = st.binary(max_size=4).map(lambda raw: hashlib.sha256(raw).hexdigest())
versions = st.integers(0, 10**18 - 1)
rollouts = st.builds(lambda prefix, run, name: RunKeys(prefix, run).rollout(name), prefixes, runs, names)


def built(keys: RolloutKeys, call: str, other: str, digest: str, version: int) -> dict[str, ParsedKey]:
    """Every key that a rollout and its ledger can have, with what it must be parsed as."""
    rollout, segment, ledger = escape(keys.rollout_id), escape(call), LedgerKeys(keys.of, keys.rollout_id)
    fingerprint = keys.lineage(other).rstrip("/").rsplit("/", 1)[1]
    name = PackName(position(keys.rollout_id), "f" * 16, digest)
    return {
        keys.intent(call): ParsedKey(Kind.INTENT, rollout, segment),
        keys.call(call): ParsedKey(Kind.CALL, rollout, segment),
        keys.conflict(call, digest): ParsedKey(Kind.CONFLICT, rollout, segment, digest),
        keys.mark(other): ParsedKey(Kind.MARK, rollout, detail=escape(other)),
        keys.closing: ParsedKey(Kind.CLOSING, rollout),
        keys.frozen: ParsedKey(Kind.FROZEN, rollout),
        keys.retired: ParsedKey(Kind.RETIRED, rollout),
        keys.retiring(version): ParsedKey(Kind.RETIRING, rollout, detail=str(version)),
        keys.drop(version): ParsedKey(Kind.DROP, rollout, detail=str(version)),
        keys.lineage_call(other, call): ParsedKey(Kind.LINEAGE, rollout, segment, fingerprint),
        keys.lineage_conflict(other, call): ParsedKey(Kind.LINEAGE_CONFLICT, rollout, segment, fingerprint),
        ledger.intent(call): ParsedKey(Kind.LEDGER_INTENT, rollout, segment),
        ledger.call(call): ParsedKey(Kind.LEDGER_CALL, rollout, segment),
        ledger.failure(call, digest): ParsedKey(Kind.LEDGER_FAILURE, rollout, segment, digest),
        ledger.closing: ParsedKey(Kind.LEDGER_CLOSING, rollout),
        ledger.closed: ParsedKey(Kind.LEDGER_CLOSED, rollout),
        ledger.retired: ParsedKey(Kind.LEDGER_RETIRED, rollout),
        ledger.lineage_call(other, call): ParsedKey(Kind.LEDGER_LINEAGE, rollout, segment, fingerprint),
        keys.of.probe(other): ParsedKey(Kind.PROBE, detail=escape(other)),
        keys.of.archive.pack(name): ParsedKey(Kind.ARCHIVE_PACK, detail=str(name)),
        keys.of.archive.index(name): ParsedKey(Kind.ARCHIVE_INDEX, detail=str(name)),
        keys.of.archive.done(name, other): ParsedKey(Kind.ARCHIVE_DONE, detail=str(name)),
        keys.of.archive.deleted(keys.rollout_id, digest): ParsedKey(Kind.ARCHIVE_DELETED, rollout, detail=digest),
    }  # fmt: skip


@given(rollouts, texts, texts, digests, versions)
def test_every_key_is_parsed_as_what_it_was_built_for(
    keys: RolloutKeys, call: str, other: str, digest: str, version: int
) -> None:
    """``parse`` is the inverse of every builder, for any ids, and gives the rollout id back in full."""
    pairs = built(keys, call, other, digest, version)
    assert {key: parse(keys.of.root, key) for key in pairs} == pairs
    assert {parsed.rollout_id for parsed in pairs.values() if parsed.rollout} == {keys.rollout_id}


def test_every_kind_has_a_key() -> None:
    """The round trip above covers each kind of object."""
    kinds = {parsed.kind for parsed in built(RunKeys("p", "r").rollout("x"), "c", "f", HEX, 1).values()}
    assert kinds == set(Kind)


@given(rollouts, texts, texts, digests, versions)
def test_a_key_is_found_again_from_its_place_in_the_rollout(
    keys: RolloutKeys, call: str, other: str, digest: str, version: int
) -> None:
    """``at`` undoes ``place`` for every key of the rollout, and keys of its ledger and its run have no place in it."""
    for key, parsed in built(keys, call, other, digest, version).items():
        place = keys.place(key)
        if parsed.kind is Kind.PROBE or parsed.kind.startswith(("archive-", "ledger-")):
            assert place is None
        else:
            assert place is not None and keys.at(place) == key
            assert RunKeys("q", "other").rollout(keys.rollout_id).at(place) != key


@given(texts, texts, digests)
def test_a_pack_covers_the_positions_of_its_span_and_no_others(one: str, other: str, digest: str) -> None:
    """A rollout of the span, and each shard between its ends, is covered; what lies outside is not."""
    first, last = sorted((position(one), position(other)))
    name = PackName(first, last, digest)
    assert PackName.of(str(name)) == name
    assert name.covers(first, first) and name.covers(last, last) and name.covers(first[:2], first[:2])
    for number in range(256):
        hh = f"{number:02x}"
        assert name.covers(hh, hh) is (first[:2] <= hh <= last[:2])
    below, above = f"{int(first, 16) - 1:016x}", f"{int(last, 16) + 1:016x}"
    assert first == "0" * 16 or not name.covers(below, below)
    assert last == "f" * 16 or not name.covers(above, above)


@given(texts)
def test_an_id_comes_back_from_its_segment_or_was_shortened(text: str) -> None:
    """``unescape`` undoes ``escape`` exactly, and knows a shortened id by its form."""
    back = unescape(escape(text))
    assert back == text or (back is None and len(escape(text)) > 66)


@given(texts, texts)
def test_two_ids_never_share_a_segment(one: str, other: str) -> None:
    """Different ids have different segments, however alike they look."""
    assume(one != other)
    assert escape(one) != escape(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x" * 400 + "a", "x" * 400 + "b"),
        ("😀" * 100, "😀" * 101),
        ("AbC", "abc"),
        ("A" * 300, "a" * 300),
        (unicodedata.normalize("NFC", "é"), unicodedata.normalize("NFD", "é")),
        (unicodedata.normalize("NFC", "é" * 200), unicodedata.normalize("NFD", "é" * 200)),
        ("\ud83d\ude00", "😀"),
        ("a/b", "a!2Fb"),
        ("", "!-"),
        (".", "!2E"),
        ("a\x00", "a"),
        ("x" * 203, escape("x" * 203)),
    ],
)
def test_ids_that_look_alike_stay_apart(one: str, other: str) -> None:
    """Tails, case, Unicode forms, surrogates, and ids that spell another id's escape are all told apart."""
    assert escape(one) != escape(other)
    assert RunKeys("", "r").rollout("x").call(one) != RunKeys("", "r").rollout("x").call(other)


@pytest.mark.parametrize("size", [2, 198, 199, 200])
@pytest.mark.parametrize("first", [".", "-", "_", "A", "0"])
def test_a_valid_rollout_id_is_never_shortened(first: str, size: int) -> None:
    """The longest ids, also with a leading dot (which is escaped), are read back from their keys."""
    rollout_id = first + "a" * (size - 1)
    keys = RunKeys("", "r").rollout(validate_rollout_id(rollout_id))
    parsed = parse(keys.of.root, keys.closing)
    assert parsed is not None and parsed.rollout_id == rollout_id


@given(rollouts, texts, texts, texts)
def test_no_key_is_a_folder_of_another(keys: RolloutKeys, call: str, near: str, other: str) -> None:
    """No key followed by a slash begins another one: some servers would then lose one of the two."""
    made = [*built(keys, call, other, HEX, 1), *built(keys, call + near, other + "/x", HEX[::-1], 10)]
    assert not [(one, two) for one, two in product(made, made) if two.startswith(one + "/")]


@given(texts, texts)
def test_long_ids_keep_to_the_limits_of_real_stores(call: str, fingerprint: str) -> None:
    """At the limits of every name: a segment is under 240 bytes, a key under 900, all of it printable ASCII."""
    prefix, run = validate_prefix("p" * MAX_PREFIX), validate_run("." + "r" * (MAX_RUN - 1))
    keys = RunKeys(prefix, run).rollout(validate_rollout_id("." + "x" * (MAX_ROLLOUT_ID - 1)))
    for key in built(keys, call, fingerprint, HEX, 10**18 - 1):
        assert key.isascii() and key.isprintable()
        assert len(key) < 900
        rest = key.removeprefix(prefix)
        assert max(map(len, rest.split("/"))) < 240
        assert not {"", ".", ".."} & set(rest.removeprefix("/").split("/"))
        assert not any(segment.startswith(".") for segment in rest.split("/"))


@pytest.mark.parametrize("text", ["!" * 500, "x" * 202, "x" * 500, "😀" * 50])
def test_the_longest_ids_are_within_the_limits(text: str) -> None:
    """The limits hold for the ids that use them up."""
    keys = RunKeys("p" * MAX_PREFIX, "." + "r" * (MAX_RUN - 1)).rollout("." + "x" * (MAX_ROLLOUT_ID - 1))
    assert max(map(len, built(keys, text, text, HEX, 10**18 - 1))) < 900


@given(names, names)
def test_a_rollouts_prefix_matches_no_other_rollout(one: str, other: str) -> None:
    """Listing one rollout never shows another, also when one id begins the other."""
    assume(one != other)
    run = RunKeys("p", "run")
    for mine, theirs in ((run.rollout(one), run.rollout(other)), (run.ledger(one), run.ledger(other))):
        assert not theirs.intent("c").startswith(mine.base)
    assert not run.rollout(other).lineage_call("f", "c").startswith(run.rollout(one).lineage_base)


def test_a_1_does_not_match_a_10() -> None:
    """The rollout 'a-1' is not 'a-10', nor run 'r' run 'r2', nor fingerprint 'f' fingerprint 'f2'."""
    run = RunKeys("p", "r")
    assert not run.rollout("a-10").closing.startswith(run.rollout("a-1").base)
    assert not RunKeys("p", "r2").root.startswith(run.root)
    assert parse(run.root, RunKeys("p", "r2").rollout("a").closing) is None
    assert not run.rollout("a").lineage_call("f2", "c").startswith(run.rollout("a").lineage("f"))


def test_a_shard_is_the_head_of_a_hash() -> None:
    """The shard folder of an id is two hex digits that anybody can compute, and a whole run has at most 256."""
    keys = RunKeys("p", "r").rollout("7-3")
    assert shard("7-3") == hashlib.sha256(b"7-3").hexdigest()[:2]
    assert keys.base == f"p/r/attempts/{shard('7-3')}/7-3/"
    assert keys.base.startswith(keys.of.attempts_shard(shard("7-3")))
    assert keys.closing.startswith(keys.of.attempts)
    assert len({shard(str(number)) for number in range(5000)}) == 256


def test_an_empty_prefix_leaves_no_slash() -> None:
    """Without a prefix keys begin with the run."""
    assert RunKeys("", "r").root == "r/" and run_folder("") == ""
    assert RunKeys("a/b", "r").root == "a/b/r/" and run_folder("a/b") == "a/b/"


BASE = RunKeys("p", "r").rollout("7-3").base
LINEAGE = RunKeys("p", "r").rollout("7-3").lineage_base


@pytest.mark.parametrize(
    "key",
    [
        "",
        "p/r/",
        "q/r/probe/x",
        "p/r/probe/",
        "p/r/probe/a/b",
        "p/r/probe/a b",
        "p/r/archive/",
        "p/r/archive//x",
        "p/r/archive/one/two",
        "p/r/archive/pack/x.parquet",
        f"p/r/archive/pack/{'0' * 16}-{'f' * 16}-{'0' * 64}",
        f"p/r/archive/pack/{'f' * 16}-{'0' * 16}-{'0' * 64}.parquet",
        f"p/r/archive/done/{'0' * 16}-{'f' * 16}-{'0' * 64}",
        f"p/r/archive/deleted/00/7-3/{'0' * 64}",
        "p/r/attempts/00/7-3/fence/closing",
        BASE.replace("7-3", "7-4") + "fence/closing",
        BASE + "intent",
        BASE + "intent/",
        BASE + "intent/c/d",
        BASE + "intent/a b",
        BASE + "intent/a%20b",
        BASE + "intent/!2f",
        BASE + "intent/!41",
        BASE + "intent/!C3",
        BASE + "intent/.c",
        BASE + "intent/" + "x" * 203,
        BASE + "intent/x!~" + "0" * 63,
        BASE + "intent/x!~" + "G" * 64,
        BASE + "conflict/c",
        BASE + "conflict/c/" + "0" * 63,
        BASE + "conflict/c/" + "A" * 64,
        BASE + "fence/closed",
        BASE + "fence/drop-",
        BASE + "fence/drop-01",
        BASE + "fence/drop--1",
        BASE + "fence/drop-" + "1" * 19,
        BASE + "fence/retiring-1\n",
        BASE + "fence/retiring-\uff11",
        BASE + "other/c",
        BASE.rstrip("/"),
        LINEAGE + "f",
        LINEAGE + "f/",
        LINEAGE + "f/!conflict",
        LINEAGE + "f/c!conflict!conflict",
        LINEAGE + "f/c/d",
    ],
)
def test_a_foreign_key_is_none(key: str) -> None:
    """What this project never writes is not parsed as something, and never raises."""
    assert parse("p/r/", key) is None


@given(st.text(st.sampled_from("pr/attemps lineage!~-._0123456789abcdefé\n"), max_size=60))
def test_any_text_is_a_key_or_none(text: str) -> None:
    """Parsing never raises, and whatever it accepts has ids that can be escaped again."""
    parsed = parse("p/r/", "p/r/" + text)
    assert parsed is None or parsed.kind in Kind


@pytest.mark.parametrize("segment", ["", "a b", "é", "!", "!2", "!2f", "!zz", "!41", "!ED!A0", "a/b", ".a"])
def test_foreign_text_is_no_segment(segment: str) -> None:
    """``unescape`` refuses whatever ``escape`` cannot have made."""
    with pytest.raises(ValueError):
        unescape(segment)
