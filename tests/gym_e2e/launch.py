"""Starts a Gym model server the way Gym's own launcher does, with the capture block of docs/nemo-gym.md as it stands.

The rule of this module: the block is read from the page and handed on word for word, interpolations included; the
variables that it names come from the environment. ``python -m gym_e2e.launch PORT HEAD_PORT ENGINE_URL WORKERS`` checks
the run and becomes the server.
"""

from __future__ import annotations

import os
import sys

from omegaconf import OmegaConf

from gym_e2e.pages import GYM_PAGE, blocks
from s3capture.gym import preflight


def main(port: str, head_port: str, engine_url: str, workers: str) -> None:
    """Check the run as the page tells launchers to, then become the server."""
    (block,) = blocks(GYM_PAGE, "yaml")
    config = OmegaConf.create(block)
    model = {
        "entrypoint": "app.py",
        "host": "127.0.0.1",
        "port": int(port),
        "base_url": engine_url,
        "api_key": "none",
        "model": "stand-in",
        "return_token_id_information": True,
        "request_prompt_and_generation_token_ids": True,
        "uses_reasoning_parser": False,
        "num_workers": int(workers),
    }
    config.merge_with(
        {
            "head_server": {"host": "127.0.0.1", "port": int(head_port)},
            "dry_run": False,
            "global_aiohttp_client_request_debug": True,  # says when a client has hung up
            "policy_model": {"responses_api_models": {"vllm_model": model}},
        }
    )
    preflight(**OmegaConf.to_container(config.token_id_capture.sink_kwargs, resolve=True))
    environment = {
        **os.environ,
        "NEMO_GYM_CONFIG_PATH": "policy_model",
        "NEMO_GYM_CONFIG_DICT": OmegaConf.to_yaml(config),
    }
    os.execve(sys.executable, [sys.executable, "-m", "responses_api_models.vllm_model.app"], environment)


if __name__ == "__main__":
    main(*sys.argv[1:])
