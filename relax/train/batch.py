"""A training batch, its checks, and its cutting into sequences and micro-batches. Numpy only, no model.

A sequence is a prompt followed by branches, each branch being the completion of one row without its last token. A
token sees the prompt and the earlier tokens of its own branch, so the rows of a group cost one prompt:

    prompt   p p p p p
    branch 1           a a
    branch 2               b b b      b does not see a

With one branch a sequence is the plain causal one. A micro-batch has its sequences side by side, padded to one length
[B, T], or packed one after another into a single row [1, T] with the bounds of each.

Shapes: B sequences, T tokens (padded), N predicted tokens, L layers with experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import xxhash

from relax.errors import TrainingError
from relax.models.inputs import PromptInputs
from relax.train.given import GivenScores


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """Complete groups of rollouts, as the actor takes them from the queue.

    With data parallel ranks each knows the tokens and rewards of the whole batch, so that all compute the same
    advantages, normalisers and metrics; it trains `rows`, and needs media and routing of these alone.
    """

    prompts: Sequence[PromptInputs]
    """One for each group, unless `prompt_of_row` says otherwise."""
    groups: np.ndarray
    """int32 [num_rows]: the group of each row; unless `prompt_of_row` says otherwise, an index into `prompts`."""
    completion_token_ids: Sequence[np.ndarray]
    """int32 [num_completion_tokens] for each row."""
    rollout_logprobs: Sequence[np.ndarray]
    """float32 [num_completion_tokens] for each row, under the distribution that sampled."""
    routed_experts: Sequence[np.ndarray | None]
    """uint8 or uint16 [num_prompt_tokens + num_completion_tokens - 1, L, K] for each row, of the layers with experts
    of this rank's stage; None: not reported."""
    rewards: np.ndarray
    """float32 [num_rows]."""
    temperature: float = 1.0
    """Sampling temperature of the rollouts; the trainer's logits are divided by it."""
    stale_tokens: Sequence[np.ndarray] | None = None
    """bool [num_completion_tokens] for each row: tokens from weights older than the staleness bound allows; None: the
    bound lets none through."""
    stale_policy: Literal["mask", "reweight"] = "mask"
    """What stale tokens count: nothing, or a policy gradient under a truncated importance weight."""
    rows: np.ndarray | None = None
    """int [num_own_rows], rising: the rows that this rank trains; None: all."""
    given: GivenScores = field(default_factory=GivenScores)
    """What other services have computed of it."""
    prompt_of_row: np.ndarray | None = None
    """int32 [num_rows]: the prompt of each row, where the rows of a group have prompts of their own: those of several
    turns, of which the prompt is all that came before the last one; None: that of its group."""
    early_places: Sequence[np.ndarray] | None = None
    """int [num_early] for each row: places in its prompt, rising, of tokens that the row generated itself, in turns
    before the last. The row's completion tokens begin with these; None: there are none."""

    @property
    def own_rows(self) -> np.ndarray:
        """The rows that this rank trains."""
        return np.arange(self.num_rows) if self.rows is None else self.rows

    @property
    def prompt_numbers(self) -> np.ndarray:
        """The prompt of each row, an index into `prompts`."""
        return np.asarray(self.groups if self.prompt_of_row is None else self.prompt_of_row)

    @property
    def own_prompt_numbers(self) -> np.ndarray:
        """The prompts of the rows that this rank trains, rising."""
        return np.unique(self.prompt_numbers[self.own_rows])

    @property
    def own_prompts(self) -> list[PromptInputs]:
        """The prompts of `own_prompt_numbers`."""
        return [self.prompts[number] for number in self.own_prompt_numbers]

    def prompt_of(self, row: int) -> PromptInputs:
        """Return what the last turn of a row follows."""
        return self.prompts[int(self.prompt_numbers[row])]

    def early_of(self, row: int) -> np.ndarray:
        """Return the places in its prompt of the tokens that a row generated in turns before the last."""
        return _NONE if self.early_places is None else np.asarray(self.early_places[row])

    def num_late(self, row: int) -> int:
        """Return the tokens of a row's last turn."""
        return len(self.completion_token_ids[row]) - len(self.early_of(row))

    @property
    def has_routing(self) -> bool:
        """Whether each row that this rank trains came with its experts."""
        experts = dict(enumerate(self.routed_experts))
        return all(experts.get(row) is not None for row in self.own_rows.tolist())

    @property
    def num_rows(self) -> int:
        return len(self.completion_token_ids)


