"""A run that came to its end: what it leaves, and what it does not leave."""

from __future__ import annotations

import pandas as pd
import polars as pl
import pyarrow.parquet as pq
import pytest

from relax.config import load_config
from tests.kit.job import GROUP_SIZE, NUM_STEPS, PROMPTS_PER_STEP, half_written, shared_memory

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rollouts(finished_run) -> pd.DataFrame:
    return pd.read_parquet(finished_run.run_dir / "rollouts")


def test_job_ends_well_and_leaves_nothing_behind(finished_run):
    """Exit 0, no process, no shared memory, nothing hidden, half-written or empty."""
    assert finished_run.exit_code == 0, finished_run.job.describe()
    assert finished_run.job.last_line == "ended: all steps done"
    assert finished_run.job.all_gone(5.0), [each.cmdline() for each in finished_run.job.processes()]
    assert half_written(finished_run.run_dir) == []
    ours = [name for name in shared_memory() - finished_run.shared_memory_before if "torch" in name]
    assert ours == []


def test_job_records_every_trained_rollout_once(finished_run, rollouts):
    """One file a policy version, whole groups of distinct rows, the numbers that the configuration asks for."""
    names = sorted(path.name for path in (finished_run.run_dir / "rollouts").iterdir())
    assert names == [f"{version:06d}.parquet" for version in range(NUM_STEPS)]
    assert len(rollouts) == NUM_STEPS * PROMPTS_PER_STEP * GROUP_SIZE
    assert rollouts["uid"].is_unique
    assert set(rollouts.groupby("group_id").size()) == {GROUP_SIZE}
    assert set(rollouts.groupby("optimizer_step").size()) == {PROMPTS_PER_STEP * GROUP_SIZE}


def test_job_keeps_the_policy_versions_straight(rollouts):
    """On policy every token comes from the weights that the step trained."""
    assert (rollouts["staleness"] == 0).all()
    assert (rollouts["policy_version_start"] == rollouts["trained_policy_version"]).all()
    assert (rollouts["optimizer_step"] == rollouts["trained_policy_version"] + 1).all()
    for row in rollouts.itertuples():
        assert set(row.token_policy_versions) == {row.trained_policy_version}
        lengths = {len(row.completion_token_ids), len(row.rollout_logprobs), len(row.trainer_logprobs)}
        assert lengths == {len(row.advantages)}
    assert abs(rollouts["importance_ratio"] - 1).max() < 1e-3


def test_job_scores_with_a_reward_of_the_user(finished_run, rollouts):
    """`rollout.reward=my_rewards:half` from PYTHONPATH decides the rewards."""
    assert set(rollouts["reward"]) == {0.0, 0.5}
    assert (rollouts["reward_half"] == rollouts["reward"]).all()
    assert rollouts["reward_error"].isna().all()
    assert load_config([finished_run.run_dir / "config.yaml"]).rollout.reward.labels == ["half"]


def test_job_records_are_read_by_polars(finished_run):
    """Lists, strings and numbers in natural types, lazily over all files."""
    scan = pl.scan_parquet(finished_run.run_dir / "rollouts" / "*.parquet")
    by_modality = (
        scan.group_by("modality").agg(pl.len(), pl.col("completion_token_ids").list.len().max()).collect()
    )
    assert set(by_modality["modality"]) == {"image", "audio", "video"}
    assert by_modality["len"].sum() == NUM_STEPS * PROMPTS_PER_STEP * GROUP_SIZE
    assert by_modality["completion_token_ids"].max() <= 3


def test_job_leaves_a_checkpoint_that_transformers_loads(finished_run, job_home):
    """Every weight is there under its name, and training has moved them; the Megatron state lies beside."""
    import torch
    from transformers import Qwen3OmniMoeThinkerForConditionalGeneration as HfThinker

    checkpoint = finished_run.run_dir / "checkpoint"
    trained, notes = HfThinker.from_pretrained(checkpoint / "huggingface", output_loading_info=True)
    assert [notes[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")] == [
        set(),
        set(),
        set(),
    ]
    start = HfThinker.from_pretrained(job_home / "model").state_dict()
    moved = [name for name, tensor in trained.state_dict().items() if not torch.equal(tensor, start[name])]
    assert any("layers" in name for name in moved)
    assert [path.name for path in (checkpoint / "megatron").iterdir()] == [f"{NUM_STEPS:06d}"]


def test_job_leaves_metrics_evaluations_and_a_report(finished_run):
    """metrics.parquet, TensorBoard events, held-out answers at both ends, and one page without scripts."""
    metrics = pq.read_table(finished_run.run_dir / "metrics.parquet").to_pandas()
    assert metrics.loc[(metrics["role"] == "actor") & (metrics["name"] == "rows"), "step"].tolist() == [
        1,
        2,
        3,
    ]
    assert set(metrics["role"]) >= {"actor", "rollout", "driver"}
    assert list((finished_run.run_dir / "tensorboard").glob("events.out.tfevents.*"))
    answers = {
        path.stem: pq.read_table(path) for path in (finished_run.run_dir / "evaluation").glob("*.parquet")
    }
    assert sorted(answers) == ["000000", f"{NUM_STEPS:06d}"]
    assert set(answers[f"{NUM_STEPS:06d}"]["policy_version_start"].to_pylist()) == {NUM_STEPS}
    assert {table.num_rows for table in answers.values()} == {6}
    page = (finished_run.run_dir / "report.html").read_text()
    assert "all steps done" in page
    assert "<script" not in page
    assert not (finished_run.run_dir / "row_errors.parquet").exists()
