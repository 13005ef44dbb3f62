"""The shims: pinned to one megatron-core, needed still, and quiet."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

from relax.train import mcore_compat
from relax.train.attention import SdpaAttention, layer_spec, use_engine
from relax.train.mcore_compat import (
    MEGATRON_VERSION,
    EngineParts,
    check_version,
    install_shims,
    moe_utils,
    transformer_engine,
)
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
        (sys.modules["megatron.core.jit"], "jit_fuser = torch.compile"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_shims_are_still_needed(place, what) -> None:
    """Each shim's reason is still in megatron-core's source; when this fails, drop the shim."""
    assert what in inspect.getsource(place)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA the shims must not be there")
def test_every_cpu_shim_replaces_something_that_is_still_there() -> None:
    """What a shim overrides is there upstream under that name, so that a renamed function cannot leave it idle."""
    code = (
        "import torch; from relax.train import mcore_compat as c\n"
        "def found(): return [torch.cuda.current_device, torch.cuda.synchronize,\n"
        "  c.parallel_random._get_cuda_rng_state, c.parallel_random._set_cuda_rng_state,\n"
        "  c.MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize, c.filesystem_async._get_write_results_queue,\n"
        "  c.parallel_layers.get_tensor_model_parallel_group_if_none]\n"
        "before = found(); c.install_shims()\n"
        "raise SystemExit(sum(a is b for a, b in zip(before, found())))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


@pytest.mark.parametrize("num_experts", [None, 4])
def test_use_engine_replaces_every_matrix_and_norm_of_a_layer(num_experts) -> None:
    """With Transformer Engine no local layer is left but attention and the router."""
    parts = EngineParts(column_linear=object(), row_linear=object(), norm=object())
    spec = layer_spec(num_experts, 48)
    use_engine(spec, parts)
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    experts = layer.mlp.submodules.experts if num_experts else layer.mlp
    assert (layer.input_layernorm, layer.pre_mlp_layernorm) == (parts.norm, parts.norm)
    assert (attention.q_layernorm, attention.k_layernorm) == (parts.norm, parts.norm)
    assert (attention.linear_qkv, attention.linear_proj) == (parts.column_linear, parts.row_linear)
    assert experts.submodules.linear_fc1 is parts.column_linear
    assert experts.submodules.linear_fc2 is parts.row_linear
    assert attention.core_attention is SdpaAttention


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is for machines with CUDA")
def test_transformer_engine_is_not_looked_for_without_cuda() -> None:
    """The local layers serve the CPU, whatever is installed."""
    assert transformer_engine() is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA megatron-core compiles its fusions")
def test_import_leaves_the_compiler_out() -> None:
    """torch's compiler is not loaded, and afterwards `torch.compile` is what it was."""
    code = (
        "import sys, torch; real = torch.compile\n"
        "import relax.train.trainer\n"
        "assert torch.compile is real\n"
        "assert 'torch._inductor.compile_fx' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], timeout=120, check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


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