_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, kw_only=True)
class RoutingShape:
    """What routing of the rollout must look like: layers with experts, experts of a token, experts there are."""

    num_layers: int
    top_k: int
    num_experts: int

    @property
    def dtype(self) -> type[np.unsignedinteger]:
        """The smallest type that can name every expert."""
        return np.uint8 if self.num_experts <= 256 else np.uint16


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Sequences that go through the language model together. Places are flat in [T, B], sequence first."""

    prompt_place_BT: np.ndarray
    """Place of each prompt token in the flat [own prompts * longest of them]; -1 elsewhere."""
    completion_place_BT: np.ndarray
    """Place of each completion token in the batch's concatenated completions; -1 elsewhere."""
    segment_BT: np.ndarray
    """0 prompt, 1.. branches, -1 padding."""
    predictor_N: np.ndarray
    """Flat place of the token whose hidden state predicts each completion token."""
    target_N: np.ndarray
    """Index of each predicted token in the batch's concatenated completions."""
    experts_BTLK: np.ndarray | None
    """uint8 or uint16, distinct for each token, padding included; None: routing is not looked at."""
    bounds: tuple[int, ...] = ()
    """Where packed sequences begin, and where the last ends; empty when they are padded side by side."""
    replay: bool = True
    """The routers use the experts; else these are only compared with the routers' own choice."""

    @property
    def num_branches(self) -> int:
        return int(self.segment_BT.max())


