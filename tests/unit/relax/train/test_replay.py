"""Routing replay: the given experts are used exactly, forward and in recompute, and differences are counted."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from relax.errors import TrainingError
from relax.train.batch import CutRules, plan_micro_batches
from relax.train.decoder_inputs import Completions
from relax.train.mcore_compat import RouterReplay
from relax.train.policy import OmniPolicy
from relax.train.replay import replay_routing
from relax.train.runtime import start_parallel

NUM_EXPERTS, TOP_K = 5, 2


@pytest.fixture(scope="module")
def policy(thinker_dir) -> OmniPolicy:
    """A policy whose routers are watched."""
    return OmniPolicy(thinker_dir, start_parallel(0))


def run(policy: OmniPolicy, batch, micro):
    """Run one micro-batch under its replay; return logits, routing maps [L][T * B, E] and the counts."""
    maps: dict[int, list[torch.Tensor]] = {}
    handles = [
        router.register_forward_hook(lambda m, i, o, n=n: maps.setdefault(n, []).append(o[1].clone()))
        for n, router in enumerate(policy.language_model.routers)
    ]
    tokens = torch.cat([torch.tensor(t).long() for t in batch.completion_token_ids])
    completions = Completions(token_ids_C=tokens, position_C=torch.zeros(len(tokens)))
    started = policy.begin(policy.embed_prompts(batch.prompts).leaves(), completions, micro)
    logits = policy.language_model.logits(started.forward())
    with started.backward():
        logits.sum().backward()
    for handle in handles:
        handle.remove()
    return logits.detach(), maps, started.session.count()


def plan(policy: OmniPolicy, batch, **settings):
    """Cut the batch into micro-batches with replay."""
    return plan_micro_batches(batch, CutRules(max_tokens=1000, routing=policy.routing_shape, **settings))


@pytest.mark.parametrize("share_prompts", [True, False])
def test_replay_uses_the_given_experts_exactly(policy, make_batch, share_prompts) -> None:
    """Random experts of every token of every row, found again in the routers' own output."""
    batch = make_batch(routed=True)
    (micro,) = plan(policy, batch, share_prompts=share_prompts)
    _, maps, _ = run(policy, batch, micro)
    longest = micro.segment_BT.shape[1]
    for layer in range(2):
        used = maps[layer][0].view(longest, -1, NUM_EXPERTS)
        assert (used.sum(-1) == TOP_K).all()
        for sequence in range(used.shape[1]):
            for token in range(longest):
                chosen = used[token, sequence].nonzero()[:, 0].tolist()
                assert chosen == sorted(micro.experts_BTLK[sequence, token, layer].tolist())
    assert_rows_are_replayed(batch, micro)


