"""How completions that were interrupted are gone on with, whatever the engine. Numpy only.

    interrupted:  tokens 0 .. n-1 under old weights      experts of prompt and tokens 0 .. n-2
    gone on with: prompt and the n tokens are run again  the last old token is routed for the first time, under the
                  under the new weights                  weights that sample the next one

Old tokens keep their logprobs, versions and experts as they were recorded; so each token of the whole has those of the
weights that sampled it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from relax.rollout.engine import Completion, GenerateRequest


def begun_by_sample(request: GenerateRequest) -> dict[int, Completion]:
    """Return what was made of the samples of a request, by number, without those of which nothing is there."""
    return {each.sample_index: each for each in request.begun if len(each.token_ids)}


def refusal_of_begun(request: GenerateRequest, vocab_size: int) -> str:
    """Return why the completions that a request begins with cannot be gone on with, or ''."""
    where = f"request {request.uid}"
    samples = [each.sample_index for each in request.begun]
    if len(set(samples)) != len(samples) or not all(0 <= each < request.num_samples for each in samples):
        return f"{where}: begun must hold samples of 0 to {request.num_samples - 1} once each, got {samples}"
    for each in request.begun:
        own = f"{where}: begun sample {each.sample_index}"
        num_tokens = len(each.token_ids)
        if not num_tokens == len(each.logprobs) == len(each.token_policy_versions):
            return f"{own}: every token must have a logprob and a policy version, got {num_tokens} tokens"
        if not each.is_finished and num_tokens >= request.max_new_tokens:
            return f"{own}: must have fewer than {request.max_new_tokens} tokens, got {num_tokens}"
        ids = np.asarray(each.token_ids)
        if num_tokens and not 0 <= ids.min() <= ids.max() < vocab_size:
            return f"{own}: token_ids must be in [0, {vocab_size}), got {ids.min()} to {ids.max()}"
        num_routes = len(request.token_ids) + num_tokens - 1
        if num_tokens and each.routed_experts is not None and len(each.routed_experts) != num_routes:
            return f"{own}: routed_experts must be of {num_routes} tokens, got {len(each.routed_experts)}"
    return ""


def joined_routes(
    old: np.ndarray | None, new: np.ndarray | None, num_prompt_tokens: int, num_old: int
) -> np.ndarray | None:
    """Return the experts of a whole completion [num_prompt_tokens + num_tokens - 1, num_layers, top_k].

    Args:
        old: Of the prompt and all `num_old` tokens but the last one, as recorded.
        new: Of the last old token and what followed it.
        num_prompt_tokens: Of the request.
        num_old: Tokens that were there; none: `new` is all there is.
    """
    if old is None or new is None:
        return None if num_old else new
    return np.concatenate((old[: num_prompt_tokens + num_old - 1], new))


def wanted(request: GenerateRequest) -> int:
    """Return how many samples have to finish: all, unless the request wants fewer."""
    return min(request.num_wanted or request.num_samples, request.num_samples)


def chosen_samples(group: Sequence[Completion], num_samples: int) -> list[Completion]:
    """Return the first `num_samples` finished completions of an over-sampled group; fewer if there are not as many."""
    return [each for each in group if each.is_finished][:num_samples]
