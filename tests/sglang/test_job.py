"""The training program with a real SGLang server."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from tests.kit.job import GROUP_SIZE, NUM_STEPS, PROMPTS_PER_STEP, start_job


def test_job_trains_through_a_real_server(home, tmp_path) -> None:
    """Every step is trained on what the server sampled, at most one version old, with routing."""
    words = [
        f"data.manifest={home.toy}/train.jsonl",
        f"data.eval.toy={home.toy}/eval.jsonl",
        f"model.path={home.model}",
        "rollout.engine=sglang",
        "rollout.sglang.device=cpu",
        "rollout.sglang.max_total_tokens=8192",
    ]
    with start_job(tmp_path, *words) as job:
        assert job.wait(900.0) == 0, job.describe()
        files = sorted(Path(job.run_dir / "rollouts").rglob("*.parquet"))
        rows = pq.ParquetDataset(files).read().to_pylist()
        assert len(rows) == NUM_STEPS * PROMPTS_PER_STEP * GROUP_SIZE
        for row in rows:
            assert set(row["token_policy_versions"]) <= {
                row["policy_version_start"],
                row["policy_version_end"],
            }
            assert 0 <= row["staleness"] <= 1
            assert len(row["rollout_logprobs"]) == len(row["completion_token_ids"])
        assert (job.run_dir / "logs" / "sglang-0.log").is_file()
        assert job.all_gone(30.0)
