"""Qwen3 and Qwen3-MoE: text only.

Source: Qwen3 in transformers 5.12; https://arxiv.org/abs/2505.09388.
"""

from __future__ import annotations

from relax.models.families.base import CheckpointNames, Family

NAMES = (CheckpointNames(text="model.", head="lm_head.weight"),)

DENSE = Family(model_types=("qwen3",), hf_class="Qwen3ForCausalLM", names=NAMES)
MOE = Family(model_types=("qwen3_moe",), hf_class="Qwen3MoeForCausalLM", names=NAMES)