def check_batch(batch: TrainBatch, vocab_size: int, routing: RoutingShape | None) -> None:
    """Refuse a batch that cannot be trained on; nothing has changed when this raises.

    Args:
        batch: The batch.
        vocab_size: Completion tokens must be below it.
        routing: What the rollout's routing must look like; None: it is not looked at.

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
    batch.given.check([len(tokens) for tokens in batch.completion_token_ids])
    if not len(batch.own_rows):
        raise TrainingError("batch: rows must name at least one row for each rank, got none")
    if routing is not None:
        for row in batch.own_rows.tolist():
            _check_routing(batch, row, routing)


def _check_row(batch: TrainBatch, row: int, vocab_size: int) -> None:
    group, tokens = int(batch.prompt_numbers[row]), np.asarray(batch.completion_token_ids[row])
    logprobs = np.asarray(batch.rollout_logprobs[row])
    if not 0 <= group < len(batch.prompts):
        what = "group" if batch.prompt_of_row is None else "prompt"
        raise TrainingError(f"batch row {row}: {what} must be in [0, {len(batch.prompts)}), got {group}")
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
    _check_early(batch, row)


def _check_early(batch: TrainBatch, row: int) -> None:
    places, prompt = batch.early_of(row), np.asarray(batch.prompt_of(row).token_ids)
    if not len(places):
        return
    tokens = np.asarray(batch.completion_token_ids[row])
    rising = bool((np.diff(places) > 0).all()) and places[0] > 0 and places[-1] < len(prompt)
    if not rising or len(places) >= len(tokens) or not np.array_equal(prompt[places], tokens[: len(places)]):
        raise TrainingError(
            f"batch row {row}: early_places must be where its first completion tokens stand in its prompt of "
            f"{len(prompt)} tokens, rising, and leave a token for the last turn, got {places.tolist()}"
        )


def _check_routing(batch: TrainBatch, row: int, routing: RoutingShape) -> None:
    experts = batch.routed_experts[row]
    num_prompt = len(batch.prompt_of(row).token_ids)
    shape = (num_prompt + batch.num_late(row) - 1, routing.num_layers, routing.top_k)
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
    if experts.max() >= routing.num_experts or (experts.dtype.kind != "u" and experts.min() < 0):
        raise TrainingError(
            f"batch row {row}: routed_experts must be in [0, {routing.num_experts}), "
            f"got {experts.min()} to {experts.max()}"
        )


@dataclass(frozen=True, kw_only=True)
class CutRules:
    """How sequences become micro-batches.

    max_tokens: padded tokens of a micro-batch; a longer sequence goes alone.
    share_prompts: a group's rows are branches of one sequence.
    packing: sequences follow one another without padding.
    multiple: what the length T of a micro-batch is divisible by.
    routing: what the rollout's routing looks like; None: it is not looked at.
    replay: the routing is replayed, so that rows share a prompt only if it went to the same experts.
    """

    max_tokens: int
    share_prompts: bool = True
    packing: bool = False
    multiple: int = 1
    routing: RoutingShape | None = None
    replay: bool = True

    def padded(self, length: int) -> int:
        """Return the next length that is divisible by `multiple`."""
        return -(-length // self.multiple) * self.multiple


@dataclass(frozen=True)
class _Sequence:
    prompt: int
    num_prompt: int
    rows: list[int]
    length: int


def prompt_routes(batch: TrainBatch) -> np.ndarray:
    """Return int64 [num_own_rows, 2], equal for own rows of which the prompt went to the same experts (a digest)."""
    digests = []
    for row in batch.own_rows.tolist():
        experts = batch.routed_experts[row]
        num_prompt = len(batch.prompt_of(row).token_ids)
        data = b"" if experts is None else experts[:num_prompt].tobytes()
        digests.append(xxhash.xxh3_128_digest(data))
    return np.frombuffer(bytearray(b"".join(digests)), np.int64).reshape(-1, 2)


def plan_micro_batches(
    batch: TrainBatch, rules: CutRules, routes: np.ndarray | None = None
) -> list[MicroBatch]:
    """Cut a checked batch's own rows into micro-batches. Sequences of like length go together.

    Args:
        batch: The batch.
        rules: How to cut it.
        routes: [num_own_rows, ...]: rows share a prompt only if these are equal, `prompt_routes` of all pipeline
            stages, which must cut alike; None: those of the layers that are here, where routing is replayed.
    """
    if routes is None and rules.routing is not None and rules.replay:
        routes = prompt_routes(batch)
    sequences = sorted(_sequences(batch, rules, routes), key=lambda sequence: sequence.length)
    chunks: list[list[_Sequence]] = []
    for sequence in sequences:
        if chunks and _num_tokens([*chunks[-1], sequence], rules) <= rules.max_tokens:
            chunks[-1].append(sequence)
        else:
            chunks.append([sequence])
    layout = _BatchLayout(batch)
    return [_micro_batch(layout, chunk, rules) for chunk in chunks]


def empty_micro_batch(rules: CutRules) -> MicroBatch:
    """Return a micro-batch of padding: a rank runs it when others, with whom it shares experts, have more than it."""
    blank, none = np.full((1, rules.padded(1)), -1, np.int64), np.empty(0, np.int64)
    return MicroBatch(
        prompt_place_BT=blank,
        completion_place_BT=blank,
        segment_BT=blank,
        predictor_N=none,
        target_N=none,
        experts_BTLK=_blank_experts(blank.shape, rules.routing),
        bounds=(0, blank.shape[1]) if rules.packing else (),
        replay=rules.replay,
    )


def _num_tokens(sequences: list[_Sequence], rules: CutRules) -> int:
    """Return the padded tokens of a micro-batch, the longest sequence last."""
    if rules.packing:
        return rules.padded(sum(sequence.length for sequence in sequences))
    return rules.padded(sequences[-1].length) * len(sequences)


def _sequences(batch: TrainBatch, rules: CutRules, routes: np.ndarray | None) -> list[_Sequence]:
    """An engine may route one prompt differently in two batches; such rows do not share a sequence."""
    made: list[_Sequence] = []
    last_of_prompt: dict[int, int] = {}
    number_of = {row: number for number, row in enumerate(batch.own_rows.tolist())}
    keys = [] if routes is None else [route.tobytes() for route in routes]
    for row, number in number_of.items():
        prompt = int(batch.prompt_numbers[row])
        num_prompt, added = len(batch.prompts[prompt].token_ids), batch.num_late(row) - 1
        open_at = last_of_prompt.get(prompt) if rules.share_prompts else None
        if open_at is not None:
            sequence = made[open_at]
            fits = rules.padded(sequence.length + added) <= rules.max_tokens
            if fits and (not keys or keys[number_of[sequence.rows[0]]] == keys[number]):
                made[open_at] = _Sequence(prompt, num_prompt, [*sequence.rows, row], sequence.length + added)
                continue
        last_of_prompt[prompt] = len(made)
        made.append(_Sequence(prompt, num_prompt, [row], num_prompt + added))
    return made


class _BatchLayout:
    """Where prompts and completions of a batch are in the flat arrays that micro-batches pick from."""

    def __init__(self, batch: TrainBatch) -> None:
        self.batch = batch
        self.stride = max(len(prompt.token_ids) for prompt in batch.own_prompts)
        self.prompt_start = {
            number: index * self.stride for index, number in enumerate(batch.own_prompt_numbers.tolist())
        }
        lengths = [len(tokens) for tokens in batch.completion_token_ids]
        self.row_start = np.concatenate(([0], np.cumsum(lengths)))


def _blank_experts(shape: tuple[int, ...], routing: RoutingShape | None) -> np.ndarray | None:
    """Return experts for padding: distinct, since dispatchers count on it."""
    if routing is None:
        return None
    experts = np.empty((*shape, routing.num_layers, routing.top_k), routing.dtype)
    experts[:] = np.arange(routing.top_k)
    return experts


def _micro_batch(layout: _BatchLayout, sequences: list[_Sequence], rules: CutRules) -> MicroBatch:
    num_sequences, longest = len(sequences), rules.padded(max(sequence.length for sequence in sequences))
    ends = np.cumsum([sequence.length for sequence in sequences]).tolist()
    shape = (1, rules.padded(ends[-1])) if rules.packing else (num_sequences, longest)
    starts = [0, *ends[:-1]] if rules.packing else [0] * num_sequences
    prompt_place, completion_place, segment = (np.full(shape, -1, np.int64) for _ in range(3))
    experts = _blank_experts(shape, rules.routing)
    predictors, targets = [], []
    for index, (sequence, begin) in enumerate(zip(sequences, starts, strict=True)):
        line = 0 if rules.packing else index
        end = begin + sequence.num_prompt
        prompt_place[line, begin:end] = layout.prompt_start[sequence.prompt] + np.arange(sequence.num_prompt)
        segment[line, begin:end] = 0
        for branch, row in enumerate(sequence.rows, start=1):
            target = np.arange(layout.row_start[row], layout.row_start[row + 1])
            early = layout.batch.early_of(row)
            start, end = end, end + len(target) - len(early) - 1
            completion_place[line, start:end] = target[len(early) : -1]
            segment[line, start:end] = branch
            last_of_prompt = begin + sequence.num_prompt - 1
            predictor = np.concatenate((begin + early - 1, [last_of_prompt], np.arange(start, end)))
            predictors.append(predictor * shape[0] + line)
            targets.append(target)
            reported = layout.batch.routed_experts[row]
            if experts is not None and reported is not None:
                experts[line, begin : begin + sequence.num_prompt] = reported[: sequence.num_prompt]
                experts[line, start:end] = reported[sequence.num_prompt :]
    tail = [shape[1]] if rules.packing and ends[-1] < shape[1] else []
    return MicroBatch(
        prompt_place_BT=prompt_place,
        completion_place_BT=completion_place,
        segment_BT=segment,
        predictor_N=np.concatenate(predictors),
        target_N=np.concatenate(targets),
        experts_BTLK=experts,
        bounds=(0, *ends, *tail) if rules.packing else (),
        replay=rules.replay,
    )
