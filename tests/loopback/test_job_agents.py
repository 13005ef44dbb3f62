"""The worked example of agents, as users start it: a few steps of a whole run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.kit.job import REPOSITORY

WORDS = ("num_steps=3", "prompts_per_step=8", "group_size=4", "max_staleness=0", "evaluation.max_prompts=8")


@pytest.mark.slow
def test_zoom_example_trains_on_what_the_agent_said_and_on_nothing_else(tmp_path: Path) -> None:
    """Rows of several turns with pictures of the environment's; on policy, trainer and engine agree on each token."""
    command = [
        sys.executable,
        str(REPOSITORY / "pipelines" / "agent_zoom.py"),
        "name=zoom",
        "progress=plain",
        *WORDS,
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = pd.read_parquet(tmp_path / "runs" / "zoom" / "rollouts")
    assert len(rows) == 3 * 8 * 4
    assert set(rows["num_turns"]) >= {1, 2}
    assert rows["reward"].between(0, 1).all()
    for row in rows.itertuples():
        mask = np.array(row.loss_mask, bool)
        rollout, trainer = np.array(row.rollout_logprobs), np.array(row.trainer_logprobs)
        assert len(mask) == len(row.completion_token_ids) == len(rollout) == len(trainer)
        assert len(row.media_ids) == row.num_turns
        assert (rollout[~mask] == 0).all()
        assert (np.array(row.advantages)[~mask] == 0).all()
        np.testing.assert_allclose(rollout[mask], trainer[mask], atol=1e-4)
    metrics = pd.read_parquet(tmp_path / "runs" / "zoom" / "metrics.parquet")
    assert {"agent/num_zooms", "agent/num_turns", "eval/zoom/reward/image"} <= set(metrics["name"])
