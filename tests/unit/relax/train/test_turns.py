"""Rows of several turns: laid out by hand, as the engine sampled them, without what was observed in the loss."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from relax.agents.rows import turn_row
from relax.agents.transcript import Transcript
from relax.algorithms.config import AlgorithmConfig
from relax.errors import TrainingError
from relax.models.inputs import PromptInputs
from relax.models.spec import ThinkerSpec
from relax.rollout.engine import GenerateRequest
from relax.rollout.torch_engine import TorchEngine
from relax.train.batch import CutRules, TrainBatch, check_batch, plan_micro_batches
from relax.train.config import TrainerConfig
from relax.train.trainer import Trainer
from tests.unit.relax.train.conftest import make_prompt

KINDS = (("image",), ("audio",), ("video",), ("image", "video"), ())


def turn_batch(**changes) -> TrainBatch:
    """Return one row of two turns and one of a single turn, of one group."""
    row = turn_row(
        np.array([1, 2], np.int32),
        np.array([3, 4, 9, 9, 6, 7], np.int32),
        np.array([1, 1, 0, 0, 1, 1], bool),
    )
    columns = {
        "prompts": [PromptInputs(row.prompt_token_ids), PromptInputs(np.array([1, 2], np.int32))],
        "groups": np.zeros(2, np.int32),
        "prompt_of_row": np.array([0, 1], np.int32),
        "early_places": [row.early_places, np.empty(0, np.int64)],
        "completion_token_ids": [row.completion_token_ids, np.array([5, 8], np.int32)],
        "rollout_logprobs": [np.zeros(4, np.float32), np.zeros(2, np.float32)],
        "routed_experts": [None, None],
        "rewards": np.array([1.0, 0.0], np.float32),
    }
    return TrainBatch(**{**columns, **changes})


def test_tokens_of_earlier_turns_are_predicted_where_they_stand() -> None:
    """The prompt has all but the last turn; observed tokens are nobody's target."""
    batch = turn_batch()
    check_batch(batch, 100, None)
    (micro,) = plan_micro_batches(batch, CutRules(max_tokens=100, packing=True))
    # packed: row 1 (1 2 | 5), then row 0 (1 2 3 4 9 9 | 6); the last token of each is only predicted
    assert micro.prompt_place_BT.tolist() == [[6, 7, -1, 0, 1, 2, 3, 4, 5, -1]]
    assert micro.completion_place_BT.tolist() == [[-1, -1, 4, -1, -1, -1, -1, -1, -1, 2]]
    assert micro.predictor_N.tolist() == [1, 2, 4, 5, 8, 9]
    assert micro.target_N.tolist() == [4, 5, 0, 1, 2, 3]


def test_rows_with_one_history_share_its_sequence() -> None:
    """Earlier turns are predicted from one place for each of them."""
    batch = turn_batch()
    batch = replace(
        batch,
        prompts=batch.prompts[:1],
        prompt_of_row=np.zeros(2, np.int32),
        early_places=[batch.early_places[0]] * 2,
        completion_token_ids=[batch.completion_token_ids[0], np.array([3, 4, 8], np.int32)],
        rollout_logprobs=[np.zeros(4, np.float32), np.zeros(3, np.float32)],
    )
    check_batch(batch, 100, None)
    (micro,) = plan_micro_batches(batch, CutRules(max_tokens=100))
    assert micro.segment_BT.tolist() == [[0, 0, 0, 0, 0, 0, 1]]
    assert micro.predictor_N.tolist() == [1, 2, 5, 6, 1, 2, 5]
    assert micro.target_N.tolist() == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("places", [[2, 2], [3, 2], [0, 2], [2, 6], [2, 4], [2, 3, 4, 5]])
def test_early_places_must_be_where_the_tokens_stand(places: list[int]) -> None:
    """Rising, after the first token, with the row's own tokens, and some left for the last turn."""
    batch = turn_batch(early_places=[np.array(places), np.empty(0, np.int64)])
    with pytest.raises(
        TrainingError, match=r"batch row 0: early_places must be where .* got \[" + str(places[0])
    ):
        check_batch(batch, 100, None)


