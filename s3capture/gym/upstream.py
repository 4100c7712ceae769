"""Find what the installed nemo_gym offers, by looking, never by version number.

The rule of this module: it is the only one that imports nemo_gym, and only when an adapter is used. Packages and names
upstream move (``token_id_capture`` became ``models.token_capture``); what cannot be found is either optional, and
then None, or gives one error that says what to install.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

from s3capture.errors import CaptureError

PACKAGES = ("nemo_gym.models.token_capture", "nemo_gym.token_id_capture")
"""The homes of the capture package, newest first."""

_REFUSAL_RECORDS = ("EngineRefusalRecord", "EngineRefusal")
_REFUSAL_FIELDS = ("engine_refusals", "refusals")


class GymNotFoundError(CaptureError, ImportError):
    """nemo_gym is not installed, or lacks the capture interfaces that this adapter speaks."""


@dataclass(frozen=True, slots=True)
class Upstream:
    """The parts of one installed nemo_gym. Classes that it does not have are None."""

    package: str
    token_entry: Any
    parent_status: Any
    snapshot: Any
    refusals_field: str | None
    refusal_record: Any
    lineage_match: Any
    lineage_resolution: Any
    rollout_lineage: Any
    assistant_fingerprint: Any
    stamp_continuation: Any
    install_token_source: Any
    frozen_error: type[Exception] | None
    retired_error: type[Exception] | None
    ledger_retired_error: type[Exception] | None

    @property
    def marks_after_a_frozen_put(self) -> bool:
        """Whether its server answers every failed put with a mark, a frozen one included.

        A nemo_gym that knows the frozen error handles it; one that does not (0.7.0) marks the rollout.
        """
        return self.frozen_error is None


@lru_cache(maxsize=1)
def upstream() -> Upstream:
    """Return the parts of the installed nemo_gym, or raise ``GymNotFoundError`` saying what to install."""
    problems: list[str] = []
    for package in PACKAGES:
        try:
            return _look(package)
        except ModuleNotFoundError as error:
            if (problem := _absence(package, error.name or "")) is not None:
                problems.append(problem)
        except (ImportError, AttributeError) as error:
            problems.append(f"{package}: {error}")
    if not problems:
        absent = importlib.util.find_spec("nemo_gym") is None
        problems = ["it is not installed" if absent else f"the one installed is too old: it has no {PACKAGES[-1]}"]
    raise GymNotFoundError(
        f"s3capture.gym needs nemo-gym 0.7.0 or newer in this environment ({'; '.join(problems)}): "
        "pip install 'nemo-gym>=0.7.0'"
    )


def _absence(package: str, missing: str) -> str | None:
    """What a missing module means; None when it is only that ``package`` is not this installation's home."""
    if f"{package}.".startswith(f"{missing}."):
        return None
    if missing.startswith("nemo_gym."):
        return f"the one installed has no {missing}"
    return f"{package} needs {missing}, which is not installed"


def _look(package: str) -> Upstream:
    protocols = importlib.import_module(f"{package}.protocols")
    records = importlib.import_module(f"{package}.records")
    lineage = importlib.import_module(f"{package}.lineage")
    fingerprint = importlib.import_module(f"{package}.fingerprint")
    snapshot = _need(protocols, "TokenCaptureSnapshot")
    if not is_dataclass(snapshot):
        raise AttributeError(f"{protocols.__name__}.TokenCaptureSnapshot is no dataclass")
    names = {field.name for field in fields(snapshot)}
    rollout_lineage = _need(lineage, "RolloutLineage")
    for method in ("add_entry", "resolve_node"):
        if not callable(getattr(rollout_lineage, method, None)):
            raise AttributeError(f"{lineage.__name__}.RolloutLineage has no {method}")
    return Upstream(
        package=package,
        token_entry=_need(records, "TokenEntry"),
        parent_status=_need(records, "ParentResolutionStatus"),
        snapshot=snapshot,
        refusals_field=next((name for name in _REFUSAL_FIELDS if name in names), None),
        refusal_record=_first(records, *_REFUSAL_RECORDS) or _first(protocols, *_REFUSAL_RECORDS),
        lineage_match=_need(protocols, "LineageMatch"),
        lineage_resolution=_need(protocols, "LineageResolution"),
        rollout_lineage=rollout_lineage,
        assistant_fingerprint=_need(fingerprint, "assistant_fingerprint"),
        stamp_continuation=_need(lineage, "stamp_continuation"),
        install_token_source=_need(protocols, "install_token_source"),
        frozen_error=_error(protocols, "TokenCaptureFrozenError"),
        retired_error=_error(protocols, "TokenCaptureRetiredError"),
        ledger_retired_error=_error(protocols, "RolloutRetiredError"),
    )


def _need(module: ModuleType, name: str) -> Any:
    found = getattr(module, name, None)
    if found is None:
        raise AttributeError(f"{module.__name__} has no {name}")
    return found


def _first(module: ModuleType, *names: str) -> Any:
    return next((found for name in names if (found := getattr(module, name, None)) is not None), None)


def _error(module: ModuleType, name: str) -> type[Exception] | None:
    found = getattr(module, name, None)
    return found if isinstance(found, type) and issubclass(found, Exception) else None
