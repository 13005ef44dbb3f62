"""Roles as services of their own: the run is the one that it would be with them folded into the actor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file

from tests.kit.job import GROUP_SIZE, PROMPTS_PER_STEP, Job, half_written, start_job, toy_words
from tests.kit.ledger import actor_metrics, events, faults

pytestmark = pytest.mark.slow

NUM_STEPS = 6
DEADLINE_S = 400.0
"""Ten processes on a machine with two cores, which others may use, too."""
ALGORITHM = (
    "algorithm=ppo",
    "algorithm.kl_coef=0.05",
    "algorithm.critic.lr=0.05",
    "algorithm.proximal=trainer",
    "algorithm.correction.weight=truncate",
)
RUN = (
    f"num_steps={NUM_STEPS}",
    "max_staleness=0",
    "checkpoint.interval_steps=2",
    "checkpoint.keep=3",
    *ALGORITHM,
)
ALL = ("reference", "actor_fwd", "critic", "advantages")
SERVED = tuple(f"roles.{role}=service" for role in ALL)
OF_CRITIC = (
    "value_loss",
    "value_mean",
    "return_mean",
    "value_explained_variance",
    "critic_grad_norm",
    "critic_lr",
)


@pytest.fixture(scope="module")
def folded(job_home: Path) -> Path:
    """The directory of a run whose actor computes all itself."""
    with start_job(job_home, *toy_words(job_home), *RUN, name="folded") as job:
        assert job.wait(DEADLINE_S) == 0, job.describe()
    return job.run_dir


def critic_metrics(run_dir: Path) -> pd.DataFrame:
    """Return what a critic that is a service measured but times, a row a step."""
    metrics = pd.read_parquet(run_dir / "metrics.parquet")
    chosen = metrics[(metrics["role"] == "critic") & metrics["name"].isin(OF_CRITIC)]
    return chosen.pivot(index="step", columns="name", values="value")


def assert_same_run(served: Job, folded: Path) -> None:
    """Fail unless both runs have the same books, metrics, advantages and weights but for rounding."""
    run_dir = served.run_dir
    assert (
        faults(run_dir, num_steps=NUM_STEPS, prompts_per_step=PROMPTS_PER_STEP, group_size=GROUP_SIZE) == []
    )
    before, after = actor_metrics(folded), actor_metrics(run_dir).drop(columns=["loss"])
    own = after[[name for name in after.columns if not name.startswith("proximal/")]]
    np.testing.assert_allclose(own, before[own.columns], rtol=1e-3, atol=1e-5)
    of_critic = critic_metrics(run_dir)
    np.testing.assert_allclose(of_critic, before[of_critic.columns], rtol=1e-3, atol=1e-5)
    assert set(of_critic.columns) == set(OF_CRITIC)
    rows = [pd.read_parquet(each / "rollouts").set_index("uid").sort_index() for each in (run_dir, folded)]
    assert rows[0].index.equals(rows[1].index)
    for name in ("advantages", "trainer_logprobs"):
        np.testing.assert_allclose(*(np.concatenate(each[name].tolist()) for each in rows), atol=1e-4)
    weights = [
        load_file(each / "checkpoint" / "huggingface" / "model.safetensors") for each in (run_dir, folded)
    ]
    for name, tensor in weights[0].items():
        np.testing.assert_allclose(tensor, weights[1][name], atol=1e-5, err_msg=name)


def test_run_with_all_roles_as_services_is_the_folded_one(job_home, folded):
    """Metrics, advantages and weights; the columns of the services are recorded; nothing is left over."""
    with start_job(job_home, *toy_words(job_home), *RUN, *SERVED, name="served") as job:
        assert job.wait(DEADLINE_S) == 0, job.describe()
    assert_same_run(job, folded)
    rows = pd.read_parquet(job.run_dir / "rollouts")
    lengths = rows["completion_token_ids"].map(len)
    for name in ("ref_logprobs", "proximal_logprobs", "values", "raw_advantages", "returns"):
        assert rows[name].map(len).equals(lengths), name
    assert (rows["proximal_policy_version"] == rows["trained_policy_version"]).all()
    assert (actor_metrics(job.run_dir)["proximal/scored_anew"] == 0).all()
    assert half_written(job.run_dir) == []


def test_run_survives_the_death_of_each_service(job_home, folded):
    """Each is started again alone, the actor with all of them from the checkpoint: the same numbers in the end."""
    with start_job(job_home, *toy_words(job_home), *RUN, *SERVED, name="deaths") as job:
        for step, role in enumerate((*ALL, "actor"), start=1):
            job.until_step(step, DEADLINE_S)
            job.kill(role)
        assert job.wait(DEADLINE_S) == 0, job.describe()
    assert_same_run(job, folded)
    kinds = [event["event"] for event in events(job.run_dir)]
    assert "went_back" in kinds
    assert kinds.count("restarted") >= len(ALL)
