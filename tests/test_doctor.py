"""What the doctor finds on good stores and on each kind of bad one, and that it cleans up after itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakes3 import FakeS3, Reply, Response, Rewrite, on

from s3capture.doctor import Check, Verdict, examine
from s3capture.errors import StoreAccessError, StoreConfigError, StoreUnavailableError
from s3capture.keys import Kind, parse
from s3capture.local import EmbeddedServer
from s3capture.settings import Settings
from s3capture.store.memory import MemoryStore

ALL = [
    "settings", "spill", "credentials", "bucket", "write-read", "list", "create-once", "create-race",
    "read-after-write", "empty-body", "long-keys", "delete", "versioning", "object-lock", "clock", "put-time",
    "clean-up",
]  # fmt: skip
OF_BOTO = {"credentials", "versioning", "object-lock", "clock"}


def settings(tmp_path: Path, bucket: str = "bucket", **more: Any) -> Settings:
    return Settings.of(url=f"s3://{bucket}/p", run="r", region="us-east-1", spill_dir=str(tmp_path / "spill"), **more)


def on_fake(s3: FakeS3, tmp_path: Path) -> Settings:
    return settings(tmp_path, s3.bucket, endpoint_url=s3.endpoint_url, addressing_style="path")


def verdicts(checks: list[Check]) -> dict[str, Verdict]:
    return {check.name: check.verdict for check in checks}


def bad(checks: list[Check]) -> dict[str, Check]:
    good = (Verdict.OK, Verdict.UNKNOWN)
    # A test directory may well lie in memory.
    return {check.name: check for check in checks if check.verdict not in good and check.name != "spill"}


def test_seaweed_is_fit(seaweed: EmbeddedServer, bucket: str, tmp_path: Path) -> None:
    """On a real server every check is made in its order and none fails; nothing of it stays in the bucket."""
    asked = settings(tmp_path, bucket, endpoint_url=seaweed.endpoint_url)
    checks = list(examine(asked, rounds=3, writers=4))
    assert [check.name for check in checks] == ALL
    assert bad(checks) == {}
    assert verdicts(checks)["versioning"] is Verdict.OK
    assert verdicts(checks)["clock"] is Verdict.OK


def test_moto_is_fit_one_at_a_time(moto_server: str, moto_bucket: str, tmp_path: Path) -> None:
    """On moto everything but the race, which it may lose, is as it should be."""
    checks = list(examine(settings(tmp_path, moto_bucket, endpoint_url=moto_server), rounds=1, writers=2))
    assert set(bad(checks)) <= {"create-race"}


def test_an_honest_store_keeps_no_scratch_object(tmp_path: Path) -> None:
    """With the default of 20 rounds a strongly consistent store passes, and is left as it was found."""
    store = MemoryStore()
    store.create("p/r/attempts/x", b"theirs")
    checks = list(examine(settings(tmp_path), store=store))
    assert [check.name for check in checks] == [name for name in ALL if name not in OF_BOTO]
    assert bad(checks) == {}
    assert [row.key for row in store.list("")] == ["p/r/attempts/x"]


class Recording(MemoryStore):
    """Remembers every key that was created."""

    def __init__(self) -> None:
        super().__init__()
        self.created: set[str] = set()

    def create(self, key: str, body: bytes) -> bool:
        self.created.add(key)
        return super().create(key, body)


def test_every_scratch_key_is_below_the_probe_prefix(tmp_path: Path) -> None:
    """No reader takes a scratch object for a capture: each is below the probe prefix, the long ones too."""
    store = Recording()
    list(examine(settings(tmp_path), store=store, rounds=1))
    assert all(key.startswith("p/r/probe/") for key in store.created)
    assert {parsed.kind for key in store.created if (parsed := parse("p/r/", key))} == {Kind.PROBE}
    assert max(map(len, store.created)) == 900
    assert max(len(part) for key in store.created for part in key.split("/")) == 240


def test_a_store_that_ignores_conditions_is_named(tmp_path: Path) -> None:
    """A store that overwrites in spite of If-None-Match fails the check that says so; what rests on it is skipped."""
    with FakeS3(ignores_conditions=True) as s3:
        found = bad(list(examine(on_fake(s3, tmp_path))))
    assert found["create-once"].verdict is Verdict.FAILED
    assert "the second body replaced the first" in found["create-once"].saw
    assert "conditional writes" in found["create-once"].remedy
    assert {name for name, check in found.items() if check.verdict is Verdict.SKIPPED} == {
        "create-race", "read-after-write", "empty-body", "long-keys", "delete",
    }  # fmt: skip


def test_a_store_that_refuses_conditions_is_named(tmp_path: Path) -> None:
    """A store that answers 501 to a conditional write fails, and is not examined further."""
    with FakeS3() as s3:
        s3.script(on("PutObject"), Reply(501, "NotImplemented"), times=None)
        found = bad(list(examine(on_fake(s3, tmp_path))))
    assert found["write-read"].verdict is Verdict.FAILED
    assert "conditional writes" in found["write-read"].remedy
    assert found["create-once"].verdict is Verdict.SKIPPED


class WrongUnderContention(MemoryStore):
    """Right one at a time; in a race it tells ``winners`` writers that they were first, and keeps the last body."""

    def __init__(self, winners: int) -> None:
        super().__init__()
        self._winners, self._seen = winners, dict[str, int]()

    def create(self, key: str, body: bytes) -> bool:
        if "-race-" not in key:
            return super().create(key, body)
        with self._lock:
            number = self._seen[key] = self._seen.get(key, 0) + 1
        self.overwrite(key, body)
        return number <= self._winners


@pytest.mark.parametrize(("winners", "saw"), [(2, "2 were told that they were first"), (1, "not the winner's")])
def test_a_store_that_is_wrong_only_under_contention_is_caught(winners: int, saw: str, tmp_path: Path) -> None:
    """Two winners of one key, and a winner whose body is not the one stored, both fail the race and nothing else."""
    found = bad(list(examine(settings(tmp_path), store=WrongUnderContention(winners))))
    assert list(found) == ["create-race"]
    assert found["create-race"].verdict is Verdict.FAILED
    assert saw in found["create-race"].saw


def test_lost_replies_and_conflicts_do_not_fail_the_race(tmp_path: Path) -> None:
    """A writer that is told to ask again, or loses its reply, is no second winner."""
    with FakeS3() as s3:
        s3.script(on("PutObject", "*-race-0"), Reply(409, "ConditionalRequestConflict"), times=2)
        s3.script(on("PutObject", "*-race-1"), Reply(500, "InternalError", apply=True), times=1)
        assert bad(list(examine(on_fake(s3, tmp_path), rounds=2, writers=4))) == {}


class Stale(MemoryStore):
    """Answers right, but shows a new object in listings only from the second look on."""

    def __init__(self) -> None:
        super().__init__()
        self._looked: set[str] = set()

    def list(self, prefix: str):  # type: ignore[no-untyped-def]
        shown = [row for row in super().list(prefix) if row.key in self._looked or "-seen-" not in row.key]
        self._looked.update(row.key for row in super().list(prefix))
        return shown


def test_a_stale_listing_is_caught(tmp_path: Path) -> None:
    """A listing that misses an object just written fails the check of reads after writes."""
    found = bad(list(examine(settings(tmp_path), store=Stale(), rounds=1)))
    assert list(found) == ["read-after-write"]
    assert "misses an object just written" in found["read-after-write"].saw


def test_short_keys_only_is_caught(tmp_path: Path) -> None:
    """A store that refuses long path segments fails that check alone, with what to do."""
    with FakeS3() as s3:
        s3.script(on("PutObject", "*" + "s" * 240), Reply(400, "KeyTooLongError"), times=None)
        found = bad(list(examine(on_fake(s3, tmp_path), rounds=1)))
    assert list(found) == ["long-keys"]
    assert "segment of 240 bytes" in found["long-keys"].saw
    assert found["long-keys"].remedy


def test_refused_deletes_are_a_warning(tmp_path: Path) -> None:
    """Without delete rights the store is fit; what cannot be removed is counted."""
    with FakeS3() as s3:
        s3.script(on("Delete*"), Reply(403, "AccessDenied"), times=None)
        found = bad(list(examine(on_fake(s3, tmp_path), rounds=1)))
        left = len(s3.objects)
    assert {name: check.verdict for name, check in found.items()} == {
        "delete": Verdict.WARNING,
        "clean-up": Verdict.WARNING,
    }
    assert "retention='keep'" in found["delete"].remedy
    assert f"{left} scratch objects" in found["clean-up"].saw


def test_refused_listing_is_told_from_wrong_credentials(tmp_path: Path) -> None:
    """Whoever may write but not list is examined, and fails the check of listings."""
    with FakeS3() as s3:
        s3.script(on("ListObjectsV2"), Reply(403, "AccessDenied"), times=None)
        found = list(examine(on_fake(s3, tmp_path), rounds=1))
    assert verdicts(found)["bucket"] is Verdict.OK
    assert bad(found)["list"].verdict is Verdict.FAILED
    assert "s3:ListBucket" in bad(found)["list"].saw


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (Reply(404, "NoSuchBucket"), StoreConfigError),
        (Reply(403, "InvalidAccessKeyId"), StoreAccessError),
        (Reply(503, "SlowDown"), StoreUnavailableError),
    ],
)
def test_a_store_that_cannot_be_examined_ends_it(reply: Reply, error: type[Exception], tmp_path: Path) -> None:
    """The failed check comes first, then its error; no further check is made and nothing is written."""
    with FakeS3() as s3:
        s3.script(on(), reply, times=None)
        found: list[Check] = []
        with pytest.raises(error):
            for check in examine(on_fake(s3, tmp_path), patience_s=0.3):
                found.append(check)
        assert not s3.objects
    assert found[-1].name == "bucket"
    assert found[-1].verdict is Verdict.FAILED


def test_missing_credentials_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where boto3 finds no credentials, that check fails before the store is asked."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    found: list[Check] = []
    with FakeS3() as s3, pytest.raises(StoreAccessError):
        for check in examine(on_fake(s3, tmp_path)):
            found.append(check)
    assert verdicts(found)["credentials"] is Verdict.FAILED


def test_a_wrong_clock_is_a_warning(tmp_path: Path) -> None:
    """The store's clock is read off its reply; versioning that it does not tell is unknown."""
    dated = Rewrite(lambda answer: Response(answer.status, answer.body, {"Date": "Tue, 01 Jan 2030 00:00:00 GMT"}))
    with FakeS3() as s3:
        s3.script(lambda request: "versioning" in request.query, dated, times=None)
        found = list(examine(on_fake(s3, tmp_path), rounds=1))
    assert verdicts(found)["clock"] is Verdict.WARNING
    assert verdicts(found)["versioning"] is Verdict.UNKNOWN
    assert "NTP" in bad(found)["clock"].remedy


def test_an_unusable_spill_directory_fails(tmp_path: Path) -> None:
    """A spill directory that cannot be made fails its check; the store is examined all the same."""
    (tmp_path / "spill").write_text("a file is in the way")
    found = list(examine(settings(tmp_path), store=MemoryStore(), rounds=1))
    assert verdicts(found)["spill"] is Verdict.FAILED
    assert verdicts(found)["create-race"] is Verdict.OK


def test_a_spill_directory_in_memory_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks in memory do not outlive the machine: said, with what to set."""
    monkeypatch.setattr("s3capture.doctor.memory_file_system", lambda *_: "tmpfs")
    found = {check.name: check for check in examine(settings(tmp_path), store=MemoryStore(), rounds=1)}
    assert found["spill"].verdict is Verdict.WARNING
    assert "tmpfs" in found["spill"].saw


def test_stopping_early_cleans_up(tmp_path: Path) -> None:
    """An examination that is given up in the middle leaves no scratch object."""
    store = Recording()
    examination = examine(settings(tmp_path), store=store, rounds=1)
    for check in examination:
        if check.name == "read-after-write":
            break
    assert store.list("")
    examination.close()
    assert not store.list("")
