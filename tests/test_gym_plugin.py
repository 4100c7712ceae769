"""The plug-in finds its way by looking: missing, too old, 0.7.0 and newer packages, each in a process of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import gym_env
import pytest
from gym_e2e.pages import GYM_PAGE, blocks

from s3capture.local import EmbeddedServer
from s3capture.seaweed import connect

ENDPOINTS = ["GymTokenSink", "GymTokenSource", "GymLineageResolver", "GymCaptureLedger"]
OURS, THEIRS = "s3capture.errors.", "gym_e2e.newer."


@pytest.fixture(scope="session")
def gym(request: pytest.FixtureRequest) -> gym_env.GymPlace:
    """nemo-gym 0.7.0 beside the tests."""
    return gym_env.beside(request.config)


def told(gym: gym_env.GymPlace, name: str, **keywords: Any) -> Any:
    """The facts of one function of ``gym_e2e.plugin``."""
    return gym.run("-m", "gym_e2e.plugin", name, given=keywords)


def _pretended(root: Path, modules: dict[str, str]) -> gym_env.GymPlace:
    for name, text in modules.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return gym_env.GymPlace(Path(sys.executable), (root,), "a pretended nemo-gym")


STUBS = {
    "nothing installed": ({}, "it is not installed"),
    "no capture package": ({"nemo_gym/__init__.py": ""}, "too old: it has no nemo_gym.token_id_capture"),
    "an empty capture package": (
        {"nemo_gym/__init__.py": "", "nemo_gym/token_id_capture/__init__.py": ""},
        "the one installed has no nemo_gym.token_id_capture.protocols",
    ),
    "no snapshots": (
        {
            "nemo_gym/__init__.py": "",
            "nemo_gym/token_id_capture/__init__.py": "",
            **{
                f"nemo_gym/token_id_capture/{name}.py": ""
                for name in ("protocols", "records", "lineage", "fingerprint")
            },
        },
        "nemo_gym.token_id_capture.protocols has no TokenCaptureSnapshot",
    ),
    "a matcher without a verdict": (
        {
            "nemo_gym/__init__.py": "",
            "nemo_gym/token_id_capture/__init__.py": "",
            "nemo_gym/token_id_capture/protocols.py": "import dataclasses\n@dataclasses.dataclass\nclass "
            "TokenCaptureSnapshot:\n    rollout_id: str\n",
            "nemo_gym/token_id_capture/records.py": "",
            "nemo_gym/token_id_capture/lineage.py": "class RolloutLineage:\n    def add_entry(self): ...\n",
            "nemo_gym/token_id_capture/fingerprint.py": "",
        },
        "nemo_gym.token_id_capture.lineage.RolloutLineage has no resolve_node",
    ),
    "a dependency is missing": (
        {
            "nemo_gym/__init__.py": "",
            "nemo_gym/token_id_capture/__init__.py": "",
            "nemo_gym/token_id_capture/protocols.py": "import a_package_that_nobody_has\n",
        },
        "nemo_gym.token_id_capture needs a_package_that_nobody_has, which is not installed",
    ),
}


@pytest.mark.parametrize("stub", STUBS)
def test_missing_or_too_old(tmp_path: Path, stub: str) -> None:
    """The plug-in imports without a usable nemo_gym, and then gives one ImportError that says what is wrong."""
    modules, problem = STUBS[stub]
    found = _pretended(tmp_path, modules).run("-m", "gym_e2e.bare")
    assert sorted(found) == sorted([*ENDPOINTS, "preflight"])
    for is_import_error, message in found.values():
        assert is_import_error
        assert problem in message
        assert message.endswith("pip install 'nemo-gym>=0.7.0'")


def test_constructors_do_nothing(gym: gym_env.GymPlace) -> None:
    """Making every endpoint twice opens no file or socket, starts no thread and runs no process."""
    assert told(gym, "constructing") == {"events": [], "threads": 0, "made": 8}


def test_the_mark_of_070_after_a_frozen_put(gym: gym_env.GymPlace) -> None:
    """On 0.7.0 the mark that follows a refused put is dropped: for that call, once, and no other."""
    found = told(gym, "late_marks")
    assert f"{OURS}TokenCaptureFrozenError" in found.pop("refused")
    assert found == {"another call": True, "no call": True, "that call": False, "that call again": True}


def test_the_mark_of_a_newer_gym(gym: gym_env.GymPlace) -> None:
    """A package that knows the frozen error sends no such mark, so every mark it does send counts."""
    found = told(gym, "late_marks", newer="pydantic")
    found.pop("refused")
    assert found == dict.fromkeys(found, True)


def test_other_failures_are_marked(gym: gym_env.GymPlace) -> None:
    """The mark after a conflicting put is kept on 0.7.0."""
    assert told(gym, "conflicts_are_marked") is True


def test_errors_are_ours_and_theirs(gym: gym_env.GymPlace) -> None:
    """Where the package has the contract's errors, ours are instances of them; nothing else changes their kind."""
    found = told(gym, "errors_of", newer="pydantic")
    for what, classes in found.items():
        if what == "ledger begin":
            wanted = ["CaptureAdmissionError", "RolloutRetiredError"]
        elif what.startswith("ledger"):
            wanted = ["RolloutRetiredError"]
        else:
            wanted = ["TokenCaptureFrozenError", *(["TokenCaptureRetiredError"] if "retired" in what else [])]
        for name in wanted:
            assert f"{OURS}{name}" in classes, what
            assert f"{THEIRS}{name}" in classes or name == "CaptureAdmissionError", what
        assert (f"{OURS}TokenCaptureRetiredError" in classes) == what.startswith("retired")


