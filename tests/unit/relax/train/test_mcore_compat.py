"""The shims: pinned to one megatron-core, needed still, and quiet."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

from relax.train import mcore_compat
from relax.train.mcore_compat import MEGATRON_VERSION, check_version, install_shims, moe_utils
from relax.train.mcore_compat import filesystem_async as writer


def test_check_version_refuses_another_megatron() -> None:
    """The error names both versions and the way out."""
    with pytest.raises(ImportError) as caught:
        check_version("0.17.1")
    assert str(caught.value) == (
        "relax.train: megatron-core must be 0.16.1, got 0.17.1; pip install megatron-core==0.16.1"
    )
    check_version(MEGATRON_VERSION)


def test_install_shims_twice_is_once() -> None:
    """Every Trainer calls it."""
    install_shims()
    install_shims()
    assert hasattr(moe_utils, "te_general_gemm")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU shims are inert with CUDA")
def test_install_shims_names_the_cpu_as_current_device() -> None:
    """Allocations that megatron-core puts on the current device go to the CPU."""
    install_shims()
    assert torch.zeros(1, device=torch.cuda.current_device()).device.type == "cpu"


@pytest.mark.parametrize(
    ("place", "what"),
    [
        (mcore_compat.TopKRouter, "torch.cuda.current_device"),
        (mcore_compat.MoEAlltoAllTokenDispatcher.__init__, "torch.cuda.Stream()"),
        (writer, 'mp.get_context("fork")'),
        (mcore_compat.parallel_layers, "get_tensor_model_parallel_group_if_none"),
        (mcore_compat.parallel_random, "_get_cuda_rng_state"),
        (moe_utils, "te_general_gemm"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_shims_are_still_needed(place, what) -> None:
    """Each shim's reason is still in megatron-core's source; when this fails, drop the shim."""
    assert what in inspect.getsource(place)


def test_import_is_quiet_where_warnings_are_errors() -> None:
    """megatron-core's import-time warnings are silenced, and no other filter is left behind."""
    code = (
        "import warnings; before = list(warnings.filters); import torch; torched = list(warnings.filters)\n"
        "import relax.train.trainer, sys\n"
        "added = [f for f in warnings.filters if f not in torched and 'megatron' in str(f)]\n"
        "sys.exit(len(added))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], timeout=120, check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
