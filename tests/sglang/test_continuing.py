"""Real servers go on with what was begun elsewhere, and end the samples of a group that nobody needs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from relax.rollout.engine import Completion
from tests.sglang.test_agreement import assert_alike


def cut(completion: Completion, num_prompt_tokens: int, num_tokens: int) -> Completion:
    """Return what there was of a completion after so many tokens."""
    return replace(
        completion,
        token_ids=completion.token_ids[:num_tokens],
        logprobs=completion.logprobs[:num_tokens],
        token_policy_versions=completion.token_policy_versions[:num_tokens],
        routed_experts=completion.routed_experts[: num_prompt_tokens + num_tokens - 1],
        finish_reason="abort",
    )


def test_what_the_embedded_engine_has_begun_is_finished_alike(servers, torch_engine, requests) -> None:
    """Pictures, sounds, films and text: the same tokens, logprobs and experts as if nobody had interrupted."""
    whole = torch_engine.generate(requests)
    asked = [
        replace(request, begun=[cut(each, len(request.token_ids), 2)])
        for request, each in zip(requests, whole, strict=True)
    ]
    assert_alike(servers.generate(asked), whole)
    done = [replace(request, begun=[each]) for request, each in zip(requests, whole, strict=True)]
    assert_alike(servers.generate(done), whole)


def test_aborted_answers_are_gone_on_with_under_new_weights(attach, torch_engine, requests, publish) -> None:
    """Old tokens stay as recorded; the later ones are those of the new weights."""
    engine = attach()
    begun = [
        cut(each, len(request.token_ids), 3)
        for request, each in zip(requests, engine.generate(requests), strict=True)
    ]
    snapshot, version = publish()
    engine.adopt(snapshot, version)
    torch_engine.adopt(snapshot, version)
    asked = [replace(request, begun=[each]) for request, each in zip(requests, begun, strict=True)]
    made = engine.generate(asked)
    assert_alike(made, torch_engine.generate(asked))
    assert {tuple(each.token_policy_versions) for each in made} == {(0, 0, 0, version, version)}


def test_group_that_has_enough_is_stopped_on_the_server(attach, requests) -> None:
    """One sample is a few tokens from its end; the others, with hundreds to go, end with it."""
    limit = 1500
    request = replace(
        requests[-1], num_samples=4, num_wanted=1, greedy=False, temperature=1.0, max_new_tokens=limit
    )
    num_old, spec = limit - 3, attach()._spec
    nearly = Completion(
        uid=request.uid,
        sample_index=2,
        token_ids=np.random.default_rng(0).integers(0, 400, num_old).astype(np.int32),
        logprobs=np.full(num_old, -1.0, np.float32),
        token_policy_versions=np.zeros(num_old, np.int32),
        routed_experts=np.zeros(
            (len(request.token_ids) + num_old - 1, spec.num_layers, spec.top_k), np.uint8
        ),
        finish_reason="abort",
        text="",
    )
    made = attach().generate([replace(request, begun=[nearly])])
    assert [each.sample_index for each in made] == [0, 1, 2, 3]
    assert made[2].is_finished
    assert len(made[2].token_ids) <= limit
    assert any(each.finish_reason == "abort" and len(each.token_ids) < limit for each in made)
