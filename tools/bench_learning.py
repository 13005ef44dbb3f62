"""Run the main job over seeds and staleness bounds and print what each run reached and how long it took.

    python tools/bench_learning.py --seeds 0 1 2 --bounds 0 1 4 --out runs/learning [key=value ...]

Everything is read from what the runs leave behind; nothing is assumed about them. One run at a time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import polars as pl

ROOT = Path(__file__).resolve().parent.parent
RUN_DEADLINE_S = 900
GOOD_REWARD = 0.9
WINDOW_STEPS = 10


def main() -> None:
    """Run every combination, print a Markdown table, write `learning.json` beside the runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 4], help="max_staleness of the runs")
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    arguments = parser.parse_args()
    results = []
    for bound in arguments.bounds:
        for seed in arguments.seeds:
            results.append(run_once(arguments.out, seed, bound, arguments.overrides))
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    (arguments.out / "learning.json").write_text(json.dumps(results, indent=1))
    print(table(results))


def run_once(out: Path, seed: int, bound: int, overrides: list[str]) -> dict:
    """Run the job once and return its figures; a run that fails says so instead."""
    name = f"k{bound}-seed{seed}"
    words = [f"run_root={out}", f"name={name}", "overwrite=true", "progress=plain"]
    words += [f"seed={seed}", f"max_staleness={bound}", *overrides]
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(ROOT / "pipelines" / "omni_grpo.py"), *words],
        capture_output=True,
        text=True,
        timeout=RUN_DEADLINE_S,
        check=False,
    )
    figures = {"max_staleness": bound, "seed": seed, "wall_s": time.monotonic() - started}
    if done.returncode:
        return figures | {"failed": done.stderr[-500:]}
    return figures | read_run(out / name)


def read_run(run_dir: Path) -> dict:
    """Return first and last held-out rewards, the step of good rewards, ages and speed of a finished run."""
    rollouts = pl.scan_parquet(run_dir / "rollouts" / "*.parquet")
    answers = sorted((run_dir / "evaluation").glob("*.parquet"))
    held_out = [_rewards(pl.read_parquet(path)) for path in (answers[0], answers[-1])]
    steps = rollouts.group_by("optimizer_step", "modality").agg(pl.mean("reward")).collect()
    curves = steps.pivot(on="modality", index="optimizer_step", values="reward").sort("optimizer_step")
    means = curves.select(pl.exclude("optimizer_step").rolling_mean(WINDOW_STEPS)).min_horizontal()
    good = [
        step for step, low in zip(curves["optimizer_step"], means, strict=True) if low and low >= GOOD_REWARD
    ]
    times = rollouts.select(
        count=pl.len(), seconds=(pl.max("created_at") - pl.min("created_at")).dt.total_microseconds() / 1e6
    ).collect()
    ages = rollouts.select(mean=pl.mean("staleness"), most=pl.max("staleness")).collect()
    return {
        "start": held_out[0],
        "end": held_out[1],
        "good_step": good[0] if good else None,
        "num_steps": curves.height,
        "training_s": times["seconds"][0],
        "samples_per_s": times["count"][0] / times["seconds"][0],
        "age_mean": ages["mean"][0],
        "age_max": ages["most"][0],
    }


def _rewards(answers: pl.DataFrame) -> dict[str, float]:
    means = answers.group_by("modality").agg(pl.mean("reward")).sort("modality")
    return dict(zip(means["modality"], means["reward"], strict=True))


def table(results: list[dict]) -> str:
    """Return the results as a Markdown table."""
    lines = [
        "| K | seed | held-out before | held-out after (audio / image / video) | all above 0.9 at step "
        "| age mean, max | samples/s | training s | whole run s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        if "failed" in result:
            lines.append(
                f"| {result['max_staleness']} | {result['seed']} | failed: {result['failed'][-80:]!r} |"
            )
            continue
        before, after = (
            " / ".join(f"{reward:.3f}" for reward in result[key].values()) for key in ("start", "end")
        )
        lines.append(
            f"| {result['max_staleness']} | {result['seed']} | {before} | {after} | {result['good_step']} "
            f"| {result['age_mean']:.2f}, {result['age_max']} | {result['samples_per_s']:.0f} "
            f"| {result['training_s']:.0f} | {result['wall_s']:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
