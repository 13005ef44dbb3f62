"""The check before the start: files, plug-ins, numbers, memory, columns."""

from __future__ import annotations

import dataclasses
import json
import shutil
import struct
from types import SimpleNamespace

import psutil
import pytest

from relax.config import DataConfig, ModalitiesConfig, ModelConfig, RolloutConfig, RunConfig, load_config
from relax.data.sources import FORMATS
from relax.errors import ConfigError, WiringError
from relax.records import WRITES
from relax.rewards.config import RewardConfig, RewardPart
from relax.rollout.sglang_config import SGLangConfig
from relax.run.wiring import build_tables, check_columns, check_wiring
from relax.train.config import TrainerConfig
from relax.train.layout import LayoutConfig


@pytest.fixture(scope="module")
def specs():
    return build_tables(RunConfig())


def test_check_wiring_accepts_the_defaults():
    """Every table of a run, with the media columns of the built-in modalities."""
    specs = check_wiring(RunConfig())
    assert sorted(specs) == [
        "eval_prompts", "eval_rollouts", "media", "metrics", "positions", "prompts", "rollouts", "row_errors",
    ]  # fmt: skip
    assert {"image_patches", "audio_features", "video_patches"} <= set(specs["media"].columns_by_name)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            RunConfig(data=DataConfig(manifest="no.jsonl")),
            f"data.manifest: must be {FORMATS}, got 'no.jsonl', where there is none",
        ),
        (
            RunConfig(data=DataConfig(eval={"held_out": "no.jsonl"})),
            f"data.eval.held_out: must be {FORMATS}, got 'no.jsonl', where there is none",
        ),
        (
            RunConfig(model=ModelConfig(path="nowhere")),
            "model.path: must be a Hugging Face directory with config.json, got 'nowhere'",
        ),
        (
            RunConfig(model=ModelConfig(path="models/Qwen3-8B", hub_name="Qwen/Qwen3-8B")),
            "model.path: must be a Hugging Face directory with config.json, got 'models/Qwen3-8B'; "
            "hf download Qwen/Qwen3-8B --local-dir models/Qwen3-8B fetches it",
        ),
        (
            RunConfig(prompts_per_step=2, rollout=RolloutConfig(num_workers=3)),
            "prompts_per_step: must be at least rollout.num_workers=3, got 2",
        ),
        (
            RunConfig(rollout=RolloutConfig(engine="sglang", num_workers=2, engine_urls=["http://a:1"])),
            "rollout.engine_urls: must be at least rollout.num_workers=2, got 1; "
            "a server's weights belong to one rollout service",
        ),
        (
            load_config([], ["algorithm=ppo", "roles.critic=service", "max_staleness=3"]),
            "checkpoint.keep_snapshots: must be at least max_staleness + 2 = 5 with roles.critic=service, got 4",
        ),
        (
            RunConfig(prompts_per_step=3, actor=TrainerConfig(layout=LayoutConfig(dp=4))),
            "prompts_per_step: must be at least actor.layout.dp=4, for each rank trains whole groups, got 3",
        ),
        (
            RunConfig(rollout=RolloutConfig(reward=RewardConfig(parts=[RewardPart(name="formal")]))),
            "rollout.reward: reward: must be one of ['code', 'exact_match', 'format', 'fuzzy_match', 'generative', "
            "'http', 'math', 'multiple_choice'] or 'package.module:function', got 'formal'; did you mean 'format'?",
        ),
    ],
)
def test_check_wiring_refuses_what_cannot_be(config, message):
    """One error with the key, the rule and the value."""
    with pytest.raises(ConfigError) as caught:
        check_wiring(config)
    assert str(caught.value) == message


def test_check_wiring_refuses_evaluation_services_on_servers_of_others(tmp_path):
    """A server's weights belong to one service, and these have none of their own."""
    held_out = tmp_path / "eval.jsonl"
    held_out.write_text('{"messages": [{"role": "user", "content": "red?"}], "answer": "red"}\n')
    urls = "rollout.engine_urls=[http://127.0.0.1:1]"
    words = ["rollout.engine=sglang", urls, f"data.eval.toy={held_out}", "evaluation.num_workers=2"]
    with pytest.raises(ConfigError) as caught:
        check_wiring(load_config([], words))
    assert str(caught.value) == (
        "evaluation.num_workers: must be 0 with rollout.engine_urls, got 2; "
        "those servers belong to the rollout services"
    )


def test_check_wiring_refuses_an_encoder_that_is_not_there():
    """The key is named, whatever the plug-in's own error."""
    with pytest.raises(ConfigError, match=r"^modalities\.extra: .*no_such_package"):
        check_wiring(RunConfig(modalities=ModalitiesConfig(extra=["no_such_package.depth:Depth"])))


