"""Micro-batches on one rank of several: experts in the routers' order, predictors, documents and masks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from relax.train.attention import Document, local_tokens
from relax.train.batch import CutRules, RoutingShape, empty_micro_batch, plan_micro_batches
from relax.train.decoder_inputs import Completions, PromptTable, lay_out, predicted, routed
from relax.train.layout import LayoutConfig
from tests.kit.worlds import world_at

ROUTING = RoutingShape(num_layers=2, top_k=2, num_experts=5)


def rules(layout: LayoutConfig, **settings) -> CutRules:
    """Rules that fit a layout."""
    return CutRules(max_tokens=10_000, multiple=layout.length_multiple, routing=ROUTING, **settings)


def table(batch) -> PromptTable:
    """Embedded prompts of width 1 whose values are their places."""
    count = len(batch.own_prompts) * max(len(prompt.token_ids) for prompt in batch.own_prompts)
    return PromptTable(
        embeds_FH=torch.arange(float(count))[:, None],
        position_ids_3F=torch.arange(float(count)).expand(3, -1),
        visual_rank_F=torch.full((count,), -1),
        deepstack=[],
        next_position_P=torch.zeros(len(batch.own_prompts)),
    )


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(
    "settings", [{}, {"tp": 2}, {"cp": 2}, {"tp": 2, "cp": 2}], ids=["one", "tp", "cp", "tpcp"]
)
def test_routed_experts_are_in_the_order_in_which_routers_see_tokens(make_batch, settings, packing) -> None:
    """Sequence first, each rank its own slice; all slices together are every token once."""
    layout = LayoutConfig(**settings)
    (micro,) = plan_micro_batches(make_batch(routed=True), rules(layout, packing=packing))
    length, lines = micro.segment_BT.shape[1], len(micro.segment_BT)
    seen = []
    for rank in range(layout.num_procs):
        world = world_at(layout, rank)
        experts_NLK, counted_N = routed(micro, world)
        own = local_tokens(length, layout.cp, world.place.cp_rank).numpy()
        own = np.split(own, layout.tp)[world.place.tp_rank]
        places = [(token, line) for token in own for line in range(lines)]
        seen += places
        for number, (token, line) in enumerate(places):
            assert (experts_NLK[number].numpy() == micro.experts_BTLK[line, token]).all()
            assert bool(counted_N[number]) == (micro.segment_BT[line, token] >= 0)
    assert len(set(seen)) == len(seen) == micro.segment_BT.size


@pytest.mark.parametrize("packing", [False, True])
def test_empty_micro_batch_has_distinct_experts_and_predicts_nothing(packing) -> None:
    """Dispatchers count on distinct experts, and a rank without rows must not add to the loss."""
    micro = empty_micro_batch(rules(LayoutConfig(tp=2, cp=2), packing=packing))
    assert micro.segment_BT.shape == (1, 8)
    assert (micro.segment_BT == -1).all()
    assert (micro.experts_BTLK == np.arange(2)).all()
    assert not len(micro.target_N)


@pytest.mark.parametrize("packing", [False, True])
def test_predicted_tokens_are_each_on_one_context_parallel_rank(make_batch, packing) -> None:
    """Every completion token is predicted once, and all ranks name them in the same order."""
    layout = LayoutConfig(cp=2)
    (micro,) = plan_micro_batches(make_batch(), rules(layout, packing=packing))
    own = [predicted(micro, world_at(layout, rank)) for rank in range(2)]
    assert torch.equal(own[0].all_target_N, own[1].all_target_N)
    assert torch.equal(own[0].all_target_N, torch.cat([each.target_N for each in own]))
    assert sorted(own[0].all_target_N.tolist()) == sorted(micro.target_N.tolist())
    assert own[0].counts == [len(each.target_N) for each in own]


def test_packed_documents_cover_every_query_once_and_hide_other_sequences(make_batch) -> None:
    """Documents partition this rank's tokens; keys are the document's alone."""
    layout, batch = LayoutConfig(cp=2), make_batch()
    (micro,) = plan_micro_batches(batch, rules(layout, packing=True))
    tokens = torch.zeros(sum(map(len, batch.completion_token_ids)), dtype=torch.long)
    completions = Completions(token_ids_C=tokens, position_C=tokens.float())
    inputs = lay_out(lambda ids: ids[:, None].float(), table(batch), completions, micro, world_at(layout, 1))
    parts: list[Document] = inputs.documents.parts
    queries = torch.cat([part.queries for part in parts])
    own = local_tokens(micro.segment_BT.shape[1], 2, 1)
    assert queries.tolist() == list(range(len(own)))
    for part in parts:
        assert bool(((own[part.queries] >= part.keys.start) & (own[part.queries] < part.keys.stop)).all())
        assert not part.hidden_QT.all(-1).any()  # every token sees something


def test_without_branches_packed_documents_need_no_mask(make_batch) -> None:
    """One row a sequence is plainly causal."""
    batch = make_batch()
    (micro,) = plan_micro_batches(batch, rules(LayoutConfig(), packing=True, share_prompts=False))
    tokens = torch.zeros(sum(map(len, batch.completion_token_ids)), dtype=torch.long)
    completions = Completions(token_ids_C=tokens, position_C=tokens.float())
    inputs = lay_out(
        lambda ids: ids[:, None].float(), table(batch), completions, micro, world_at(LayoutConfig(), 0)
    )
    assert inputs.hidden_B1TT is None
    assert all(part.hidden_QT is None for part in inputs.documents.parts)
    assert len(inputs.documents.parts) == batch.num_rows
