"""s3capture inside NVIDIA NeMo Gym: endpoints for its configuration, and the wiring around them.

``sink: s3capture.gym:GymTokenSink`` and ``lineage_store: s3capture.gym:GymLineageResolver`` go into the YAML;
``install_source`` is called in the collector's process and ``preflight`` in the launcher. See docs/nemo-gym.md.
"""

from __future__ import annotations

from s3capture.gym.endpoints import GymCaptureLedger, GymLineageResolver, GymTokenSink, GymTokenSource
from s3capture.gym.matcher import GymMatcher
from s3capture.gym.upstream import GymNotFoundError
from s3capture.gym.wiring import install_source, preflight
from s3capture.preflight import RunInUseError

__all__ = [
    "GymCaptureLedger",
    "GymLineageResolver",
    "GymMatcher",
    "GymNotFoundError",
    "GymTokenSink",
    "GymTokenSource",
    "RunInUseError",
    "install_source",
    "preflight",
]
