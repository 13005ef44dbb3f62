"""Reads what a run has left on disk and says what is wrong with its books. Not a fake: real files of real runs."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from relax.run.ledger import Ledger


def faults(run_dir: Path, *, num_steps: int, prompts_per_step: int, group_size: int) -> list[str]:
    """Return what does not hold: rows trained once, steps whole and measured once, nothing lost in the queue."""
    rollouts = pd.read_parquet(run_dir / "rollouts")
    found = []
    if not rollouts["uid"].is_unique:
        found.append(f"rows recorded twice: {sorted(rollouts.loc[rollouts['uid'].duplicated(), 'uid'])[:5]}")
    steps = rollouts.groupby("optimizer_step").size()
    if steps.to_dict() != dict.fromkeys(range(1, num_steps + 1), prompts_per_step * group_size):
        found.append(f"rows by step: {steps.to_dict()}")
    groups = rollouts.groupby("group_id")
    if set(groups.size()) != {group_size} or set(groups["optimizer_step"].nunique()) != {1}:
        found.append("groups are not whole within one step")
    if (rollouts["staleness"] != rollouts["trained_policy_version"] - rollouts["policy_version_start"]).any():
        found.append("ages are not what the versions say")
    measured = actor_metrics(run_dir)
    if measured["rows"].to_dict() != dict.fromkeys(range(1, num_steps + 1), prompts_per_step * group_size):
        found.append(f"rows by step in the metrics: {measured['rows'].to_dict()}")
    ledger = Ledger(**events(run_dir)[-1]["ledger"])
    if ledger.differences():
        found.append(f"ledger: {ledger} fails by {ledger.differences()}")
    if ledger.rows_trained != num_steps * prompts_per_step * group_size:
        found.append(f"rows trained by the queue's books: {ledger.rows_trained}")
    return found


def actor_metrics(run_dir: Path) -> pd.DataFrame:
    """Return what the actor measured but times, a row a step, a column a name. A value that is there twice raises."""
    metrics = pd.read_parquet(run_dir / "metrics.parquet")
    is_time = metrics["name"].str.startswith("time/") | metrics["name"].str.endswith("_s")
    return metrics[(metrics["role"] == "actor") & ~is_time].pivot(
        index="step", columns="name", values="value"
    )


def events(run_dir: Path) -> list[dict]:
    """Return the run's history."""
    return [json.loads(line) for line in (run_dir / "history.jsonl").read_text().splitlines()]
