"""Trainers on several real processes are one trainer: losses, gradient norms, routing and weights after three steps.

All jobs of as many ranks run one after another in one set of processes, since starting a process costs more than a job.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from pathlib import Path

import pytest
import torch

from relax.train.runtime import leave_parallel
from tests.kit.trainer_ranks import NUM_STEPS, Job, Seen, read_seen, run_job, run_ranks
from tests.unit.relax.train.conftest import make_thinker, thinker_config

NUM_EXPERTS = 4
LAYOUTS = {
    "dp2": {"dp": 2},
    "ep2": {"ep": 2},
    "tp2": {"tp": 2},
    "tp2ep2": {"tp": 2, "ep": 2},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
}
SMALL = {"max_tokens_per_micro_batch": 60}
"""Few enough for several micro-batches, and for ranks to have different numbers of them."""
VARIANTS = {
    "cut": {"settings": SMALL},
    "packed": {"settings": {"packing": True, **SMALL}},
    "rows": {"settings": {"share_prompts": False, "packing": True}},
    "recomputed": {"settings": {"recompute": True, **SMALL}},
}
ALGORITHMS = {
    "ppo": ["algorithm=ppo", "algorithm.kl_coef=0.1", "algorithm.critic.trunk_gradient=true"],
    "gspo": ["algorithm=gspo"],
    "m2po": ["algorithm=m2po", "algorithm.correction.m2_budget=1.0"],
    "reinforce": ["algorithm=reinforce_plus_plus", "algorithm.kl_coef=0.1"],
}
ALGORITHM_LAYOUTS = (
    *(("ppo", layout) for layout in ("dp2", "tp2", "pp2", "cp2", "ep2")),
    ("gspo", "tp2"),
    ("gspo", "cp2"),
    ("m2po", "dp2"),
    ("m2po", "pp2"),
    ("reinforce", "dp2"),
)
"""Those that look at the whole batch, at whole rows or at values, where these are spread out."""
OF_THE_BATCH = ("advantage_std", "correction_weight", "clip_fraction", "value_loss", "critic_grad_norm")
TOLERANCE = 1e-5
FROM_ONE = ("tp2", "ep2", "pp2", "tp2ep2")
"""Layouts that go on from a checkpoint of one process, and one process from theirs."""


def model_job(models: dict[str, Path], kind: str, name: str, layout=None, **changes) -> Job:
    """Return a job on the mixture of experts, with routing replay, or on the dense model."""
    settings = {"routing_replay": kind == "moe"} | changes.pop("settings", {})
    batch = {"routed": kind == "moe", "num_experts": NUM_EXPERTS}
    return Job(
        name=f"{kind}-{name}",
        model_dir=str(models[kind]),
        layout=layout or {},
        settings=settings,
        batch=batch,
        **changes,
    )


def jobs_of_two(models: dict[str, Path]) -> list[Job]:
    """Return every job that two ranks run."""
    made = [model_job(models, "moe", name, layout) for name, layout in LAYOUTS.items()]
    made += [model_job(models, "dense", n, layout) for n, layout in LAYOUTS.items() if "ep" not in layout]
    made.append(model_job(models, "dense", "tp2whole", {"tp": 2, "sequence_parallel": False}))
    for number, (name, layout) in enumerate(LAYOUTS.items()):
        for variant, changes in VARIANTS.items():
            if variant == "packed" or list(VARIANTS).index(variant) == number % len(VARIANTS):
                made.append(model_job(models, "moe", f"{name}-{variant}", layout, **changes))
    for name, layout in ALGORITHM_LAYOUTS:
        job = model_job(models, "moe", f"{layout}-{name}", LAYOUTS[layout], settings=SMALL)
        resume = (name, layout) == ("ppo", "dp2")
        made.append(dataclasses.replace(job, algorithm=ALGORITHMS[name], resume=resume))
    made.append(model_job(models, "moe", "pp2-unlike", {"pp": 2}, settings=SMALL, unlike_routes=True))
    made.append(model_job(models, "moe", "pp2-recomputed", {"pp": 2}, **VARIANTS["recomputed"]))
    made.append(
        model_job(
            models, "moe", "pp2-reference", {"pp": 2}, settings=SMALL, algorithm=["algorithm.kl_coef=0.1"]
        )
    )
    made.append(
        model_job(
            models, "moe", "ep2-reference", {"ep": 2}, settings=SMALL, algorithm=["algorithm.kl_coef=0.1"]
        )
    )
    for name in ("dp2", "tp2", "pp2", "ep2"):
        shared = {"distributed_optimizer": name in ("dp2", "ep2")}
        made.append(model_job(models, "moe", f"{name}-resumed", LAYOUTS[name], settings=shared, resume=True))
    made.append(
        model_job(
            models, "moe", "dp2-rounded", {"dp": 2}, settings={"dtype": "bf16", "distributed_optimizer": True}
        )
    )
    for name in FROM_ONE:
        shared = {"distributed_optimizer": name == "ep2"}
        job = model_job(models, "moe", f"{name}-from-one", LAYOUTS[name], settings=shared)
        made.append(dataclasses.replace(job, resume_from="moe-one-saved"))
    return list({job.name: job for job in made}.values())


def saved_by_one(models: dict[str, Path]) -> Job:
    """Return a job of one process that leaves a checkpoint after its first step."""
    return model_job(models, "moe", "one-saved", resume=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A mixture of experts with a dense layer between, and the same without experts."""
    home = tmp_path_factory.mktemp("models")
    experts = {"num_experts": NUM_EXPERTS}
    return {
        "moe": make_thinker(home / "moe", thinker_config(**experts)),
        "dense": make_thinker(home / "dense", thinker_config(**experts, mlp_only_layers=[0, 1, 2])),
    }


