"""The critic: a linear head on the policy's last hidden states, with an optimizer of its own.

A head on the trunk costs no second model and no second forward pass, and suits a value that depends on what the policy
has understood already. By default its loss does not reach the trunk, so that nothing but the policy loss moves the
policy. A critic elsewhere (`relax.train.value_learner`) gives its values with the batch instead.

The value of a token is that of what stands before it: it is made of the hidden state that predicts the token.

Shapes: N predicted tokens, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from relax.algorithms.sections import CriticConfig
from relax.errors import TrainingError
from relax.train.ranks import World

MOMENTS = ("exp_avg", "exp_avg_sq")


class Critic(nn.Module):
    """A value head that starts at 0 everywhere, and its AdamW."""

    def __init__(self, hidden_size: int, config: CriticConfig) -> None:
        super().__init__()
        self._config = config
        self.head = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=config.lr, weight_decay=0.0)

    def values(self, hidden_NH: Tensor) -> Tensor:
        """Return values [N], in fp32; the hidden states get their gradient with `trunk_gradient` only."""
        seen_NH = hidden_NH if self._config.trunk_gradient else hidden_NH.detach()
        return self.head(seen_NH.float())[:, 0]

    def add_up(self, world: World) -> None:
        """Replace the gradients by their sums over the ranks that have tokens. All ranks must call it.

        Every rank has the head, whatever its stage, and takes the same steps; tensor parallel neighbours compute the
        same gradient, of which one counts.
        """
        if world.size == 1:
            return
        counts = world.is_last_stage and world.place.tp_rank == 0
        for parameter in self.parameters():
            here = parameter.grad if counts else None
            parameter.grad = world.sum(torch.zeros_like(parameter) if here is None else here)

    def update(self, multiplier: float, *, skip: bool) -> dict[str, float]:
        """Apply the gradients that gathered, or with `skip` only forget them; return the head's metrics.

        Args:
            multiplier: Part of the full learning rate that this step uses.
            skip: The policy's step is not taken either.
        """
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
        for group in self.optimizer.param_groups:
            group["lr"] = self._config.lr * multiplier
        if not skip and bool(torch.isfinite(norm)):
            self.optimizer.step()
        self.forget_gradients()
        return {"critic_grad_norm": float(norm), "critic_lr": self._config.lr * multiplier}

    def forget_gradients(self) -> None:
        """Drop what a step that broke off may have left."""
        self.optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """Return all that a checkpoint needs: weights, moments and step count."""
        kept = {f"head.{name}": tensor.detach().clone() for name, tensor in self.head.named_parameters()}
        for name, parameter in self.head.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                kept[f"{key}.{name}"] = value.detach().clone()
        return kept

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Go on from what `tensors` returned.

        Raises:
            TrainingError: they are those of another head.
        """
        parameters = dict(self.head.named_parameters())
        shapes = {f"head.{name}": tuple(parameter.shape) for name, parameter in parameters.items()}
        got = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name.startswith("head.")}
        if got != shapes:
            raise TrainingError(f"critic: the checkpoint must hold a head of {shapes}, got {got}")
        for name, parameter in parameters.items():
            parameter.copy_(tensors[f"head.{name}"])
            self.optimizer.state[parameter] = {
                # AdamW keeps its step count on the CPU.
                key: tensors[f"{key}.{name}"].to("cpu" if key == "step" else parameter.device, copy=True)
                for key in ("step", *MOMENTS)
                if f"{key}.{name}" in tensors
            }