def assert_rows_are_replayed(batch, micro) -> None:
    """What the micro-batch asks for is, row by row, what the rollout reported."""
    starts, num_sequences = [0], len(micro.segment_BT)
    for tokens in batch.completion_token_ids:
        starts.append(starts[-1] + len(tokens))
    for row, reported in enumerate(batch.routed_experts):
        num_prompt = len(batch.prompts[batch.groups[row]].token_ids)
        places = micro.predictor_N[(micro.target_N >= starts[row]) & (micro.target_N < starts[row + 1])]
        sequence = places[0] % num_sequences
        asked = micro.experts_BTLK[sequence, places // num_sequences]
        assert (asked == reported[num_prompt - 1 :]).all()
        assert (micro.experts_BTLK[sequence, :num_prompt] == reported[:num_prompt]).all()


def test_replay_of_the_own_routing_changes_nothing(policy, make_batch) -> None:
    """Recording the natural routing and replaying it gives the same logits and no difference."""
    batch = make_batch(routed=True)
    (micro,) = plan(policy, batch)
    shape = micro.experts_BTLK.shape
    natural_logits, maps, _ = run(policy, batch, _with_experts(micro, None))
    own = [maps[layer][0].nonzero()[:, 1].view(shape[1], shape[0], TOP_K) for layer in range(2)]
    experts = torch.stack(own, 2).transpose(0, 1).contiguous().numpy()
    logits, _, (num_differing, num_counted) = run(policy, batch, _with_experts(micro, experts))
    torch.testing.assert_close(logits, natural_logits, atol=1e-5, rtol=0)
    assert (num_differing, num_counted) == (0, 2 * int((micro.segment_BT >= 0).sum()))


@pytest.mark.parametrize("replay", [True, False])
def test_replay_counts_tokens_whose_own_experts_are_others(policy, make_batch, replay) -> None:
    """The count is that of comparing the sets by hand, padding left out, whether the routers replay or not."""
    batch = make_batch(routed=True)
    (micro,) = plan(policy, batch)
    micro = dataclasses.replace(micro, replay=replay)
    chosen: list[torch.Tensor] = []
    handles = [
        router.register_forward_hook(
            lambda m, i, o: chosen.append((i[0].flatten(0, 1) @ m.weight.T).topk(TOP_K).indices)
        )
        for router in policy.language_model.routers
    ]
    _, maps, (num_differing, num_counted) = run(policy, batch, micro)
    for handle in handles:
        handle.remove()
    expected = 0
    for layer in range(2):
        given = torch.tensor(micro.experts_BTLK[:, :, layer]).long().transpose(0, 1).reshape(-1, TOP_K)
        differs = (chosen[layer].sort().values != given.sort().values).any(-1).numpy()
        expected += int((differs & (micro.segment_BT.T >= 0).reshape(-1)).sum())
        used = given if replay else chosen[layer]
        assert torch.equal(maps[layer][0], torch.zeros_like(maps[layer][0]).scatter(1, used, True))
    assert num_differing == expected
    assert num_counted == 2 * int((micro.segment_BT >= 0).sum())
    assert 0.3 < num_differing / num_counted < 1


def test_replay_holds_in_recompute(thinker_dir, make_batch) -> None:
    """With activation recompute the routers run twice and see the same experts both times."""
    policy, batch = OmniPolicy(thinker_dir, start_parallel(0), recompute=True), make_batch(routed=True)
    (micro,) = plan(policy, batch)
    _, maps, _ = run(policy, batch, micro)
    for layer in range(2):
        assert len(maps[layer]) == 2
        assert torch.equal(maps[layer][0], maps[layer][1])


def test_replay_leaves_no_trace(policy, make_batch) -> None:
    """Afterwards no target is kept, no action is set, and the process-wide list has none of our routers."""
    batch = make_batch(routed=True)
    (micro,) = plan(policy, batch)
    run(policy, batch, micro)
    for router in policy.language_model.routers:
        assert router.router_replay.router_replay_action is None
        assert router.router_replay.replay_backward_list == []
        assert router.router_replay not in RouterReplay.global_router_replay_instances


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e[:, :1], r"must be int64 \[tokens, 2, 2\]"),
        (lambda e: e.int(), "got torch.int32"),
        (lambda e: e + 4, r"must be in \[0, 5\), got 4 to 5"),
        (lambda e: e * 0, "must be distinct"),
    ],
)
def test_replay_refuses_experts_that_cannot_be(policy, change, message) -> None:
    """Shape, type, range and distinctness are checked before a router sees them."""
    experts = torch.arange(TOP_K).expand(3, 2, TOP_K).contiguous()
    with pytest.raises(TrainingError, match=message):
        replay_routing(policy.language_model.routers, change(experts))


def test_replay_refuses_a_dense_model() -> None:
    """There is nothing to replay into."""
    with pytest.raises(TrainingError, match="must have routers"):
        replay_routing([], torch.zeros(1))


def _with_experts(micro, experts):
    return type(micro)(**{**micro.__dict__, "experts_BTLK": experts})
