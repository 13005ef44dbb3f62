"""AdamW over this rank's parameters: fp32 masters of bf16 weights, and optimizer state shared out over the ranks.

    fp32   the parameters are their own masters
    bf16   a master is an fp32 copy; gradients of micro-batches add up in fp32, the weights are rounded masters

With `distributed` each parameter's master state (two moments) is on one of the ranks that hold the parameter, which
sends the others the new weights. Whole parameters are dealt out, so a rank's state is that of a plain AdamW and
resumes exactly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from relax.train.config import TrainerConfig
from relax.train.gradients import GradientSum
from relax.train.policy import LANGUAGE_MODEL, OmniPolicy
from relax.train.ranks import World
from relax.train.shards import is_expert


class Weights:
    """The trained parameters of a policy, their masters, and AdamW.

    Attributes:
        optimizer: AdamW over the masters whose state is on this rank.
        masters: All masters of this rank by the policy's names; the parameters themselves in fp32.
        owned: Names of the masters that `optimizer` updates here.
        shares_state: Whether no other rank has the state of the masters owned here.
    """

    def __init__(self, policy: OmniPolicy, config: TrainerConfig) -> None:
        self._world = policy.world
        self._parameters = {name: p for name, p in policy.named_parameters() if p.requires_grad}
        self.masters = {name: _master(parameter) for name, parameter in self._parameters.items()}
        self._owner = _owners(self._parameters, self._world) if config.distributed_optimizer else {}
        self.shares_state = config.distributed_optimizer
        self.owned = [
            name for name in self.masters if self._owner.get(name, self._world.rank) == self._world.rank
        ]
        self.optimizer = _adamw({name: self.masters[name] for name in self.owned}, config)
        of_model = dict(policy.global_names())
        by_id = {id(parameter): self.masters[name] for name, parameter in self._parameters.items()}
        self.gradients = GradientSum(
            self._world,
            {name: by_id[id(parameter)] for name, parameter in of_model.items() if id(parameter) in by_id},
            {name: master for name, master in self.masters.items() if not name.startswith(LANGUAGE_MODEL)},
        )

    def zero_gradients(self) -> None:
        """Set every gradient to zero; a tower without input in a step then gets a zero gradient, not none."""
        for master in self.masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        for name, parameter in self._parameters.items():
            if parameter is not self.masters[name]:
                parameter.grad = None
        torch._foreach_zero_([m.grad for m in self.masters.values() if m.grad is not None])

    def step(self, norm: Tensor, max_norm: float | None) -> None:
        """Clip the gradients, update the masters here and give all ranks the new weights."""
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_([self.masters[name] for name in self.owned], max_norm, norm)
        self.optimizer.step()
        self.write_back()

    @torch.no_grad()
    def write_back(self) -> None:
        """Bring the parameters of all ranks to what the masters are. All ranks must call it."""
        for name in self.owned:
            if self.masters[name] is not self._parameters[name]:
                self._parameters[name].copy_(self.masters[name])
        for source, names, group in _transfers(self._owner, self._world):
            flat = torch.cat([self._parameters[name].flatten() for name in names])
            dist.broadcast(flat, source, group=group)
            for name, new in zip(
                names, flat.split([self._parameters[n].numel() for n in names]), strict=True
            ):
                self._parameters[name].copy_(new.view_as(self._parameters[name]))

    @torch.no_grad()
    def take_over(self) -> None:
        """Bring the masters to what the parameters are, after these were loaded."""
        for name, parameter in self._parameters.items():
            if self.masters[name] is not parameter:
                self.masters[name].copy_(parameter)


def _master(parameter: Tensor) -> Tensor:
    """Return what the optimizer updates for a parameter; gradients of a bf16 one are added to its master's."""
    if parameter.dtype == torch.float32:
        return parameter
    master = parameter.detach().float()
    master.grad = torch.zeros_like(master)

    def add_up(parameter: Tensor) -> None:
        if master.grad is not None and parameter.grad is not None:
            master.grad += parameter.grad
        parameter.grad = None

    parameter.register_post_accumulate_grad_hook(add_up)
    return master


def _holders(name: str, world: World) -> Any:
    in_model = name.startswith(LANGUAGE_MODEL)
    return world.expert_data_group if in_model and is_expert(name) else world.data_group


def _owners(parameters: Mapping[str, Tensor], world: World) -> dict[str, int]:
    """Return the rank that has each parameter's state: largest first, each to the rank with the least so far."""
    owners: dict[str, int] = {}
    loads: dict[tuple[bool, int], int] = defaultdict(int)  # apart for experts: other ranks hold those
    for name in sorted(parameters, key=lambda name: (-parameters[name].numel(), name)):
        ranks, kind = dist.get_process_group_ranks(_holders(name, world)), is_expert(name)
        _, owners[name] = min((loads[kind, rank], rank) for rank in ranks)
        loads[kind, owners[name]] += parameters[name].numel()
    return owners


def _transfers(owners: Mapping[str, int], world: World) -> list[tuple[int, list[str], Any]]:
    """Return (owner, names, group) of what is to be sent, in the same order on all ranks of a group."""
    grouped: dict[tuple[bool, int], list[str]] = {}
    for name in sorted(owners):
        grouped.setdefault((is_expert(name), owners[name]), []).append(name)
    made = [(rank, names, _holders(names[0], world)) for (_, rank), names in sorted(grouped.items())]
    return [each for each in made if each[2].size() > 1]


def _adamw(masters: Mapping[str, Tensor], config: TrainerConfig) -> torch.optim.AdamW:
    """Return AdamW: language model and towers apart, matrices with weight decay."""
    groups: list[dict[str, Any]] = []
    parts = (
        ("language_model", True, config.lr),
        ("towers", False, config.tower_lr or config.lr),
    )
    for part, in_model, lr in parts:
        trained = [m for name, m in masters.items() if name.startswith(LANGUAGE_MODEL) is in_model]
        for decay, chosen in (
            (config.weight_decay, [m for m in trained if m.dim() > 1]),
            (0.0, [m for m in trained if m.dim() <= 1]),
        ):
            if chosen:
                groups.append(
                    {"params": chosen, "lr": lr, "full_lr": lr, "weight_decay": decay, "name": part}
                )
    return torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), eps=config.epsilon, fused=True)
