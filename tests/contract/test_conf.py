"""Configuration: every shipped file loads, every field is explained, every mistake is named."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from flight.files.table_config import load_tables
from relax.config import MODEL_PRESETS, PRESETS, load_config, save_config
from relax.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
TABLE_FILES = [ROOT / "conf" / "tables.yaml"]
CONF_FILES = sorted({*(ROOT / "conf").rglob("*.yaml")} - {*TABLE_FILES})
PROGRAM = ROOT / "pipelines" / "omni_grpo.py"


@pytest.mark.parametrize("path", CONF_FILES, ids=lambda path: path.stem)
def test_conf_file_loads(path: Path) -> None:
    """Every shipped configuration file is a valid configuration."""
    assert load_config([path]).num_steps >= 1


@pytest.mark.parametrize("path", TABLE_FILES, ids=lambda path: path.stem)
def test_tables_file_loads(path: Path) -> None:
    """Every shipped file of tables declares tables that can work."""
    assert [spec.name for spec in load_tables(path)] == ["media", "prompts", "rollouts"]


def test_config_survives_being_saved(tmp_path: Path) -> None:
    """What a run saves is what its services load."""
    config = load_config([ROOT / "conf" / "omni_grpo.yaml"], ["max_staleness=4", "data.lookahead_steps=3"])
    save_config(config, tmp_path / "config.yaml")
    assert load_config([tmp_path / "config.yaml"]) == config


PRESET_NAMES = sorted(path.stem for path in PRESETS.glob("*.yaml"))


def test_presets_are_the_algorithms_that_are_promised() -> None:
    """One file each, whose name its values carry."""
    assert PRESET_NAMES == [
        "cispo",
        "dapo",
        "decoupled",
        "dr_grpo",
        "grpo",
        "gspo",
        "icepop",
        "m2po",
        "ppo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "rloo",
        "sapo",
    ]
    assert [load_config([], [f"algorithm={name}"]).algorithm.name for name in PRESET_NAMES] == PRESET_NAMES


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_preset_comes_before_other_words_and_after_the_file(tmp_path: Path, name: str) -> None:
    """Whatever the order of the words; the file's coefficient stays, its other choices of an algorithm do not."""
    file = tmp_path / "job.yaml"
    file.write_text("algorithm: {kl_coef: 0.07, policy_loss: sapo, critic: {lr: 0.003}}")
    words = ["algorithm.clip_high=0.27", f"algorithm={name}", "algorithm.entropy_coef=0.01"]
    for order in (words, words[::-1]):
        made = load_config([file], order).algorithm
        assert (made.kl_coef, made.clip_high, made.entropy_coef, made.critic.lr) == (0.07, 0.27, 0.01, 0.003)
        assert made.policy_loss == load_config([], [f"algorithm={name}"]).algorithm.policy_loss


def test_preset_in_a_file_comes_before_its_other_keys(tmp_path: Path) -> None:
    """As a word or as a key of the section."""
    file = tmp_path / "job.yaml"
    for text in ("algorithm: gspo", "algorithm: {clip_high: 0.1, preset: gspo}"):
        file.write_text(text)
        made = load_config([file]).algorithm
        assert (made.name, made.policy_loss) == ("gspo", "gspo")
    assert made.clip_high == 0.1
    assert load_config([file], ["algorithm=dapo"]).algorithm.clip_high == 0.28


def test_saved_preset_needs_no_preset_file(tmp_path: Path) -> None:
    """All its values are in the file; its name is a label."""
    config = load_config([], ["algorithm=dapo", "rollout.max_new_tokens=7"])
    save_config(config, tmp_path / "config.yaml")
    assert "preset" not in (tmp_path / "config.yaml").read_text()
    loaded = load_config([tmp_path / "config.yaml"])
    assert loaded == config
    assert loaded.algorithm.sampling.overlong_limit_tokens == 7


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("algorithm=grop", "got 'grop'; did you mean 'grpo'?"),
        ("algorithm.preset=xyz", "got 'xyz'; to change one value say algorithm.KEY=VALUE"),
        ("algorithm=", "got None; to change one value say algorithm.KEY=VALUE"),
        ("algorithm=[1]", "got [1]; to change one value say algorithm.KEY=VALUE"),
    ],
)
def test_unknown_preset_is_refused(word: str, message: str) -> None:
    """With all that there are."""
    with pytest.raises(ConfigError) as raised:
        load_config([], [word])
    names = ", ".join(PRESET_NAMES)
    assert str(raised.value) == f"command line {word!r}: algorithm must be one of {names}, {message}"


MODEL_NAMES = sorted(path.stem for path in MODEL_PRESETS.glob("*.yaml"))


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_model_preset_names_one_checkpoint(name: str) -> None:
    """Its name on the hub, a directory under `model.root`, and a file name that is made of it."""
    made = load_config([ROOT / "conf" / "omni_grpo.yaml"], [f"model={name}", "model.root=/checkpoints"])
    hub_name = made.model.hub_name or ""
    last = hub_name.partition("/")[2]
    assert made.model.path == f"/checkpoints/{last}"
    assert last.removesuffix("-Instruct").lower().replace("-", "_").replace(".", "_") == name
    assert (made.actor.dtype, made.actor.lr, made.actor.recompute) == ("bf16", 1e-6, True)


