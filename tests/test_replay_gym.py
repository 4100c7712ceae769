"""Trainable responses rebuilt from a replay are what nemo-gym itself rebuilds from its own store."""

from __future__ import annotations

import gym_env
import pytest


def test_gym_builds_the_same_from_a_replay(request: pytest.FixtureRequest) -> None:
    """Every rollout, complete or not, gives the same response, metrics and mask, in Python and as lines."""
    found = gym_env.beside(request.config).run("-m", "gym_e2e.rebuilding")
    assert found["different"] == []
    assert found["lines"]
    assert found["rollouts"] == 24
    assert found["masked"] >= 6
    assert found["trainable"] >= 10
