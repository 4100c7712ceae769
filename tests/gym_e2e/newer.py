"""A nemo-gym of the newer layout, laid over the installed one, for a plug-in that finds its way by looking.

The rule of this module: only what the newest text says is different is made up here (package path, error classes,
refusals in the snapshot); records, matcher and hashing are the installed package's own.
"""

from __future__ import annotations

import enum
import importlib
import sys
from dataclasses import dataclass, field, make_dataclass
from types import ModuleType
from typing import Any

import nemo_gym
from pydantic import BaseModel

_OLD, _NEW = "nemo_gym.token_id_capture", "nemo_gym.models.token_capture"


class TokenCaptureFrozenError(RuntimeError):
    """As the newest text names it."""


class TokenCaptureRetiredError(TokenCaptureFrozenError):
    """As the newest text names it."""


class RolloutRetiredError(LookupError):
    """As the newest text names it."""


class ParentResolutionStatus(enum.StrEnum):
    """A class of its own, as another version of the package would have."""

    ROOT = "root"
    RESOLVED = "resolved"
    UNRESOLVED = "unresolved"


class RefusalModel(BaseModel):
    """A refusal record as a strict pydantic model."""

    model_config = {"strict": True, "extra": "forbid"}

    model_call_id: str
    code: str | None
    created_at: float
    parent_call_id: str | None = None
    parent_resolution: ParentResolutionStatus | None = None


@dataclass(frozen=True)
class RefusalData:
    """A refusal record as a dataclass that also names its rollout."""

    rollout_id: str
    model_call_id: str
    code: str | None
    created_at: float
    parent_call_id: str | None = None
    parent_resolution: ParentResolutionStatus | None = None


RECORDS: dict[str, Any] = {"pydantic": RefusalModel, "dataclass": RefusalData, "none": None}


def pretend(refusal_record: str, refusals_field: str = "engine_refusals") -> ModuleType:
    """Lay the newer package over the installed one and return its ``protocols``; call it before the plug-in is used."""
    snapshot = make_dataclass(
        "TokenCaptureSnapshot",
        [
            ("rollout_id", str),
            ("entries", tuple),
            ("incomplete", bool),
            ("snapshot_id", str),
            ("version", int),
            (refusals_field, tuple, field(default=())),
        ],
        frozen=True,
    )
    own: dict[str, dict[str, Any]] = {
        "protocols": {
            "TokenCaptureSnapshot": snapshot,
            "TokenCaptureFrozenError": TokenCaptureFrozenError,
            "TokenCaptureRetiredError": TokenCaptureRetiredError,
            "RolloutRetiredError": RolloutRetiredError,
        },
        "records": {"EngineRefusalRecord": RECORDS[refusal_record], "ParentResolutionStatus": ParentResolutionStatus},
        "lineage": {},
        "fingerprint": {},
    }
    for package in ("nemo_gym.models", _NEW):
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = []
    nemo_gym.models = sys.modules["nemo_gym.models"]
    for name, made in own.items():
        module = ModuleType(f"{_NEW}.{name}")
        module.__dict__.update(
            {k: v for k, v in vars(importlib.import_module(f"{_OLD}.{name}")).items() if k[0] != "_"}
        )
        module.__dict__.update(made)
        sys.modules[module.__name__] = module
    return sys.modules[f"{_NEW}.protocols"]