@pytest.mark.parametrize(
    ("record", "field"), [("pydantic", "engine_refusals"), ("dataclass", "engine_refusals"), ("none", "refusals")]
)
def test_refusals_are_delivered(gym: gym_env.GymPlace, record: str, field: str) -> None:
    """A refused call is in the snapshot as the package's own record, under the name the package has for the field."""
    found = told(gym, "refusals", newer=record, refusals_field=field)
    assert found == {
        "snapshot": True,
        "record": True,
        "theirs": True,
        "incomplete": False,
        "values": ["c", "length", "a", "resolved"],
        "rollout": "7-3" if record == "dataclass" else None,
    }


@pytest.mark.parametrize("length", [1, 40])
def test_budgets(gym: gym_env.GymPlace, length: int) -> None:
    """Through the plug-in every operation costs the trips and requests that the design allows, at any length."""
    found = told(gym, "budgets", length=length)
    drop = found.pop("drop")
    assert drop[0] == 7, "four to decide, three to delete"
    assert drop[1] <= 5 + length + 2
    assert found == {
        "resolve root": [0, 0],
        "begin_call": [2, 2],
        "put begun here": [1, 2],
        "resolve cold": [2, 2],
        "resolve held": [1, 1],
        "freeze": [4, 4 + length],
        "put not begun here": [2, 3],
        "mark_incomplete": [2, 2],
    }


def test_preflight(gym: gym_env.GymPlace, seaweed: EmbeddedServer, bucket: str, tmp_path: Path) -> None:
    """A fresh run passes and nothing is left behind; one that holds data is refused unless it is resumed."""
    settings = {
        "url": f"s3://{bucket}/p",
        "run": "run-1",
        "endpoint_url": seaweed.endpoint_url,
        "spill_dir": str(tmp_path),
    }
    found = told(gym, "a_run", settings=settings)
    assert found["fresh"] == [settings, settings], "it returns what goes into the configuration"
    assert found["left"] == []
    assert "run 'run-1'" in found["used"]
    assert "resume=True" in found["used"]
    assert found["resumed"] == settings
    assert found["another"] == {**settings, "run": "another"}
    client = connect(seaweed.endpoint_url, seaweed.access_key, seaweed.secret_key)
    assert not [row["Key"] for row in client.list_objects_v2(Bucket=bucket)["Contents"] if "probe" in row["Key"]]
    client.close()


def test_built_by_gym_from_its_configuration(request: pytest.FixtureRequest) -> None:
    """Gym builds both endpoints from OmegaConf, finds the whole protocol on them, and is told what is wrong by name."""
    found = gym_env.server(request.config).run("-m", "gym_e2e.configured")
    assert found.pop("misspelt").endswith("unknown setting 'op_timeout'; did you mean 'op_timeout_s'?")
    assert "region" in found.pop("nested")
    assert "setting 'run' is required" in found.pop("missing")
    assert found == {
        "classes": ["GymTokenSink", "GymLineageResolver"],
        "values": [20.0, 4, 20.0],
        "shared": True,
    }


def test_the_blocks_of_the_page(gym: gym_env.GymPlace, seaweed: EmbeddedServer, bucket: str) -> None:
    """What docs/nemo-gym.md has launchers and collectors run does run, one after the other, and installs the source."""
    shown = blocks(GYM_PAGE, "python")
    check = (
        "from nemo_gym.token_id_capture.protocols import installed_token_source as i; print(str(i() is source).lower())"
    )
    environment = {"URL": f"s3://{bucket}/p", "RUN": "run-1", "ENDPOINT_URL": seaweed.endpoint_url}
    assert len(shown) == 2
    variables = {f"S3CAPTURE_{name}": value for name, value in environment.items()}
    assert gym.run("-c", "\n".join([*shown, check]), variables=variables) is True


def test_the_environment_is_clean() -> None:
    """The tests themselves cannot see nemo_gym: only child processes do."""
    assert not [name for name in sys.modules if name.split(".")[0] == "nemo_gym"]
    assert "nemo" not in os.environ.get("PYTHONPATH", "")
