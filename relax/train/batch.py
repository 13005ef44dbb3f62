"""A training batch, its checks, and its cutting into sequences and micro-batches. Numpy only, no model.

A sequence is a prompt followed by branches, each branch being the completion of one row without its last token. A
token sees the prompt and the earlier tokens of its own branch, so the rows of a group cost one prompt:

    prompt   p p p p p
    branch 1           a a
    branch 2               b b b      b does not see a

With one branch a sequence is the plain causal one.

Shapes: B sequences, T tokens (padded), N predicted tokens, L layers with experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from relax.errors import TrainingError
from relax.models.inputs import PromptInputs


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """Complete groups of rollouts, as the actor takes them from the queue."""

    prompts: Sequence[PromptInputs]
    """One for each group."""
    groups: np.ndarray
    """int32 [num_rows]: the group of each row, an index into `prompts`."""
    completion_token_ids: Sequence[np.ndarray]
    """int32 [num_completion_tokens] for each row."""
    rollout_logprobs: Sequence[np.ndarray]
    """float32 [num_completion_tokens] for each row, under the distribution that sampled."""
    routed_experts: Sequence[np.ndarray | None]
    """uint8 or uint16 [num_prompt_tokens + num_completion_tokens - 1, L, K] for each row; None: not reported."""
    rewards: np.ndarray
    """float32 [num_rows]."""
    temperature: float = 1.0
    """Sampling temperature of the rollouts; the trainer's logits are divided by it."""
    stale_tokens: Sequence[np.ndarray] | None = None
    """bool [num_completion_tokens] for each row: tokens from weights older than the staleness bound allows; None: the
    bound lets none through."""
    stale_policy: Literal["mask", "reweight"] = "mask"
    """What stale tokens count: nothing, or a policy gradient under a truncated importance weight."""

    @property
    def num_rows(self) -> int:
        return len(self.completion_token_ids)


@dataclass(frozen=True, kw_only=True)
class RoutingShape:
    """What routing of the rollout must look like: layers with experts, experts of a token, experts there are."""

    num_layers: int
    top_k: int
    num_experts: int


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Sequences that go through the language model together. Places are flat in [T, B], sequence first."""

    prompt_place_BT: np.ndarray
    """Place of each prompt token in the flat [num_prompts * longest prompt]; -1 elsewhere."""
    completion_place_BT: np.ndarray
    """Place of each completion token in the batch's concatenated completions; -1 elsewhere."""
    segment_BT: np.ndarray
    """0 prompt, 1.. branches, -1 padding."""
    predictor_N: np.ndarray
    """Flat place of the token whose hidden state predicts each completion token."""
    target_N: np.ndarray
    """Index of each predicted token in the batch's concatenated completions."""
    experts_BTLK: np.ndarray | None
    """int64; None without replay."""

    @property
    def num_branches(self) -> int:
        return int(self.segment_BT.max())


def check_batch(batch: TrainBatch, vocab_size: int, routing: RoutingShape | None) -> None:
    """Refuse a batch that cannot be trained on; nothing has changed when this raises.

    Args:
        batch: The batch.
        vocab_size: Completion tokens must be below it.
        routing: What replayed routing must look like; None: routing is not looked at.

    Raises:
        TrainingError: the message names the row, the rule and the value.
    """
    num_rows = batch.num_rows
    for name in ("groups", "rollout_logprobs", "routed_experts", "rewards"):
        if len(getattr(batch, name)) != num_rows:
            raise TrainingError(f"batch: {name} must have {num_rows} rows, got {len(getattr(batch, name))}")
    if batch.stale_tokens is not None and len(batch.stale_tokens) != num_rows:
        raise TrainingError(f"batch: stale_tokens must have {num_rows} rows, got {len(batch.stale_tokens)}")
    if not num_rows:
        raise TrainingError("batch: completion_token_ids must have at least one row, got none")
    if not (np.isfinite(batch.temperature) and batch.temperature > 0):
        raise TrainingError(f"batch: temperature must be above 0, got {batch.temperature}")
    for row in range(num_rows):
        _check_row(batch, row, vocab_size)
        if routing is not None:
            _check_routing(batch, row, routing)


def _check_row(batch: TrainBatch, row: int, vocab_size: int) -> None:
    group, tokens = int(batch.groups[row]), np.asarray(batch.completion_token_ids[row])
    logprobs = np.asarray(batch.rollout_logprobs[row])
    if not 0 <= group < len(batch.prompts):
        raise TrainingError(f"batch row {row}: group must be in [0, {len(batch.prompts)}), got {group}")
    if not len(tokens):
        raise TrainingError(f"batch row {row}: completion_token_ids must hold at least one token, got none")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        wrong = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        raise TrainingError(
            f"batch row {row}: completion_token_ids must be in [0, {vocab_size}), got {wrong}"
        )
    if len(logprobs) != len(tokens):
        raise TrainingError(
            f"batch row {row}: rollout_logprobs must be one for each of {len(tokens)} tokens, got {len(logprobs)}"
        )
    if not np.isfinite(logprobs).all():
        place = int(np.flatnonzero(~np.isfinite(logprobs))[0])
        raise TrainingError(
            f"batch row {row}: rollout_logprobs must be finite, got {logprobs[place]} at token {place}"
        )
    if batch.stale_tokens is not None and len(batch.stale_tokens[row]) != len(tokens):
        raise TrainingError(
            f"batch row {row}: stale_tokens must be one for each of {len(tokens)} tokens, "
            f"got {len(batch.stale_tokens[row])}"
        )
    if not np.isfinite(batch.rewards[row]):
        raise TrainingError(f"batch row {row}: reward must be finite, got {batch.rewards[row]}")


