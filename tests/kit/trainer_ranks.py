"""Trainers of several ranks as real processes that meet over gloo: `python -m tests.kit.trainer_ranks JOBS OUT`.

Each job is a model directory, a layout and settings; every rank trains some steps on its part of made-up batches. Rank
0 writes what it saw as JSON and the weights as safetensors. The batches are those that one process would train on.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
DEADLINE_S = 600.0
NUM_STEPS = 3
ALGORITHM = ("algorithm.entropy_coef=0.05", "algorithm.clip_high=2.0", "algorithm.clip_low=0.3")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One trainer to be run: its name, model, layout and settings, and what makes up its batches."""

    name: str
    model_dir: str
    layout: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    algorithm: Sequence[str] = ()
    """Words of the command line; later ones count."""
    batch: Mapping[str, Any] = field(default_factory=dict)
    unlike_routes: bool = False
    """One row of a group has its prompt's first token routed in another order, in the last layer alone."""
    resume: bool = False
    """Save after the first step, while another is trained, and go on from there with a trainer of another seed."""
    resume_from: str = ""
    """Go on after the first step from the checkpoint that this job has left, of whatever layout."""


@dataclass(frozen=True)
class Seen:
    """What a job left: the metrics of each step, logprobs of the last one, and the weights after all."""

    metrics: list[dict[str, float]]
    logprobs: list[list[float]]
    weights: dict[str, Any]


def run_job(job: Job, out_dir: Path) -> None:
    """Train one job on this rank and write what came of it on rank 0."""
    from safetensors.torch import save_file

    from relax.config import load_config
    from relax.models.spec import ThinkerSpec
    from relax.train.config import TrainerConfig
    from relax.train.layout import LayoutConfig
    from relax.train.trainer import Trainer
    from tests.unit.relax.train.conftest import make_train_batch

    config = TrainerConfig(
        **({"warmup_steps": 2, "epsilon": 1e-3} | dict(job.settings)), layout=LayoutConfig(**job.layout)
    )
    algorithm = load_config([], [*ALGORITHM, *job.algorithm]).algorithm
    trainer = Trainer(job.model_dir, config, algorithm, seed=0)
    spec, metrics = ThinkerSpec.from_pretrained(job.model_dir), []
    if job.resume_from:
        trainer.load_checkpoint(out_dir / f"{job.resume_from}.checkpoint")
    for step in range(1 if job.resume_from else 0, NUM_STEPS):
        batch = make_train_batch(spec, seed=step, **job.batch)
        if job.unlike_routes:
            batch.routed_experts[1][0, -1] = batch.routed_experts[1][0, -1, ::-1].copy()
        result = trainer.train_step(part_of(batch, trainer))
        metrics.append(result.metrics)
        if job.resume and step == 0:
            saving = trainer.begin_checkpoint(out_dir / f"{job.name}.checkpoint")
            other = make_train_batch(spec, seed=NUM_STEPS, **job.batch)
            trainer.train_step(part_of(other, trainer))  # must not be in the checkpoint
            saving.finish(DEADLINE_S)
            trainer = Trainer(job.model_dir, config, algorithm, seed=7)
            trainer.load_checkpoint(out_dir / f"{job.name}.checkpoint")
    weights = trainer.policy.checkpoint_tensors()
    check_buckets(trainer, weights)
    if trainer.world.rank == 0:
        seen = {"metrics": metrics, "logprobs": [row.tolist() for row in result.trainer_logprobs]}
        save_file(
            {name: tensor.contiguous() for name, tensor in weights.items()},
            out_dir / f"{job.name}.safetensors",
        )
        (out_dir / f"{job.name}.json").write_text(json.dumps(seen))


def check_buckets(trainer: Any, weights: Mapping[str, Any]) -> None:
    """Raise unless the weights that are gathered in small buckets are those that are gathered in one piece."""
    from safetensors.torch import load

    files = list(trainer.weight_export(20_000).files())
    found = {name: tensor for file in files for name, tensor in load(file.content.numpy().tobytes()).items()}
    same = {name for name in found.keys() & weights.keys() if found[name].equal(weights[name])}
    if same != weights.keys() or same != found.keys():
        raise RuntimeError(f"buckets must hold the weights, got others for {sorted(weights.keys() ^ same)}")


def part_of(batch: Any, trainer: Any) -> Any:
    """Return the batch as a rank has it: every `dp`-th group, its routing in the stage's layers (of two at most)."""
    import numpy as np

    world = trainer.world
    dp_rank, dp_size = world.place.dp_rank, world.layout.data_parallel
    rows = np.flatnonzero(np.asarray(batch.groups) % dp_size == dp_rank)
    own, num_layers = set(rows.tolist()), len(trainer.policy.routed_layers)
    layers = slice(0, num_layers) if world.is_first_stage else slice(-num_layers or 0, None)
    prompts = [
        prompt
        if group % dp_size == dp_rank and world.is_first_stage
        else dataclasses.replace(prompt, media={})
        for group, prompt in enumerate(batch.prompts)
    ]
    experts = [
        each[:, layers] if row in own and each is not None else None
        for row, each in enumerate(batch.routed_experts)
    ]
    return dataclasses.replace(batch, rows=rows, prompts=prompts, routed_experts=experts)


def read_seen(name: str, out_dir: Path) -> Seen:
    """Read what a job left."""
    from safetensors.torch import load_file

    told = json.loads((out_dir / f"{name}.json").read_text())
    return Seen(told["metrics"], told["logprobs"], load_file(out_dir / f"{name}.safetensors"))


def run_ranks(num_ranks: int, jobs: Sequence[Job], out_dir: Path, *, deadline_s: float = DEADLINE_S) -> None:
    """Run the jobs one after another on `num_ranks` processes; raise with their output if one fails."""
    path = out_dir / f"jobs-{num_ranks}.json"
    path.write_text(json.dumps([dataclasses.asdict(job) for job in jobs]))
    with rank_processes(
        num_ranks, [sys.executable, "-m", "tests.kit.trainer_ranks", str(path), str(out_dir)]
    ) as ranks:
        outputs = [rank.communicate(timeout=deadline_s)[0] for rank in ranks]
    failed = [output for rank, output in zip(ranks, outputs, strict=True) if rank.returncode]
    if failed:
        raise RuntimeError("\n---\n".join(output[-4000:] for output in failed))


@contextmanager
def rank_processes(
    num_ranks: int, command: Sequence[str], env: Mapping[str, str] | None = None
) -> Iterator[list[Any]]:
    """Start a command once for each rank, told by the environment where they meet; what is left is killed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            list(command),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=REPOSITORY,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | dict(env or {}),
        )
        for rank in range(num_ranks)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(timeout=30)
            if rank.stdout is not None:
                rank.stdout.close()


def main(jobs_path: str, out_dir: str) -> None:
    """Run all jobs on this rank."""
    from relax.train.runtime import leave_parallel

    for told in json.loads(Path(jobs_path).read_text()):
        run_job(Job(**told), Path(out_dir))
        leave_parallel(for_good=False)
    leave_parallel()


if __name__ == "__main__":
    main(*sys.argv[1:])
