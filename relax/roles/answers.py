"""What becomes of the prompts of one lease: whole groups with their scores, prompts that failed, prompts to ask again.

Pure: it asks no engine, no reward and no queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from relax.records import reward_columns
from relax.rewards.base import RewardInput
from relax.rewards.config import RewardConfig
from relax.rewards.scorer import Score
from relax.rollout.continuing import chosen_samples
from relax.rollout.engine import Completion


@dataclass(kw_only=True)
class Answers:
    """What became of a lease of prompts: whole groups, and of others by uid why they failed, or what there is."""

    rows: list[int] = field(default_factory=list)
    groups: list[list[Completion]] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    aborted: dict[str, list[Completion]] = field(default_factory=dict)


def enough_of(group: list[Completion], num_samples: int) -> tuple[list[Completion], list[Completion]]:
    """Return (the group to be trained on, what is left over) of a group of which more may have been asked for.

    The chosen ones are numbered anew from 0, so that a prompt that is answered twice gives the same uids. A group
    that has too few finished ones comes back as it is.
    """
    chosen = chosen_samples(group, num_samples)
    if len(group) <= num_samples or len(chosen) < num_samples:
        return group, []
    rest = [each for each in group if not any(each is one for one in chosen)]
    return [replace(each, sample_index=number) for number, each in enumerate(chosen)], rest


def reward_input(prompt: dict, completion: Completion) -> RewardInput:
    """Return what rewards may see of a completion."""
    return RewardInput(
        prompt_text=prompt["prompt_text"],
        completion_text=completion.text,
        reference_answer=prompt["reference_answer"],
        finish_reason=completion.finish_reason,
        modality=prompt["modality"],
        num_completion_tokens=len(completion.token_ids),
    )


def with_scores(
    answers: Answers, scores: Sequence[Score], uids: Sequence[str], config: RewardConfig
) -> Answers:
    """Return the answers with the scores of their groups, one a completion, groups that a failure costs left out.

    With `on_failure=use_value` a failure costs its row alone, unless nobody in its group got a reward.
    """
    settled = Answers(failed=dict(answers.failed), aborted=answers.aborted)
    first = 0
    for row, group in zip(answers.rows, answers.groups, strict=True):
        own = list(scores[first : first + len(group)])
        first += len(group)
        errors = [
            f"completion {completion.sample_index}: reward failed: {score.error}"
            for completion, score in zip(group, own, strict=True)
            if score.error
        ]
        if errors and (config.on_failure == "drop_group" or len(errors) == len(group)):
            settled.failed[uids[row]] = errors[0]
            continue
        settled.rows.append(row)
        settled.groups.append(group)
        settled.scores += [
            replace(score, reward=config.failed_reward) if score.error else score for score in own
        ]
    return settled


def score_columns(scores: Sequence[Score], config: RewardConfig) -> dict[str, pa.Array]:
    """Return the columns of the reward's parts and failures."""
    values: dict[str, list] = {
        part.column: [score.parts.get(part.key) for score in scores] for part in config.parts
    }
    values["reward_error"] = [score.error or None for score in scores]
    return {
        column.name: pa.array(values[column.name], column.type) for column in reward_columns(config.labels)
    }


def check_group(group: list[Completion], num_samples: int) -> str:
    """Return why a group cannot be trained on, or ''."""
    for completion in group:
        where = f"completion {completion.sample_index}"
        if completion.error:
            return f"{where}: refused by the engine: {completion.error}"
        if not len(completion.token_ids):
            return f"{where}: must hold at least one token, got none"
        per_token = (completion.token_ids, completion.logprobs, completion.token_policy_versions)
        num_tokens, num_logprobs, num_versions = (len(values) for values in per_token)
        if not num_tokens == num_logprobs == num_versions:
            return (
                f"{where}: every token must have a logprob and a policy version, got {num_tokens} tokens, "
                f"{num_logprobs} logprobs, {num_versions} policy versions"
            )
        if not np.isfinite(completion.logprobs).all():
            return f"{where}: logprobs must be finite, got {completion.logprobs.tolist()}"
    if len(group) != num_samples:
        return f"group: must have {num_samples} completions, got {len(group)}"
    return ""