@pytest.fixture(scope="module")
def out_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where jobs leave what they saw."""
    return tmp_path_factory.mktemp("seen")


@pytest.fixture(scope="module")
def two_ranks(models, out_dir) -> Path:
    """All jobs of two ranks have run."""
    run_alone(saved_by_one(models), out_dir)
    run_ranks(2, jobs_of_two(models), out_dir)
    return out_dir


def run_alone(job: Job, out_dir: Path) -> Seen:
    """Run a job in this process."""
    torch.set_num_threads(1)
    run_job(job, out_dir)
    leave_parallel()
    return read_seen(job.name, out_dir)


def on_one_process(job: Job, out_dir: Path) -> Seen:
    """Return what the same job sees as one process that neither packs, cuts, resumes nor recomputes."""
    kept = {"routing_replay", "share_prompts", "dtype"}
    settings = {key: value for key, value in job.settings.items() if key in kept}
    plain = dataclasses.replace(job, layout={}, settings=settings, resume=False, resume_from="", name="")
    number = zlib.crc32(json.dumps(dataclasses.asdict(plain), sort_keys=True).encode())
    plain = dataclasses.replace(plain, name=f"one-{number}")
    if not (out_dir / f"{plain.name}.json").exists():
        run_alone(plain, out_dir)
    return read_seen(plain.name, out_dir)


def assert_same(seen: Seen, expected: Seen, tolerance: float = TOLERANCE) -> None:
    """Losses, gradient norms, logprobs, routing and weights are equal, and not because nothing happened."""
    first = len(expected.metrics) - len(seen.metrics)  # one that went on has not seen the steps before
    for ours, theirs in zip(seen.metrics, expected.metrics[first:], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=tolerance)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=tolerance)
        assert ours.get("routing_mismatch") == theirs.get("routing_mismatch")
        assert ours["entropy_nats"] == pytest.approx(theirs["entropy_nats"], abs=tolerance)
        for key in OF_THE_BATCH:
            assert ours.get(key) == pytest.approx(theirs.get(key), abs=tolerance), key
    assert seen.weights.keys() == expected.weights.keys()
    far = {n: float((w - expected.weights[n]).abs().max()) for n, w in seen.weights.items()}
    assert {name: distance for name, distance in far.items() if distance > tolerance} == {}
    for ours, theirs in zip(seen.logprobs, expected.logprobs, strict=True):
        assert ours == pytest.approx(theirs, abs=tolerance)


NAMES = [job.name for job in jobs_of_two({"moe": Path(), "dense": Path()})]


@pytest.mark.parametrize("name", [name for name in NAMES if "rounded" not in name])
def test_layout_equals_one_process(models, two_ranks, name) -> None:
    """Dense or not, cut, packed, recomputed, resumed or against a reference: the same numbers as one process."""
    job = next(job for job in jobs_of_two(models) if job.name == name)
    assert_same(read_seen(name, two_ranks), on_one_process(job, two_ranks))


@pytest.mark.parametrize("name", ["tp2", "ep2", "pp2", "dp2"])
def test_one_process_goes_on_from_another_layout(models, two_ranks, name) -> None:
    """Weights and optimizer state of two ranks: the next steps are those of a run that never changed."""
    left = next(job for job in jobs_of_two(models) if job.name == f"moe-{name}-resumed")
    job = dataclasses.replace(
        model_job(models, "moe", f"one-from-{name}"), batch=left.batch, resume_from=left.name
    )
    seen = run_alone(job, two_ranks)
    assert len(seen.metrics) == NUM_STEPS - 1
    assert_same(seen, on_one_process(left, two_ranks))


def test_one_process_moves_every_weight_that_a_layout_could_get_wrong(models, two_ranks) -> None:
    """The equalities above compare weights that three steps have moved by more than a hundred tolerances."""
    from safetensors.torch import load_file

    job = next(job for job in jobs_of_two(models) if job.name == "moe-dp2")
    before = load_file(models["moe"] / "model.safetensors")
    after = on_one_process(job, two_ranks).weights
    moved = {name: float((after[name] - tensor).abs().max()) for name, tensor in before.items()}
    for part in (
        "embed_tokens",
        "lm_head",
        "q_norm",
        "input_layernorm",
        "mlp.gate.",
        "experts.3",
        "visual",
        "audio",
    ):
        assert max(distance for name, distance in moved.items() if part in name) > 100 * TOLERANCE, part


def test_bf16_with_shared_out_masters_follows_one_process(models, two_ranks) -> None:
    """Gradients are rounded in another order, so losses agree to bf16's precision only; weights are bf16."""
    job = next(job for job in jobs_of_two(models) if job.name == "moe-dp2-rounded")
    seen, expected = read_seen(job.name, two_ranks), on_one_process(job, two_ranks)
    for ours, theirs in zip(seen.metrics, expected.metrics, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=0.05)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.05)
        assert ours["step_skipped"] == 0
    far = max(float((w - expected.weights[name]).abs().max()) for name, w in seen.weights.items())
    assert far < 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["tp2dp2ep4", "tp2pp2", "cp2tp2", "cp2dp2ep2", "pp2dp2ep2"], ids=lambda name: name
)
def test_layout_of_four_ranks_equals_one_process(models, out_dir, four_ranks, name) -> None:
    """Two kinds of parallelism at once, with several packed micro-batches, a reference and a critic."""
    job = next(job for job in jobs_of_four(models) if job.name == f"moe-{name}")
    assert_same(read_seen(job.name, out_dir), on_one_process(job, out_dir))


def jobs_of_four(models: dict[str, Path]) -> list[Job]:
    """Return every job that four ranks run."""
    layouts = {
        "tp2dp2ep4": {"tp": 2, "dp": 2, "ep": 4},
        "tp2pp2": {"tp": 2, "pp": 2},
        "cp2tp2": {"cp": 2, "tp": 2},
        "cp2dp2ep2": {"cp": 2, "dp": 2, "ep": 2},
        "pp2dp2ep2": {"pp": 2, "dp": 2, "ep": 2},
    }
    packed = {"packing": True, **SMALL}
    made = [model_job(models, "moe", name, layout, settings=packed) for name, layout in layouts.items()]
    return [dataclasses.replace(job, algorithm=ALGORITHMS["ppo"]) for job in made]


@pytest.fixture(scope="module")
def four_ranks(models, out_dir) -> None:
    """All jobs of four ranks have run."""
    run_ranks(4, jobs_of_four(models), out_dir)
