"""The CPU stand-ins: they stand in under a CPU build of torch and give way under any other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
STAND_INS = ROOT / "tools" / "sglang_cpu"

FAKE_TORCH = "import types\nversion = types.SimpleNamespace(cuda={cuda!r}, hip={hip!r})\n"
"""A fake of torch that knows how it was built and nothing else."""


def _python(code: str, *paths: Path) -> str:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(str(path) for path in (STAND_INS, *paths))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _site(directory: Path, *, cuda: str | None, hip: str | None = None) -> Path:
    """Make a directory with a fake torch and with 'real' packages of the stand-ins' names."""
    (directory / "torch").mkdir(parents=True)
    (directory / "torch" / "__init__.py").write_text(FAKE_TORCH.format(cuda=cuda, hip=hip))
    for name in ("sgl_kernel", "torchaudio", "torchvision"):
        (directory / name).mkdir()
        (directory / name / "__init__.py").write_text("REAL = True\n")
    return directory


@pytest.mark.parametrize("build", [{"cuda": "13.0"}, {"cuda": None, "hip": "7.0"}], ids=["cuda", "rocm"])
def test_stand_ins_give_way_under_a_gpu_build(build, tmp_path) -> None:
    """The real kernels and torchaudio are imported, torchvision is left alone, the plugin does nothing."""
    site = _site(tmp_path / "site", **build)
    code = (
        "import sgl_kernel, torchaudio, torchvision, sgl_cpu_plugin; sgl_cpu_plugin.activate(); "
        "import sys; print(sgl_kernel.REAL, torchaudio.REAL, torchvision.REAL, "
        "sys.modules['sgl_kernel'] is sgl_kernel)"
    )
    assert _python(code, site) == "True True True True"


def test_python_starts_without_torch() -> None:
    """The start-up file costs no import of torch."""
    assert _python("import sys; print('torch' in sys.modules)") == "False"


def test_kernels_are_there_and_say_that_they_are_not() -> None:
    """Under a CPU build every name can be imported; calling one is an error that names it."""
    code = (
        "import sgl_kernel, torch\n"
        "from sgl_kernel.mamba import causal_conv1d\n"
        "assert not hasattr(torch.ops.sgl_kernel, 'convert_weight_packed')\n"
        "for call in (sgl_kernel.anything, causal_conv1d, torch.ops.sgl_kernel.fused_moe_router_cpu):\n"
        "    try:\n        call(1)\n"
        "    except NotImplementedError as error:\n        print(error)\n"
    )
    assert _python(code).splitlines() == [
        f"sgl_kernel.{name}: needs a GPU, got the stand-in of tools/sglang_cpu"
        for name in ("anything", "causal_conv1d", "fused_moe_router_cpu")
    ]


def test_random_numbers_of_seeds_are_murmur_hashes() -> None:
    """The operator equals MurmurHash3 over four words, counted in plain Python."""
    code = (
        "import sgl_kernel, torch\n"
        "seed = torch.tensor([1, 2**40 + 5, 2**63 - 1], dtype=torch.int64).view(torch.uint64)\n"
        "found = torch.ops.sgl_kernel.murmur_hash32_cpu(seed, torch.tensor([0, 7, 9]), torch.arange(2))\n"
        "print(found.tolist())"
    )
    seeds, positions = (1, 2**40 + 5, 2**63 - 1), (0, 7, 9)
    expected = [
        [_murmur(seed & 0xFFFFFFFF, seed >> 32, position, column) for column in range(2)]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert _python(code) == str(expected)


def _murmur(*words: int) -> int:
    mask, value = 0xFFFFFFFF, 0
    for word in words:
        word = word * 0xCC9E2D51 & mask
        word = (word << 15 | word >> 17) & mask
        value ^= word * 0x1B873593 & mask
        value = (value << 13 | value >> 19) & mask
        value = (value * 5 + 0xE6546B64) & mask
    value ^= 4 * len(words)
    value = (value ^ value >> 16) * 0x85EBCA6B & mask
    value = (value ^ value >> 13) * 0xC2B2AE35 & mask
    return value ^ value >> 16
