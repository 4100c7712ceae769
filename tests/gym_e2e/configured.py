"""Endpoints as Gym builds them from its configuration; needs OmegaConf and Python 3.12 or later."""

from __future__ import annotations

import json
import sys
from typing import Any

from nemo_gym.token_id_capture.config import TokenIdCaptureConfig
from omegaconf import OmegaConf

from s3capture.gym import GymTokenSink


def given(**more: Any) -> dict[str, Any]:
    """The two settings that every endpoint needs, and more."""
    return {"url": "s3://bucket/p", "run": "r", **more}


def from_config() -> dict[str, Any]:
    """Endpoints as Gym builds them from an OmegaConf configuration, and what it says to a bad one."""

    def build(**kwargs: Any) -> Any:
        block = {
            "enabled": True,
            "sink": "s3capture.gym:GymTokenSink",
            "sink_kwargs": kwargs,
            "lineage_store": "s3capture.gym:GymLineageResolver",
            "lineage_store_kwargs": kwargs,
        }
        config = TokenIdCaptureConfig.model_validate(OmegaConf.create({"token_id_capture": block}))
        return config.build_sink(), config.build_lineage_store()

    def refused(**kwargs: Any) -> str:
        try:
            build(**kwargs)
        except (ValueError, TypeError) as error:
            return str(error)
        return ""

    sink, resolver = build(**given(op_timeout_s=20, max_concurrency=4, region=None))
    direct = GymTokenSink(**OmegaConf.create(given(op_timeout_s=20)))
    return {
        "classes": [type(sink).__name__, type(resolver).__name__],
        "values": [sink.settings.op_timeout_s, sink.settings.max_concurrency, direct.settings.op_timeout_s],
        "misspelt": refused(**given(op_timeout=20)),
        "nested": refused(**given(region={"name": "x"})),
        "missing": refused(url="s3://bucket/p"),
        "shared": resolver.is_process_shared(),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(from_config()))
