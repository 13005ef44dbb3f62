"""Configuration: every shipped file loads, every field is explained, every mistake is named."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from flight.files.table_config import load_tables
from relax.config import load_config, save_config
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
    assert [spec.name for spec in load_tables(path)] == ["prompts", "rollouts"]


def test_config_survives_being_saved(tmp_path: Path) -> None:
    """What a run saves is what its services load."""
    config = load_config([ROOT / "conf" / "omni_grpo.yaml"], ["max_staleness=4", "data.lookahead_steps=3"])
    save_config(config, tmp_path / "config.yaml")
    assert load_config([tmp_path / "config.yaml"]) == config


def test_config_fields_have_docstrings() -> None:
    """Each field of the run's configuration says its unit and what absence means."""
    tree = ast.parse((ROOT / "relax" / "config.py").read_text())
    bare = []
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for field, after in zip(cls.body, [*cls.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and field.target.id not in NESTED:
                explained = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                bare += [] if explained else [f"{cls.name}.{field.target.id}"]
    assert bare == []


NESTED = {"data", "model", "modalities", "queue", "rollout", "actor", "algorithm", "evaluation", "checkpoint"}


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
        (
            "staleness_policy=pase",
            ["staleness_policy: must be one of pace, drop, mask, reweight, got 'pase'; did you mean 'pace'?"],
        ),
        ("name=../evil", ["name: must be letters, digits, '.', '_' or '-', got '../evil'"]),
        ("steps", ["command line: an override must be key=value, got 'steps'"]),
        ("rollout.temperature=0", ["rollout.temperature: must be above 0"]),
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
            "data.manifest: must be a JSONL file, got '/nowhere/train.jsonl'",
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
