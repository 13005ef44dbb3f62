"""Routing replay: the trainer's mixture-of-experts layers use the experts that the rollout used.

The gates are still the trainer's own (softmax over the given experts' logits), so the router learns. Without replay
a small difference in arithmetic picks other experts for some tokens and the two policies differ by whole experts.

How often they would is counted on the way, also for routers that go their own way: a token's own top-k set is another
one if any expert that is not given has a higher score than one that is. That needs no top-k, and layers are compared
once for a micro-batch.

Source: Stabilizing MoE RL by Aligning Training and Inference Routers (arXiv:2510.11370).

Shapes: N tokens of a micro-batch (T of a sequence times B sequences), L layers with experts of this rank, K experts
of a token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from relax.errors import TrainingError
from relax.train.mcore_compat import RouterReplay, RouterReplayAction, TopKRouter


class WatchedReplay(RouterReplay):
    """A router's replay that also sees by how much the router itself would have preferred other experts."""

    def __init__(self) -> None:
        super().__init__()
        self.watched_NK: Tensor | None = None
        """Experts to compare the router's own choice with; None: it is not looked at."""
        self.margin_N: Tensor | None = None
        """Lowest score of a watched expert minus highest of the others, of the last forward pass."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the gates' scores and the experts, as megatron-core asks for them; compare on the way."""
        if self.watched_NK is not None:
            seen_NE = scores.detach()
            lowest_N = seen_NE.gather(1, self.watched_NK).amin(1)
            self.margin_N = lowest_N - seen_NE.scatter(1, self.watched_NK, -torch.inf).amax(1)
        return super().get_replay_topk(scores, topk, num_groups, group_topk, default_compute_topk)


class ReplaySession:
    """One micro-batch's experts, set for the time of its forward pass and again for that of its backward pass.

    Between the two other micro-batches may run (pipeline parallelism). Without routers it does nothing. With `replay`
    off the routers go their own way and are only compared.
    """

    def __init__(
        self,
        replays: Sequence[WatchedReplay],
        targets_NK: Sequence[Tensor],
        counted_N: Tensor | None,
        *,
        replay: bool = True,
    ) -> None:
        self._replays = replays
        self._targets_NK = targets_NK
        self._counted_N = counted_N
        self._replay = replay
        self._margins: list[Tensor] = []

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Use the experts while the block runs the layers forward, and look how much each router likes them."""
        for replay, target_NK in zip(self._replays, self._targets_NK, strict=True):
            replay.watched_NK = None if self._counted_N is None else target_NK
            if self._replay:
                replay.target_topk_idx = target_NK
                replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        try:
            yield
            self._margins += [r.margin_N for r in self._replays if r.margin_N is not None]
        finally:
            self._clear()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Use the same experts while activation recompute runs the layers again in the block."""
        for replay, target_NK in zip(self._replays, self._targets_NK, strict=True):
            if not self._replay:
                break
            replay.replay_backward_list = [target_NK]
            replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        try:
            yield
        finally:
            self._clear()

    def count(self) -> tuple[int, int]:
        """Return (token-layers whose own top-k set is another one, token-layers that were counted)."""
        if self._counted_N is None or not self._margins:
            return 0, 0
        differs_LN = (torch.stack(self._margins) < 0) & self._counted_N
        return int(differs_LN.sum()), int(self._counted_N.sum()) * len(self._margins)

    def _clear(self) -> None:
        for replay in self._replays:
            replay.clear_router_replay_action()
            replay.clear_indices()
            replay.watched_NK = replay.margin_N = None


def replay_routing(
    routers: Sequence[TopKRouter],
    experts_NLK: Tensor,
    counted_N: Tensor | None = None,
    *,
    replay: bool = True,
) -> ReplaySession:
    """Return a session in which these routers, and no others, use the given experts.

    Args:
        routers: Those of this rank, first layer first.
        experts_NLK: int64, distinct for each token, one L for each router; tokens in the order in which the routers
            see them: sequence first [T, B], of this rank's slice of the sequence.
        counted_N: bool, tokens to count differences of; None: counts none.
        replay: Use them; off: only count how many the routers would have chosen otherwise.

    Raises:
        TrainingError: no routers, or experts of another shape, type or range.
    """
    _check(routers, experts_NLK)
    targets_NK = [experts_NLK[:, layer].contiguous() for layer in range(len(routers))]
    watched = [_own_replay(router) for router in routers]
    return ReplaySession(watched, targets_NK, counted_N, replay=replay)


def _own_replay(router: TopKRouter) -> WatchedReplay:
    if not isinstance(router.router_replay, WatchedReplay):
        # The global list that megatron-core keeps would mix the routers of every model of the process.
        registered = RouterReplay.global_router_replay_instances
        if router.router_replay in registered:
            registered.remove(router.router_replay)
        router.router_replay = WatchedReplay()
        registered.remove(router.router_replay)
    return router.router_replay


def _check(routers: Sequence[TopKRouter], experts_NLK: Tensor) -> None:
    if not routers:
        raise TrainingError("replay_routing: the model must have routers, got a dense one")
    config = routers[0].config
    top_k, num_experts = config.moe_router_topk, config.num_moe_experts
    shape = tuple(experts_NLK.shape)
    if len(shape) != 3 or shape[1:] != (len(routers), top_k) or experts_NLK.dtype != torch.int64:
        raise TrainingError(
            f"replay_routing: experts must be int64 [tokens, {len(routers)}, {top_k}], "
            f"got {experts_NLK.dtype} {list(shape)}"
        )
    ordered = experts_NLK.sort(-1).values
    if int(ordered[..., 0].min()) < 0 or int(ordered[..., -1].max()) >= num_experts:
        raise TrainingError(
            f"replay_routing: experts must be in [0, {num_experts}), got {int(ordered.min())} to {int(ordered.max())}"
        )
    if top_k > 1 and bool((ordered[..., 1:] == ordered[..., :-1]).any()):
        raise TrainingError("replay_routing: the experts of a token must be distinct, got one of them twice")
