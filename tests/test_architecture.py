"""The rules of docs/architecture.md about who may import whom, read from the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "s3capture"
MODULES = sorted(PACKAGE.rglob("*.py"))

_BOTO_HOMES = ("store/", "seaweed.py", "doctor.py", "local.py")


def _name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def _roots(path: Path) -> set[str]:
    return {name.split(".")[0] for name in _imports(path)}


@pytest.mark.parametrize("path", [p for p in MODULES if _name(p).startswith("protocol/")], ids=_name)
def test_protocol_generators_are_pure(path: Path) -> None:
    """A protocol module imports no clock, randomness, thread, disk or network, and of this package only data."""
    allowed = {"effects", "keys", "codec", "errors", "protocol"}
    mine = {name.split(".")[1] for name in _imports(path) if name.startswith("s3capture.")}
    assert mine <= allowed
    assert _roots(path) <= {"__future__", "collections", "dataclasses", "typing", "s3capture", "enum", "hashlib"}


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_only_stores_know_boto3(path: Path) -> None:
    """boto3 and botocore are imported by the store, and by the tools that set up or examine a server."""
    if not _name(path).startswith(_BOTO_HOMES):
        assert not _roots(path) & {"boto3", "botocore"}


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_core_never_imports_a_framework(path: Path) -> None:
    """Only the gym adapter imports nemo_gym, only ``s3capture.ray`` Ray and nothing that module; nothing a server."""
    forbidden = {"fastapi", "torch", "aiohttp"}
    if not _name(path).startswith("gym"):
        forbidden |= {"nemo_gym"}
    if _name(path) != "ray.py":
        forbidden |= {"ray"}
    assert not _roots(path) & forbidden
    assert not {name for name in _imports(path) if name.split(".")[:2] == ["s3capture", "ray"]}


@pytest.mark.parametrize("path", [p for p in MODULES if not _name(p).startswith("cli/")], ids=_name)
def test_only_the_command_line_prints(path: Path) -> None:
    """No module outside cli/ calls print."""
    calls = (node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call))
    assert not [node.lineno for node in calls if isinstance(node.func, ast.Name) and node.func.id == "print"]


def test_importing_the_package_imports_no_tools() -> None:
    """``import s3capture`` loads no boto3, no command line and no server; the endpoints load no command line."""
    code = (
        "import sys, s3capture; early = set(sys.modules); s3capture.S3TokenSink, s3capture.S3LineageResolver; "
        "late = set(sys.modules); "
        "print([m for m in ('boto3', 'typer', 'rich', 'pydantic') if m in early], "
        "[m for m in ('typer', 'rich', 'moto', 's3capture.local', 's3capture.testing', 'nemo_gym') if m in late])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] []"


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_every_module_states_its_rule(path: Path) -> None:
    """Every module opens with a docstring."""
    assert ast.get_docstring(ast.parse(path.read_text("utf-8")))