def _check_routing(batch: TrainBatch, row: int, routing: RoutingShape) -> None:
    experts = batch.routed_experts[row]
    num_prompt = len(batch.prompts[int(batch.groups[row])].token_ids)
    shape = (num_prompt + len(batch.completion_token_ids[row]) - 1, routing.num_layers, routing.top_k)
    if experts is None:
        raise TrainingError(
            f"batch row {row}: routed_experts must be there for routing replay, got none; "
            "let the rollout report them or set actor.routing_replay=false"
        )
    if experts.shape != shape:
        raise TrainingError(
            f"batch row {row}: routed_experts must be {list(shape)} (prompt and completion tokens but the last, "
            f"layers, experts), got {list(experts.shape)}"
        )
    if experts.min() < 0 or experts.max() >= routing.num_experts:
        raise TrainingError(
            f"batch row {row}: routed_experts must be in [0, {routing.num_experts}), "
            f"got {experts.min()} to {experts.max()}"
        )


@dataclass(frozen=True)
class _Sequence:
    group: int
    num_prompt: int
    rows: list[int]
    length: int


def plan_micro_batches(
    batch: TrainBatch, *, max_tokens: int, share_prompts: bool, routing: RoutingShape | None
) -> list[MicroBatch]:
    """Cut a checked batch into micro-batches of at most `max_tokens` padded tokens.

    A sequence longer than `max_tokens` goes alone. Sequences of like length go together.
    """
    sequences = sorted(
        _sequences(batch, max_tokens, share_prompts, routing is not None), key=lambda s: s.length
    )
    chunks: list[list[_Sequence]] = []
    for sequence in sequences:
        if chunks and sequence.length * (len(chunks[-1]) + 1) <= max_tokens:
            chunks[-1].append(sequence)
        else:
            chunks.append([sequence])
    stride = max(len(prompt.token_ids) for prompt in batch.prompts)
    starts = np.concatenate(([0], np.cumsum([len(tokens) for tokens in batch.completion_token_ids])))
    return [_micro_batch(batch, chunk, stride, starts, routing) for chunk in chunks]


def _sequences(batch: TrainBatch, max_tokens: int, share_prompts: bool, replay: bool) -> list[_Sequence]:
    made: list[_Sequence] = []
    last_of_group: dict[int, int] = {}
    for row in range(batch.num_rows):
        group = int(batch.groups[row])
        num_prompt, added = len(batch.prompts[group].token_ids), len(batch.completion_token_ids[row]) - 1
        open_at = last_of_group.get(group) if share_prompts else None
        if open_at is not None:
            sequence = made[open_at]
            fits = sequence.length + added <= max_tokens
            if fits and (not replay or _same_prompt_routing(batch, sequence.rows[0], row, num_prompt)):
                made[open_at] = _Sequence(group, num_prompt, [*sequence.rows, row], sequence.length + added)
                continue
        last_of_group[group] = len(made)
        made.append(_Sequence(group, num_prompt, [row], num_prompt + added))
    return made


def _same_prompt_routing(batch: TrainBatch, first: int, second: int, num_prompt: int) -> bool:
    """An engine may route one prompt differently in two batches; such rows do not share a sequence."""
    left, right = batch.routed_experts[first], batch.routed_experts[second]
    if left is None or right is None:
        return left is right
    return np.array_equal(left[:num_prompt], right[:num_prompt])


def _micro_batch(
    batch: TrainBatch,
    sequences: list[_Sequence],
    stride: int,
    starts: np.ndarray,
    routing: RoutingShape | None,
) -> MicroBatch:
    num_sequences, longest = len(sequences), max(sequence.length for sequence in sequences)
    prompt_place = np.full((num_sequences, longest), -1, np.int64)
    completion_place = np.full((num_sequences, longest), -1, np.int64)
    segment = np.full((num_sequences, longest), -1, np.int64)
    experts = None
    if routing is not None:
        experts = np.empty((num_sequences, longest, routing.num_layers, routing.top_k), np.int64)
        experts[:] = np.arange(routing.top_k)
    predictors, targets = [], []
    for index, sequence in enumerate(sequences):
        end = sequence.num_prompt
        prompt_place[index, :end] = sequence.group * stride + np.arange(end)
        segment[index, :end] = 0
        for branch, row in enumerate(sequence.rows, start=1):
            start, num_tokens = end, int(starts[row + 1] - starts[row])
            end = start + num_tokens - 1
            target = np.arange(starts[row], starts[row + 1])
            completion_place[index, start:end] = target[:-1]
            segment[index, start:end] = branch
            predictor = np.concatenate(([sequence.num_prompt - 1], np.arange(start, end)))
            predictors.append(predictor * num_sequences + index)
            targets.append(target)
            reported = batch.routed_experts[row]
            if experts is not None and reported is not None:
                experts[index, : sequence.num_prompt] = reported[: sequence.num_prompt]
                experts[index, start:end] = reported[sequence.num_prompt :]
    return MicroBatch(
        prompt_place_BT=prompt_place,
        completion_place_BT=completion_place,
        segment_BT=segment,
        predictor_N=np.concatenate(predictors),
        target_N=np.concatenate(targets),
        experts_BTLK=experts,
    )
