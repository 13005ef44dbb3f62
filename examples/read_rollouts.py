"""Read the recorded rollouts of a run with pandas, polars and numpy: `python examples/read_rollouts.py runs/omni_grpo`.

It needs no code of ours; docs/records.md explains each line.
"""

import sys

import numpy as np
import pandas as pd
import polars as pl

run = sys.argv[1] if len(sys.argv) > 1 else "runs/omni_grpo"
rollouts = pd.read_parquet(f"{run}/rollouts")
scan = pl.scan_parquet(f"{run}/rollouts/*.parquet")

print("\nreward by policy version and modality")
print(rollouts.pivot_table(index="trained_policy_version", columns="modality", values="reward"))

print("\nreward by modality")
print(scan.group_by("modality").agg(pl.col("reward").mean(), pl.len()).collect())

print("\nsample age in policy versions")
print(rollouts["staleness"].value_counts().sort_index())

print("\nslowest completions")
print(rollouts.nlargest(10, "generate_s")[["generate_s", "modality", "completion_text", "reference_answer"]])

print("\nimportance ratio by sample age")
print(
    scan.group_by("staleness")
    .agg(pl.mean("importance_ratio"), std=pl.std("importance_ratio"))
    .sort("staleness")
    .collect()
)

print("\nshare of answers in a wrong format")
print(
    (~rollouts["completion_text"].isin(rollouts["reference_answer"]))
    .groupby(rollouts["optimizer_step"])
    .mean()
)

print("\ncompletion length by rollout worker")
print(scan.group_by("rollout_worker").agg(pl.col("completion_token_ids").list.len().mean()).collect())

print("\nhow many policies sampled a rollout")
print(rollouts["token_policy_versions"].map(lambda versions: len(set(versions))).value_counts())

print("\nload of each expert")
print(np.bincount(np.frombuffer(b"".join(rollouts["routed_experts"].dropna()), "u1")))

print("\nexperts of one row, as [num_tokens - 1, num_layers, top_k]")
row = rollouts.dropna(subset="routed_experts").iloc[0]
print(np.frombuffer(row["routed_experts"], "u1").reshape(row["routed_experts_shape"]))

print("\nmetrics by step")
print(
    pd.read_parquet(f"{run}/metrics.parquet").pivot_table(
        index="step", columns=["role", "name"], values="value"
    )
)