@pytest.mark.parametrize("content", ["", "\n  \n"])
def test_check_wiring_refuses_an_empty_manifest(tmp_path, content):
    """A file without a row would leave every service waiting."""
    manifest = tmp_path / "empty.jsonl"
    manifest.write_text(content)
    with pytest.raises(ConfigError) as caught:
        check_wiring(RunConfig(data=DataConfig(manifest=str(manifest))))
    assert str(caught.value) == (
        f"data.manifest: must have a row, got '{manifest}', which is empty; write one JSON object a line"
    )


def test_check_wiring_refuses_a_model_that_memory_cannot_hold(tiny_dir, tmp_path):
    """The size comes from the file's header alone: four copies in the actor, one in the rollout service."""
    model_dir = shutil.copytree(tiny_dir, tmp_path / "model")
    header = json.dumps({"w": {"dtype": "F32", "shape": [1 << 50], "data_offsets": [0, 1 << 52]}}).encode()
    (model_dir / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(
        ConfigError, match=r"^model\.path: weights of 4503599\.6 GB need about 22517998\.1 GB"
    ):
        check_wiring(RunConfig(model=ModelConfig(path=str(model_dir))))


def test_check_wiring_counts_snapshots_in_shared_memory_and_checkpoints_in_background(tiny_dir, monkeypatch):
    """Neither is refused in the middle of a run, when it would not fit."""
    config = RunConfig(model=ModelConfig(path=str(tiny_dir)))
    config.weights.where, config.checkpoint.keep_snapshots = "shm", 1 << 30
    with pytest.raises(
        ConfigError,
        match=r"^weights\.where: shm must have room for 1073741825 snapshots of .* GB, got .* GB; lower",
    ):
        check_wiring(config)
    config = RunConfig(model=ModelConfig(path=str(tiny_dir)))
    config.checkpoint.interval_steps = 1
    weight_bytes = (tiny_dir / "model.safetensors").stat().st_size
    free = SimpleNamespace(available=7 * weight_bytes)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    with pytest.raises(ConfigError, match=r"^model\.path: weights of"):
        check_wiring(config)
    config.checkpoint.asynchronous = False
    assert check_wiring(config)


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json", "model.safetensors"])
def test_check_wiring_refuses_a_model_with_a_damaged_file(tiny_dir, tmp_path, name):
    """Under the key, and not as a traceback."""
    model_dir = shutil.copytree(tiny_dir, tmp_path / "model")
    (model_dir / name).write_bytes(b"\x10\0\0\0\0\0\0\0 this is neither JSON nor tensors")
    with pytest.raises(ConfigError, match=r"^model\.path: "):
        check_wiring(RunConfig(model=ModelConfig(path=str(model_dir))))


def test_check_columns_accepts_what_the_roles_write(specs):
    """The shipped roles fit the shipped tables."""
    check_columns(specs, WRITES)


def test_check_columns_names_a_column_that_a_role_invents(specs):
    """Role, table and column."""
    with pytest.raises(WiringError) as caught:
        check_columns(specs, {**WRITES, "judge": {"rollouts": ["verdict"]}})
    assert str(caught.value) == "role 'judge': columns of table 'rollouts' must exist, got ['verdict']"


def test_check_columns_names_a_column_that_nobody_writes(specs):
    """The consumer would wait for ever."""
    rollouts = specs["rollouts"]
    consumer = dataclasses.replace(rollouts.consumers[0], columns=("reward", "advantages"))
    changed = dataclasses.replace(rollouts, consumers=(consumer, *rollouts.consumers[1:]))
    writes = {"rollout": WRITES["rollout"], "preprocess": WRITES["preprocess"]}
    with pytest.raises(
        WiringError, match=r"^consumer 'actor' of table 'rollouts': nobody writes its columns \['adv"
    ):
        check_columns({"rollouts": changed, **{k: v for k, v in specs.items() if k != "rollouts"}}, writes)


def test_check_columns_names_a_table_that_is_not_there(specs):
    """With the tables that are."""
    with pytest.raises(WiringError, match=r"^role 'judge': table must be one of \[.*\], got 'verdicts'$"):
        check_columns(specs, {**WRITES, "judge": {"verdicts": []}})


def test_check_wiring_says_how_to_get_sglang(tmp_path):
    """The engine's environment is looked for before anything is prepared or started."""
    options = SGLangConfig(python=str(tmp_path / "python"))
    with pytest.raises(WiringError, match="run 'make sglang' first or name yours"):
        check_wiring(RunConfig(rollout=RolloutConfig(engine="sglang", sglang=options)))
    check_wiring(
        RunConfig(rollout=RolloutConfig(engine="sglang", sglang=options, engine_urls=["http://a:1"]))
    )


def test_check_wiring_refuses_a_layout_that_the_model_cannot_be_cut_by(tiny_dir):
    """Sizes are read from the model directory before any process starts."""
    config = RunConfig(model=ModelConfig(path=str(tiny_dir)), actor=TrainerConfig(layout=LayoutConfig(ep=3)))
    with pytest.raises(ConfigError) as caught:
        check_wiring(config)
    assert str(caught.value) == "actor.layout.ep: must divide the model's experts, 4, got 3"
