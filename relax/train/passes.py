"""A policy's way over a batch, the same for whoever trains on it or only looks: micro-batches, and what reads them."""

from __future__ import annotations

from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relax.train.batch import (
    CutRules,
    MicroBatch,
    RoutingShape,
    TrainBatch,
    empty_micro_batch,
    plan_micro_batches,
    prompt_routes,
)
from relax.train.config import TrainerConfig
from relax.train.critic import Critic
from relax.train.decoder_inputs import Completions, PromptTable
from relax.train.objective import Targets
from relax.train.policy import OmniPolicy
from relax.train.tasks import BatchPass


def routing_of(batch: TrainBatch, policy: OmniPolicy, config: TrainerConfig) -> RoutingShape | None:
    """Return what the rollout's routing looks like if it is replayed, or can be compared; else None."""
    if config.routing_replay:
        return policy.routing_shape
    return policy.routing_shape if config.routing_metrics and batch.has_routing else None


def cut(batch: TrainBatch, policy: OmniPolicy, config: TrainerConfig) -> list[MicroBatch]:
    """Return this rank's micro-batches, alike on all stages; as many as any rank has where ranks share experts."""
    world = policy.world
    rules = CutRules(
        max_tokens=config.max_tokens_per_micro_batch,
        share_prompts=config.share_prompts,
        packing=config.packing,
        multiple=world.layout.length_multiple,
        routing=routing_of(batch, policy, config),
        replay=config.routing_replay,
    )
    routes = None
    if config.routing_replay and world.layout.pp > 1:
        of_stages = world.of_all_stages(torch.from_numpy(prompt_routes(batch)))
        routes = of_stages.transpose(0, 1).numpy()
    micro_batches = plan_micro_batches(batch, rules, routes)
    if world.layout.ep > 1:
        missing = world.largest(len(micro_batches)) - len(micro_batches)
        micro_batches += [empty_micro_batch(rules)] * missing
    return micro_batches


def pass_over(
    batch: TrainBatch,
    policy: OmniPolicy,
    prompts: PromptTable,
    targets: Targets,
    critic: Critic | None = None,
) -> BatchPass:
    """Return a pass of a policy over the batch; positions of completions are those of this rank's rows."""
    device = policy.world.device
    own = batch.own_prompt_numbers
    own_index = np.searchsorted(own, batch.prompt_numbers.astype(np.int64))
    prompt_R = torch.from_numpy(own_index).clamp(max=len(own) - 1).to(device)
    num_early_R = torch.tensor([len(batch.early_of(row)) for row in range(batch.num_rows)], device=device)
    row_C = targets.row_C.to(device)
    # Tokens of earlier turns are in the prompt and have its positions.
    offset_C = targets.offset_C.to(device) - num_early_R[row_C]
    completions = Completions(
        token_ids_C=targets.token_ids_C.to(device),
        position_C=prompts.next_position_P[prompt_R[row_C]] + offset_C,
    )
    return BatchPass(policy=policy, prompts=prompts, completions=completions, critic=critic)


def moved(record: Any, device: torch.device) -> Any:
    """Return a copy of a dataclass whose tensors, and those of dataclasses in it, are on a device."""
    there = copy(record)
    for item in fields(record):
        value = getattr(record, item.name)
        if isinstance(value, Tensor):
            object.__setattr__(there, item.name, value.to(device))
        elif is_dataclass(value):
            object.__setattr__(there, item.name, moved(value, device))
    return there
