"""Routing replay: the trainer's mixture-of-experts layers use the experts that the rollout used.

The gates are still the trainer's own (softmax over the given experts' logits), so the router learns. Without replay
a small difference in arithmetic picks other experts for some tokens and the two policies differ by whole experts.

Source: Stabilizing MoE RL by Aligning Training and Inference Routers (arXiv:2510.11370).

Shapes: T tokens of a sequence, B sequences, L layers with experts, K experts of a token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from relax.errors import TrainingError
from relax.train.mcore_compat import RouterReplay, RouterReplayAction, TopKRouter


class CountingReplay(RouterReplay):
    """A router's replay that also counts how many tokens it would have routed elsewhere itself."""

    def __init__(self) -> None:
        super().__init__()
        self.counted_N: Tensor | None = None
        self.num_differing: Tensor | None = None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the gates' scores and the experts, as megatron-core asks for them; count on the way."""
        if self.counted_N is not None and self.router_replay_action is RouterReplayAction.REPLAY_FORWARD:
            with torch.no_grad():
                own_NK = scores.topk(topk, dim=-1).indices
                agrees_N = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, own_NK, True)
                agrees_N = agrees_N.gather(1, self.target_topk_idx).all(-1)
                self.num_differing = (~agrees_N & self.counted_N).sum()
        return super().get_replay_topk(scores, topk, num_groups, group_topk, default_compute_topk)


class ReplaySession:
    """One forward pass under replay, from inside `replay_routing`."""

    def __init__(self, replays: Sequence[CountingReplay], num_counted: int) -> None:
        self._replays = replays
        self._num_counted = num_counted

    def begin_backward(self) -> None:
        """Replay the same experts when activation recompute runs the routers again; call before `backward`."""
        for replay in self._replays:
            replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)

    def count(self) -> tuple[int, int]:
        """Return (token-layers whose own top-k set is another one, token-layers that were counted)."""
        differing = [replay.num_differing for replay in self._replays if replay.num_differing is not None]
        return int(sum(differing)), self._num_counted * len(differing)


@contextmanager
def replay_routing(
    routers: Sequence[TopKRouter], experts_BTLK: Tensor, counted_BT: Tensor | None = None
) -> Iterator[ReplaySession]:
    """Make these routers, and no others, use the given experts while the block runs.

    Args:
        routers: The model's routers, first layer first.
        experts_BTLK: int64, distinct experts of every token of every layer, padding included.
        counted_BT: bool, tokens whose own routing is compared with the given one; None: no comparison.

    Raises:
        TrainingError: the shape, the range or the distinctness of the experts is wrong.
    """
    _check(routers, experts_BTLK)
    replays = [_own_replay(router) for router in routers]
    counted_N = None if counted_BT is None else counted_BT.T.reshape(-1)
    for layer, replay in enumerate(replays):
        # Megatron flattens [T, B], sequence first; old targets would pile up in the backward list.
        replay.clear_indices()
        replay.counted_N, replay.num_differing = counted_N, None
        replay.set_target_indices(experts_BTLK[:, :, layer].transpose(0, 1).flatten(0, 1).contiguous())
        replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    try:
        yield ReplaySession(replays, 0 if counted_N is None else int(counted_N.sum()))
    finally:
        for replay in replays:
            replay.clear_router_replay_action()
            replay.clear_indices()
            replay.counted_N = None


def padding_experts(top_k: int) -> Tensor:
    """Return experts for padding tokens: distinct, since dispatchers count on it."""
    return torch.arange(top_k)


def _own_replay(router: TopKRouter) -> CountingReplay:
    if not isinstance(router.router_replay, CountingReplay):
        # The global list that megatron-core keeps would mix the routers of every model of the process.
        registered = RouterReplay.global_router_replay_instances
        if router.router_replay in registered:
            registered.remove(router.router_replay)
        router.router_replay = CountingReplay()
        registered.remove(router.router_replay)
    return router.router_replay


def _check(routers: Sequence[TopKRouter], experts_BTLK: Tensor) -> None:
    if not routers:
        raise TrainingError("replay_routing: the model must have routers, got a dense one")
    config = routers[0].config
    top_k, num_experts = config.moe_router_topk, config.num_moe_experts
    shape = tuple(experts_BTLK.shape)
    if len(shape) != 4 or shape[2:] != (len(routers), top_k) or experts_BTLK.dtype != torch.int64:
        raise TrainingError(
            f"replay_routing: experts must be int64 [sequences, tokens, {len(routers)}, {top_k}], "
            f"got {experts_BTLK.dtype} {list(shape)}"
        )
    ordered = experts_BTLK.sort(-1).values
    if int(ordered[..., 0].min()) < 0 or int(ordered[..., -1].max()) >= num_experts:
        raise TrainingError(
            f"replay_routing: experts must be in [0, {num_experts}), got {int(ordered.min())} to {int(ordered.max())}"
        )
    if top_k > 1 and bool((ordered[..., 1:] == ordered[..., :-1]).any()):
        raise TrainingError("replay_routing: the experts of a token must be distinct, got one of them twice")