def play(engine: TorchEngine, spec: ThinkerSpec, temperature: float) -> list[tuple]:
    """Return (prompt, trace, media, group) of episodes of three turns that show media of all kinds in between."""
    rng, rows = np.random.default_rng(0), []
    for group, kinds in enumerate(KINDS):
        prompt = make_prompt(rng, kinds, spec)
        for sample in range(2):
            transcript = Transcript(prompt.token_ids, prompt.media, [])
            media = {tower: list(items) for tower, items in prompt.media.items()}
            for turn in range(3):
                request = GenerateRequest(
                    uid=f"{group}/{sample}",
                    token_ids=transcript.token_ids,
                    media=media,
                    seed=100 * sample + turn,
                    max_new_tokens=3,
                    temperature=temperature,
                )
                (completion,) = engine.generate([request])
                transcript.answer(completion)
                if turn < 2:
                    shown = make_prompt(rng, KINDS[(group + turn + sample) % len(KINDS)], spec)
                    transcript.observe(shown.token_ids)
                    for tower, items in shown.media.items():
                        media.setdefault(tower, []).extend(items)
            rows.append((prompt, transcript.trace(), media, group))
    return rows


def batch_of(rows: list[tuple], temperature: float) -> TrainBatch:
    """Return episodes as the trainer takes them."""
    made = [turn_row(prompt.token_ids, trace.token_ids, trace.loss_mask) for prompt, trace, *_ in rows]
    return TrainBatch(
        prompts=[PromptInputs(row.prompt_token_ids, each[2]) for row, each in zip(made, rows, strict=True)],
        groups=np.array([each[3] for each in rows], np.int32),
        prompt_of_row=np.arange(len(rows), dtype=np.int32),
        early_places=[row.early_places for row in made],
        completion_token_ids=[row.completion_token_ids for row in made],
        rollout_logprobs=[trace.logprobs[trace.loss_mask] for _, trace, *_ in rows],
        routed_experts=[trace.routed_experts for _, trace, *_ in rows],
        rewards=np.arange(len(rows), dtype=np.float32) % 2,
        temperature=temperature,
    )


@pytest.mark.parametrize(("packing", "temperature"), [(False, 1.0), (True, 0.7)])
def test_media_of_later_turns_give_the_trainer_the_engines_logprobs(
    omni_dir, packing: bool, temperature: float
) -> None:
    """Pictures, sounds and films between turns, experts replayed; only sampled tokens are counted."""
    engine = TorchEngine(omni_dir, num_threads=1)
    rows = play(engine, ThinkerSpec.from_pretrained(omni_dir), temperature)
    engine.close()
    trainer = Trainer(omni_dir, TrainerConfig(packing=packing), AlgorithmConfig(), seed=0)
    result = trainer.train_step(batch_of(rows, temperature))
    assert result.metrics["logprob_difference_max_nats"] < 1e-4
    assert result.metrics["routing_mismatch"] <= 0.002  # a tie between two experts may fall either way
    assert result.metrics["num_completion_tokens"] == sum(int(trace.loss_mask.sum()) for _, trace, *_ in rows)
    assert result.metrics["grad_norm"] > 1e-3
    for (_, trace, *_), logprobs in zip(rows, result.trainer_logprobs, strict=True):
        np.testing.assert_allclose(logprobs, trace.logprobs[trace.loss_mask], atol=1e-4)


def test_rows_of_one_turn_train_as_without_turns(omni_dir) -> None:
    """Prompts of their own change neither logprobs nor loss nor gradient."""
    spec, rng = ThinkerSpec.from_pretrained(omni_dir), np.random.default_rng(0)
    prompts = [make_prompt(rng, kinds, spec) for kinds in KINDS[:2]]
    plain = TrainBatch(
        prompts=prompts,
        groups=np.array([0, 0, 1, 1], np.int32),
        completion_token_ids=[rng.integers(10, 400, 3).astype(np.int32) for _ in range(4)],
        rollout_logprobs=[np.full(3, -6.0, np.float32)] * 4,
        routed_experts=[None] * 4,
        rewards=np.array([1.0, 0.0, 0.5, 0.0], np.float32),
    )
    turns = replace(
        plain,
        prompts=[prompts[group] for group in plain.groups],
        prompt_of_row=np.arange(4, dtype=np.int32),
        early_places=[np.empty(0, np.int64)] * 4,
    )
    config = TrainerConfig(routing_replay=False)
    results = [
        Trainer(omni_dir, config, AlgorithmConfig(), seed=0).train_step(each) for each in (plain, turns)
    ]
    for name in ("loss", "grad_norm", "entropy_nats", "num_completion_tokens"):
        assert results[0].metrics[name] == pytest.approx(results[1].metrics[name], rel=1e-4, abs=1e-6)
    for ours, theirs in zip(*(result.trainer_logprobs for result in results), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
