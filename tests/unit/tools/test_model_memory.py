"""The computed sizes: of a model on disk, and of published ones as the documentation and the presets have them."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.kit.families import make_family
from tools.model_memory import count_parameters, published_counts, table_row
from tools.published_models import PUBLISHED

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "models.md").read_text()


@pytest.mark.parametrize("tied", [False, True])
def test_count_parameters_equals_the_tensors_on_disk(tmp_path: Path, tied: bool) -> None:
    """A shared matrix counts once; without experts a token uses all of the language model."""
    directory = make_family(tmp_path / "model", "qwen3_vl", tied=tied)
    stored = load_file(directory / "model.safetensors")
    counts = count_parameters(directory)
    assert counts.total == sum(tensor.numel() for tensor in stored.values())
    assert counts.towers == sum(tensor.numel() for name, tensor in stored.items() if ".visual." in name)
    assert counts.active == counts.total - counts.towers


def test_count_parameters_leaves_out_idle_experts(tmp_path: Path) -> None:
    """Two of five experts are used by a token, in each of two layers."""
    counts = count_parameters(make_family(tmp_path / "model", "qwen3_moe"))
    assert counts.total - counts.active == 3 * 2 * (3 * 32 * 24)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-VL-2B-Instruct"])
def test_page_and_preset_say_what_is_computed(name: str) -> None:
    """The row of the table, and the comment of the preset."""
    counts = published_counts(name)
    assert table_row(name, counts) in PAGE
    stem = name.partition("/")[2].removesuffix("-Instruct").lower().replace("-", "_").replace(".", "_")
    preset = (ROOT / "conf" / "model" / f"{stem}.yaml").read_text()
    assert f"training in bf16 {counts.memory_gb('train_bf16'):.1f} GB" in preset


def test_every_published_model_has_a_row_and_a_preset() -> None:
    """And no preset is of another one."""
    stems = {each.partition("/")[2].removesuffix("-Instruct").lower() for each in PUBLISHED}
    presets = {path.stem for path in (ROOT / "conf" / "model").glob("*.yaml")}
    assert {stem.replace("-", "_").replace(".", "_") for stem in stems} == presets
    assert all(f"| {name} |" in PAGE for name in PUBLISHED)
