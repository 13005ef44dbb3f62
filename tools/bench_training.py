"""The trainer, side by side: routing replay on and off, plain transformers, and weights published and adopted.

    python tools/bench_training.py --write BENCHMARKS.md        # about ten minutes on two quiet cores
    python tools/bench_training.py --jobs 0 --pairs 4           # a look, without whole jobs

Two models: the main job's, on batches of its size with a picture, a sound or a film in each prompt, and a larger text
one. Rollouts are the embedded engine's. What is compared takes turns on the same batches; ratios are of neighbours.
Steps are timed in CPU time of their one thread, which other work on the machine disturbs least, the rest by the clock.
Routing replay is also measured in whole main jobs, whose step contains waiting and publishing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

import numpy as np
import polars as pl
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # for the plain reference, which is a part of the tests

from bench_learning import run_once  # noqa: E402
from busbench.report import Summary, number, replace_block, summarize, table  # noqa: E402

from relax.config import RunConfig, load_config  # noqa: E402
from relax.models.inputs import PromptInputs  # noqa: E402
from relax.models.spec import ThinkerSpec  # noqa: E402
from relax.models.tiny import TinyConfig, make_tiny_omni  # noqa: E402
from relax.rollout.torch_engine import TorchEngine  # noqa: E402
from relax.train.batch import TrainBatch  # noqa: E402
from relax.train.trainer import Trainer  # noqa: E402
from tests.kit.plain_grpo import PlainGrpo  # noqa: E402
from tests.kit.rollouts import plain_samples, plain_settings, roll_out  # noqa: E402
from tests.unit.relax.train.conftest import make_prompt  # noqa: E402

CONFIG = ROOT / "conf" / "omni_grpo.yaml"
NUM_BATCHES = 3
FIRST_STEPS = 10
"""Steps of a job that do not count."""
JOB_WORDS = ("num_steps=80", "evaluation.interval_steps=0", "evaluation.max_prompts=6")
WITH = ("actor.routing_replay=true",)
WITHOUT = ("actor.routing_replay=false", "actor.routing_metrics=false")


@dataclass(frozen=True)
class Case:
    """A model and the batches that it is trained on."""

    title: str
    sizes: TinyConfig
    kinds: tuple[tuple[str, ...], ...]
    num_groups: int
    group_size: int
    num_prompt_tokens: int
    """Prompts are filled up with words to this length; 0: they are as they are."""
    max_new_tokens: int
    pairs_share: float
    """Its part of the pairs asked for."""


CASES = (
    Case("main job", TinyConfig(), (("image",), ("audio",), ("video",)), 24, 8, 0, 3, 1.0),
    Case(
        "256 wide, 8 layers, 16 experts top 4",
        TinyConfig(hidden_size=256, num_layers=8, num_experts=16, top_k=4),
        ((),),
        2,
        4,
        224,
        32,
        0.25,
    ),
)


def main(argv: list[str] | None = None) -> None:
    """Measure, print Markdown, write the page that was asked for."""
    arguments = _parse(argv)
    torch.set_num_threads(1)
    config = load_config([CONFIG], ["actor.warmup_steps=0"])
    started_s = time.monotonic()
    blocks: dict[str, list[list[str]]] = {"replay": [], "plain": [], "weights": []}
    with tempfile.TemporaryDirectory(prefix="bench_training.") as directory:
        for place, case in enumerate(CASES):
            model_dir = make_tiny_omni(Path(directory) / str(place), seed=0, config=case.sizes)
            batches = list(record(case, model_dir))
            pairs = max(3, round(arguments.pairs * case.pairs_share))
            blocks["replay"].append(replay_row(case, config, model_dir, batches, pairs))
            blocks["plain"].append(plain_row(case, config, model_dir, batches, max(3, pairs // 4)))
            blocks["weights"].append(weights_row(case, config, model_dir, arguments.rounds))
            rows = [found[-1] for found in blocks.values()]
            print(f"{time.monotonic() - started_s:.0f} s: {rows}", file=sys.stderr, flush=True)
    if arguments.jobs:
        blocks["replay"].append(jobs_row(arguments.jobs, arguments.out))
    page = markdown(blocks)
    print(page)
    print(f"{time.monotonic() - started_s:.0f} s in all", file=sys.stderr)
    if arguments.write:
        arguments.write.write_text(replace_block(arguments.write.read_text(), page, "bench_training"))


def record(case: Case, model_dir: Path) -> Iterator[TrainBatch]:
    """Roll out the case's batches."""
    engine, spec, rng = (
        TorchEngine(model_dir),
        ThinkerSpec.from_pretrained(model_dir),
        np.random.default_rng(0),
    )
    for seed in range(NUM_BATCHES):
        prompts = []
        for kinds, _ in zip(cycle(case.kinds), range(case.num_groups), strict=False):
            prompt = make_prompt(rng, kinds, spec)
            words = rng.integers(10, 400, max(0, case.num_prompt_tokens - len(prompt.token_ids)))
            token_ids = np.concatenate([prompt.token_ids, words.astype(np.int32)])
            prompts.append(PromptInputs(token_ids, prompt.media))
        size = {"group_size": case.group_size, "max_new_tokens": case.max_new_tokens}
        # Random weights sample special tokens as often as any: of long completions few have none.
        yield roll_out(engine, prompts, spec, seed=seed, oversampling=2 + case.max_new_tokens // 8, **size)
    engine.close()


def take_turns(
    actions: Mapping[str, Callable[[TrainBatch], object]], batches: list[TrainBatch], rounds: int
) -> dict[str, list[float]]:
    """Return CPU seconds of each action in each round, all on the round's batch, the first one another every time."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    names = list(actions)
    for turn in range(-1, rounds):  # the first round warms up
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            begin = time.process_time()
            actions[name](batches[turn % len(batches)])
            if turn >= 0:
                seconds[name].append(time.process_time() - begin)
    return seconds


def replay_row(
    case: Case, config: RunConfig, model_dir: Path, batches: list[TrainBatch], pairs: int
) -> list[str]:
    """Return what routing replay costs a training step."""
    algorithm = config.algorithm
    trainers = {
        name: Trainer(
            model_dir,
            replace(config.actor, routing_replay=name == "with", routing_metrics=name == "with"),
            algorithm,
            seed=0,
        )
        for name in ("without", "with")
    }
    seconds = take_turns({name: each.train_step for name, each in trainers.items()}, batches, pairs)
    return overhead(f"{case.title}: training step", seconds["with"], seconds["without"])


def plain_row(
    case: Case, config: RunConfig, model_dir: Path, batches: list[TrainBatch], rounds: int
) -> list[str]:
    """Return our step beside that of plain transformers and torch on the same batches."""
    samples = {id(batch): plain_samples(batch) for batch in batches}
    max_rows = case.num_groups * case.group_size
    plain = PlainGrpo(model_dir, plain_settings(config, replay=True, max_rows=max_rows))
    ours = Trainer(model_dir, config.actor, config.algorithm, seed=0)
    rows = Trainer(model_dir, replace(config.actor, share_prompts=False), config.algorithm, seed=0)
    actions = {
        "ours": ours.train_step,
        "rows": rows.train_step,
        "plain": lambda batch: plain.step(samples[id(batch)]),
    }
    seconds = take_turns(actions, batches, rounds)
    cells = [case.title, *(number(1e3 * statistics.median(seconds[name])) for name in actions)]
    return [*cells, *(_ratio(seconds[name], seconds["plain"]).text() for name in ("ours", "rows"))]


def weights_row(case: Case, config: RunConfig, model_dir: Path, rounds: int) -> list[str]:
    """Return how long a policy version takes out of the trainer and into the engine."""
    trainer, engine = Trainer(model_dir, config.actor, config.algorithm, seed=0), TorchEngine(model_dir)
    num_bytes = sum(each.nbytes for each in trainer.policy.checkpoint_tensors().values())
    publish_s, adopt_s, copy_s = [], [], []
    with tempfile.TemporaryDirectory(prefix="bench_training.") as directory:
        for version in range(rounds + 1):
            snapshot = Path(directory) / f"{version:06d}"
            with torch.no_grad():  # an engine does not read again what has not changed
                torch._foreach_mul_(list(trainer.policy.parameters()), 1.0 + 1e-6)
            begin = time.perf_counter()
            trainer.publish(snapshot, version)
            published = time.perf_counter()
            engine.adopt(snapshot, version)
            adopted = time.perf_counter()
            torch._foreach_mul(list(trainer.policy.parameters()), 1.0)
            copied = time.perf_counter()
            if version:
                publish_s.append(published - begin)
                adopt_s.append(adopted - published)
                copy_s.append(copied - adopted)
    engine.close()
    times = [summarize(1e3 * s for s in each).text() for each in (publish_s, adopt_s)]
    ratios = [_ratio(each, copy_s).text() for each in (publish_s, adopt_s)]
    return [case.title, number(num_bytes / 1e6), *times, *ratios]


def jobs_row(rounds: int, out: Path) -> list[str]:
    """Return what routing replay costs a step of whole main jobs, from one batch trained on to the next."""
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    for turn in range(rounds):
        for name in ("without", "with") if turn % 2 else ("with", "without"):
            words = WITH if name == "with" else WITHOUT
            result = run_once(out, 0, 1, [*JOB_WORDS, *words])
            if "failed" in result:
                raise SystemExit(f"bench_training: the job {name} replay failed: {result['failed']}")
            seconds[name].append(step_s(out / "k1-seed0"))
            print(f"job {turn} {name}: {1e3 * seconds[name][-1]:.1f} ms a step", file=sys.stderr, flush=True)
    return overhead("main job: whole step of a job", seconds["with"], seconds["without"])


def step_s(run_dir: Path) -> float:
    """Return the median time of a step: what the actor spent in all its parts, waiting included."""
    metrics = pl.read_parquet(run_dir / "metrics.parquet")
    parts = metrics.filter(
        (pl.col("role") == "actor") & pl.col("name").str.starts_with("time/") & (pl.col("step") > FIRST_STEPS)
    )
    return float(parts.group_by("step").agg(pl.sum("value"))["value"].median())  # type: ignore[arg-type]


def _ratio(values: list[float], base: list[float]) -> Summary:
    return summarize(value / below for value, below in zip(values, base, strict=True))


def overhead(title: str, with_s: list[float], without_s: list[float]) -> list[str]:
    """Return a row: both medians, and the quartiles of the ratio of neighbours."""
    ratios = [100 * (above / below - 1) for above, below in zip(with_s, without_s, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    medians = [number(1e3 * statistics.median(each)) for each in (without_s, with_s)]
    return [title, str(len(ratios)), *medians, f"{middle:+.1f} ({low:+.1f} to {high:+.1f})"]


def markdown(blocks: Mapping[str, list[list[str]]]) -> str:
    """Return the section."""
    replay = ["what", "pairs", "without ms", "with ms", "overhead of replay, % (quartiles)"]
    plain = [
        "model",
        "ours ms",
        "ours, a sequence a row, ms",
        "plain ms",
        "ours / plain",
        "a sequence a row / plain",
    ]
    weights = ["model", "MB", "publish ms", "adopt ms", "publish / one copy", "adopt / one copy"]
    return "\n\n".join(
        [
            f"Python {sys.version.split()[0]}, torch {torch.__version__}, one thread; {os.cpu_count()} cores, load "
            f"{os.getloadavg()[0]:.1f} at the end. Medians, with the smallest and largest in brackets where nothing "
            "else is said; what is compared took turns on the same rollouts. Steps in CPU time, the rest by the clock.",
            table(replay, blocks["replay"]),
            table(plain, blocks["plain"]),
            table(weights, blocks["weights"]),
        ]
    )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pairs", type=int, default=60, help="steps with and without replay, of the small model"
    )
    parser.add_argument("--rounds", type=int, default=15, help="weights published and adopted")
    parser.add_argument("--jobs", type=int, default=9, help="main jobs with and without replay; 0: none")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_training"), help="where the jobs run")
    parser.add_argument(
        "--write", type=Path, help="page whose part between the bench_training markers is replaced"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
