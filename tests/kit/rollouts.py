"""Rollouts of the embedded engine as training batches, and the same rows as the plain reference reads them. No fake."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relax.config import RunConfig
from relax.models.inputs import PromptInputs
from relax.models.spec import ThinkerSpec
from relax.rollout.engine import Completion, GenerateRequest
from relax.rollout.torch_engine import TorchEngine
from relax.train.batch import TrainBatch
from tests.kit.plain_grpo import PlainSettings, Sample


def roll_out(
    engine: TorchEngine,
    prompts: Sequence[PromptInputs],
    spec: ThinkerSpec,
    *,
    group_size: int,
    max_new_tokens: int,
    seed: int,
    oversampling: int = 2,
) -> TrainBatch:
    """Return whole groups of ordinary completions, scored by how many of their tokens have small ids.

    More are sampled, by `oversampling`, and those with padding, placeholders or start tokens of media are left out:
    transformers 5.12 gives the padding token's embedding no gradient, and reads a start token as a medium's beginning.
    """
    requests = [
        GenerateRequest(
            uid=str(index),
            token_ids=prompt.token_ids,
            media=prompt.media,
            num_samples=oversampling * group_size,
            seed=1000 * seed + index,
            max_new_tokens=max_new_tokens,
            temperature=1.0,
        )
        for index, prompt in enumerate(prompts)
    ]
    answers = engine.generate(requests)
    kept: list[Completion] = []
    for request in requests:
        ordinary = [each for each in answers if each.uid == request.uid and _is_ordinary(each, spec)]
        if len(ordinary) < group_size:
            raise RuntimeError(
                f"roll_out: {group_size} ordinary completions must be there, got {len(ordinary)}"
            )
        kept += ordinary[:group_size]
    return TrainBatch(
        prompts=prompts,
        groups=np.array([int(completion.uid) for completion in kept], np.int32),
        completion_token_ids=[completion.token_ids for completion in kept],
        rollout_logprobs=[completion.logprobs for completion in kept],
        routed_experts=[completion.routed_experts for completion in kept],
        rewards=np.array([(c.token_ids < spec.vocab_size // 2).mean() for c in kept], np.float32),
    )


def plain_samples(batch: TrainBatch) -> list[Sample]:
    """Return a batch's rows for the plain reference."""
    return [
        Sample(
            group=int(group),
            prompt_token_ids=batch.prompts[group].token_ids,
            media=batch.prompts[group].media,
            completion_token_ids=batch.completion_token_ids[row],
            rollout_logprobs=batch.rollout_logprobs[row],
            reward=float(batch.rewards[row]),
            routed_experts=batch.routed_experts[row],
        )
        for row, group in enumerate(batch.groups)
    ]


def plain_settings(config: RunConfig, *, replay: bool, max_rows: int | None = None) -> PlainSettings:
    """Return a run's numbers for the plain reference, which knows one schedule and no weight decay."""
    actor, algorithm = config.actor, config.algorithm
    if actor.weight_decay or actor.max_grad_norm is None or algorithm.name != "grpo":
        raise ValueError(
            "plain_settings: the run must be GRPO with clipping and no weight decay, got another"
        )
    return PlainSettings(
        lr=actor.lr,
        warmup_steps=actor.warmup_steps,
        betas=(actor.beta1, actor.beta2),
        epsilon=actor.epsilon,
        max_grad_norm=actor.max_grad_norm,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        kl_coef=algorithm.kl_coef,
        replay=replay,
        max_rows=max_rows,
    )


def _is_ordinary(completion: Completion, spec: ThinkerSpec) -> bool:
    special = {spec.pad_token_id, spec.image_token_id, spec.audio_token_id, spec.video_token_id}
    special |= {spec.vision_start_token_id, spec.audio_start_token_id}
    return not special & set(completion.token_ids.tolist())
