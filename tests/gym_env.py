"""Places where the real nemo-gym runs, beside the tests and never inside them.

The rule of this module: nothing that a test imports may come from nemo-gym, so it lives in a place of its own that only
child processes see. There are two: ``beside`` is the package alone for the Python of the tests (capture package and
conformance kit), ``server`` a whole environment of Python 3.12 or later in which its model server runs. Both are kept
under pytest's cache and are made anew when they are unfinished or their contents are out of date; what cannot be made
fails the tests and says what is missing, for a skip would hide that nothing was proven.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

VERSION = "0.7.0"
TESTS = Path(__file__).parent
REPOSITORY = TESTS.parent

_OLDEST = (3, 12)  # Gym builds endpoints by ``Protocol.__protocol_attrs__``, which came with it
_TRIED_FIRST = ((3, 13), (3, 12), (3, 14), (3, 15))  # 0.7.0 declares 3.13
_GYM = [f"nemo-gym=={VERSION}"]
_OF_THE_SERVER = [
    "fastapi", "uvicorn", "httptools", "aiohttp", "itsdangerous", "omegaconf", "hydra-core", "rich", "openai==2.44.0",
    "anthropic<=0.109.2", "psutil", "requests", "yappi", "pydot", "pytest",
]  # fmt: skip
_OURS: list[str] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
_RAY = "2.58.0"


@dataclass(frozen=True, slots=True)
class GymPlace:
    """A Python that can import nemo-gym, our checkout and the programs of these tests; ``label`` says which it is."""

    python: Path
    path: tuple[Path, ...]
    label: str

    def environment(self, **more: str) -> dict[str, str]:
        """The variables for a child process: those of the tests, our checkout importable, ``more`` on top."""
        path = [*map(str, self.path), str(REPOSITORY), str(TESTS)]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1", **more}

    def run(
        self, *arguments: str, given: Any = None, timeout: float = 120.0, variables: dict[str, str] | None = None
    ) -> Any:
        """Run Python with ``arguments`` and ``given`` as JSON on its input; return its output read as JSON.

        A program that fails fails the test, with all it said.
        """
        done = subprocess.run(
            [str(self.python), *arguments],
            input=json.dumps(given),
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
            env=self.environment(**variables or {}),
        )
        assert done.returncode == 0, f"{' '.join(arguments)[:80]} failed:\n{done.stderr}\n{done.stdout[-6000:]}"
        return json.loads(done.stdout)


def beside(config: pytest.Config) -> GymPlace:
    """nemo-gym in a directory for the Python of the tests, without what it depends on."""
    place = _cache(config) / VERSION
    with _alone(place):
        if not place.is_dir():
            # Renamed when complete, so that an install that was cut short is never taken for a whole one.
            fresh = place.with_name(f"{VERSION}.{os.getpid()}")
            shutil.rmtree(fresh, ignore_errors=True)
            _pip(Path(sys.executable), "--target", str(fresh), "--ignore-requires-python", "--no-deps", *_GYM)
            fresh.rename(place)
    return GymPlace(Path(sys.executable), (place,), f"nemo-gym {VERSION}, Python {_version_of(Path(sys.executable))}")


def server(config: pytest.Config) -> GymPlace:
    """An environment in which Gym's model server starts; the first time costs about half a minute of pip."""
    base = find_python()
    want = json.dumps([_version_of(base), _OF_THE_SERVER, _OURS, _GYM, _RAY])
    place = _cache(config) / f"server-{hashlib.sha256(want.encode()).hexdigest()[:12]}"
    python, done = place / "bin" / "python", place / "complete"
    with _alone(place):
        if not done.is_file():
            shutil.rmtree(place, ignore_errors=True)
            _checked([str(base), "-m", "venv", str(place)], f"{base} made no virtual environment")
            _pip(python, *_OF_THE_SERVER, *_OURS)
            _pip(python, "--ignore-requires-python", "--no-deps", *_GYM)
            _pretend_ray(python)
            done.write_text(want)
    return GymPlace(python, (), f"nemo-gym {VERSION}, Python {_version_of(base)}")


def find_python() -> Path:
    """A Python of 3.12 or later that can make virtual environments, from PATH or pyenv; its absence fails the test."""
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    for major, minor in _TRIED_FIRST:
        name = f"python{major}.{minor}"
        # A shim on PATH exists for every version pyenv has, and fails unless that version is selected: so it is asked.
        on_path = shutil.which(name)
        found = sorted(root.glob(f"versions/{major}.{minor}.*/bin/{name}"), reverse=True)
        for candidate in [*([Path(on_path)] if on_path else []), *found]:
            if _works(candidate):
                return candidate
    if sys.version_info[:2] >= _OLDEST:
        return Path(sys.executable)
    pytest.fail(
        "nemo-gym's model server needs Python 3.12 or later and none was found on PATH or under pyenv. Install one "
        "('pyenv install 3.13', 'uv python install 3.13', or in CI a second setup-python step with version 3.13)"
    )


def _works(python: Path) -> bool:
    probe = f"import sys, venv, ensurepip; sys.exit(sys.version_info[:2] < {_OLDEST})"
    return subprocess.run([str(python), "-c", probe], capture_output=True, check=False).returncode == 0


def _version_of(python: Path) -> str:
    told = [str(python), "-c", "import platform; print(platform.python_version())"]
    return subprocess.run(told, capture_output=True, text=True, check=True).stdout.strip()


def _pretend_ray(python: Path) -> None:
    """Gym reads the version of ray at import and never runs it here: metadata will do for half a gigabyte."""
    told = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    purelib = Path(subprocess.run(told, capture_output=True, text=True, check=True).stdout.strip())
    metadata = purelib / f"ray-{_RAY}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: ray\nVersion: {_RAY}\n")


def _pip(python: Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    _checked([*command, *arguments], f"pip could not install {' '.join(arguments)}")


def _checked(command: list[str], problem: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.fail(f"{problem}:\n{done.stdout}\n{done.stderr}")


def _cache(config: pytest.Config) -> Path:
    assert config.cache is not None, "the cache plugin of pytest is off, so there is no place to keep nemo-gym"
    return config.cache.mkdir("nemo-gym")


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    """One process makes a place; others that want it wait."""
    with place.with_name(f"{place.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