def test_model_preset_gives_way_to_other_words() -> None:
    """In whatever order; an algorithm beside it is chosen too."""
    words = ["model.path=elsewhere", "algorithm=gspo", "model=qwen3_8b", "actor.lr=2e-6"]
    for order in (words, words[::-1]):
        made = load_config([], order)
        assert (made.model.path, made.model.hub_name) == ("elsewhere", "Qwen/Qwen3-8B")
        assert (made.algorithm.name, made.actor.lr) == ("gspo", 2e-6)


def test_unknown_model_preset_is_refused() -> None:
    """With the nearest one."""
    with pytest.raises(
        ConfigError, match=r"model must be one of .*, got 'qwen3_9b'; did you mean 'qwen3_8b'\?"
    ):
        load_config([], ["model=qwen3_9b"])


def test_config_fields_have_docstrings() -> None:
    """Each field of the run's configuration says its unit and what absence means."""
    files = (
        "config.py",
        "algorithms/config.py",
        "algorithms/sections.py",
        "rewards/config.py",
        "agents/config.py",
    )
    trees = [ast.parse((ROOT / "relax" / file).read_text()) for file in files]
    bare = []
    for cls in (node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)):
        for field, after in zip(cls.body, [*cls.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and field.target.id not in NESTED:
                explained = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                bare += [] if explained else [f"{cls.name}.{field.target.id}"]
    assert bare == []


NESTED = {
    *("data", "model", "modalities", "media", "queue"),
    *("rollout", "actor", "algorithm", "evaluation", "checkpoint", "restarts"),
}
NESTED |= {"correction", "critic", "sampling"}


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("max_stalenes=1", ["'max_stalenes' is not a known key", "did you mean 'max_staleness'"]),
        (
            "rollout.max_token=3",
            ["'rollout.max_token' is not a known key", "did you mean 'rollout.max_new_tokens'"],
        ),
        ("num_steps=ten", ["num_steps", "'ten'"]),
        ("group_size=1", ["group_size: must be at least 2, got 1"]),
        ("rollout.reward.retries=-1", ["rollout.reward.retries: must be at least 0, got -1"]),
        ("rollout.reward.on_failure=dorp", ["must be one of drop_group, use_value, got 'dorp'"]),
        (
            "rollout.reward.parts=[{name: exact_match, wieght: 2}]",
            ["'wieght' is not a known key; did you mean 'weight'?", "stands under options"],
        ),
        (
            "rollout.reward.parts=[]",
            ["rollout.reward.parts: must hold a part with a weight other than 0, got 0"],
        ),
        ("media.keep=pixels", ["media.keep: must be one of arrays, bytes, got 'pixels'"]),
        ("rollout.layers_per_column=-1", ["rollout.layers_per_column: must be at least 0, got -1"]),
        (
            "staleness_policy=pase",
            ["staleness_policy: must be one of pace, drop, mask, reweight, got 'pase'; did you mean 'pace'?"],
        ),
        ("name=../evil", ["name: must be letters, digits, '.', '_' or '-', got '../evil'"]),
        ("steps", ["command line: an override must be key=value, got 'steps'"]),
        ("rollout.temperature=0", ["rollout.temperature: must be above 0"]),
        (
            "algorithm.policy_loss=reinforce",
            [
                "algorithm.correction.weight: must be truncate or mask with policy_loss=reinforce and max_staleness=1"
            ],
        ),
    ],
)
def test_config_mistake_names_key_rule_and_value(word: str, parts: list[str]) -> None:
    """A wrong word on the command line fails with the key, the rule and the nearest valid choice."""
    with pytest.raises(ConfigError) as raised:
        load_config([], [word])
    for part in parts:
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["data.manifest=/nowhere/train.jsonl"],
            "data.manifest: must be a .jsonl, .ndjson or .parquet file",
        ),
        (["model.path=/nowhere"], "model.path: must be a Hugging Face directory with config.json"),
        (["rollout.reward=no_such_reward"], "rollout.reward:"),
        (["modalities.extra=[no_such_pkg.depth:Depth]"], "modalities.extra:"),
        (["max_stalenes=1"], "did you mean 'max_staleness'"),
        (["rollout.num_workers=99"], "prompts_per_step: must be at least rollout.num_workers=99, got 24"),
    ],
)
def test_program_refuses_wrong_configuration_before_any_process(
    tmp_path: Path, words: list[str], message: str
) -> None:
    """The program exits with code 2 and a clear line, and leaves no run directory behind."""
    command = [sys.executable, str(PROGRAM), f"run_root={tmp_path / 'runs'}", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert not (tmp_path / "runs").exists()
