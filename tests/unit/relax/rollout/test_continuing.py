"""Completions that are interrupted and gone on with: the same as if nothing had been, under the same weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from relax.models.batch import collate, hf_inputs
from relax.models.inputs import PromptInputs
from relax.models.snapshot import write_snapshot
from relax.models.thinker import checkpoint_views, load_thinker
from relax.rollout.continuing import chosen_samples, joined_routes, refusal_of_begun
from relax.rollout.engine import Completion, GenerateRequest
from relax.rollout.torch_engine import TorchEngine

MAX_NEW_TOKENS = 8


@pytest.fixture
def engine(tiny_dir):
    engine = TorchEngine(tiny_dir)
    yield engine
    engine.close()


@pytest.fixture
def requests(make_prompt) -> list[GenerateRequest]:
    """Requests with pictures, sounds and films, of unequal lengths; the first is greedy."""
    made = []
    for index, towers in enumerate(((), ("image",), ("audio", "video"))):
        prompt = make_prompt(*towers, num_words=3 + 4 * index, seed=index)
        made.append(
            GenerateRequest(
                uid=f"r{index}",
                token_ids=prompt.token_ids,
                media=prompt.media,
                num_samples=3,
                seed=index,
                max_new_tokens=MAX_NEW_TOKENS,
                greedy=index == 0,
            )
        )
    return made


def cut(completion: Completion, num_tokens: int, request: GenerateRequest) -> Completion:
    """Return what there was of a completion after so many tokens."""
    num_routes = len(request.token_ids) + num_tokens - 1
    return replace(
        completion,
        token_ids=completion.token_ids[:num_tokens],
        logprobs=completion.logprobs[:num_tokens],
        token_policy_versions=completion.token_policy_versions[:num_tokens],
        routed_experts=completion.routed_experts[:num_routes] if num_tokens else None,
        finish_reason="abort",
        text="",
    )


def generate_interrupted(
    engine: TorchEngine, requests: list[GenerateRequest], num_steps: int
) -> list[Completion]:
    """Generate, and abort before step `num_steps` (the prefill is step 0)."""
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1
        if steps == num_steps:
            engine.abort()

    hook = engine._thinker.hf.lm_head.register_forward_hook(count)
    try:
        return engine.generate(requests)
    finally:
        hook.remove()


def going_on(requests: list[GenerateRequest], completions: list[Completion]) -> list[GenerateRequest]:
    """Return the requests that go on with what came of them."""
    return [
        replace(request, begun=[each for each in completions if each.uid == request.uid])
        for request in requests
    ]


@pytest.mark.parametrize("num_steps", [1, 3, 7])
def test_interrupted_completions_end_as_if_nothing_had_been(engine, requests, num_steps):
    """Under the same weights: the same tokens, greedy or drawn, the same experts, logprobs up to rounding."""
    whole = engine.generate(requests)
    begun = generate_interrupted(engine, requests, num_steps)
    assert {(each.finish_reason, len(each.token_ids)) for each in begun} == {("abort", num_steps)}
    again = engine.generate(going_on(requests, begun))
    for one, other, old in zip(whole, again, begun, strict=True):
        assert (one.uid, one.sample_index, one.finish_reason, one.text) == (
            other.uid,
            other.sample_index,
            other.finish_reason,
            other.text,
        )
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_array_equal(other.logprobs[:num_steps], old.logprobs)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)
        np.testing.assert_array_equal(one.routed_experts, other.routed_experts)


def test_samples_of_a_group_may_be_at_different_places(engine, requests):
    """One not begun, one in the middle, one finished: what is finished comes back as it is."""
    whole = engine.generate(requests)
    places = (0, 5, MAX_NEW_TOKENS)
    begun = [
        each if places[each.sample_index] == MAX_NEW_TOKENS else cut(each, places[each.sample_index], request)
        for request in requests
        for each in whole
        if each.uid == request.uid
    ]
    for one, other in zip(whole, engine.generate(going_on(requests, begun)), strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)
        np.testing.assert_array_equal(one.routed_experts, other.routed_experts)
        assert other.text == one.text


def test_later_tokens_are_those_of_the_new_weights(engine, requests, tiny_dir, tmp_path):
    """They carry the new version, logprobs and experts of a plain pass over all; the old ones stay as recorded."""
    begun = generate_interrupted(engine, requests, 3)
    other = load_thinker(tiny_dir)
    with torch.no_grad():
        for view in checkpoint_views(other).values():
            view.mul_(1.3)
    engine.adopt(write_snapshot(tmp_path / "v5", checkpoint_views(other), 5), 5)
    asked = going_on(requests, begun)
    by_uid = {request.uid: request for request in asked}
    for old, made in zip(begun, engine.generate(asked), strict=True):
        request = by_uid[made.uid]
        assert made.token_policy_versions.tolist() == [0] * 3 + [5] * (MAX_NEW_TOKENS - 3)
        assert made.token_ids[:3].tolist() == old.token_ids.tolist()
        np.testing.assert_array_equal(made.logprobs[:3], old.logprobs)
        logits, routes = teacher_forced(other, request, made.token_ids)
        expected = logits.log_softmax(-1).gather(1, torch.from_numpy(made.token_ids).long()[:, None])[:, 0]
        np.testing.assert_allclose(made.logprobs[3:], expected[3:].numpy(), atol=5e-5)
        num_old = len(request.token_ids) + 2
        assert made.routed_experts.shape == (num_old + MAX_NEW_TOKENS - 3, *routes.shape[1:])
        np.testing.assert_array_equal(made.routed_experts[:num_old], old.routed_experts)
        np.testing.assert_array_equal(np.sort(made.routed_experts[num_old:]), np.sort(routes[num_old:]))


def teacher_forced(thinker, request: GenerateRequest, token_ids: np.ndarray):
    """Return (logits from the prompt's last token on, routed experts) of one forward pass over everything."""
    ids = np.concatenate((request.token_ids, token_ids[:-1]))
    routes = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _m, _i, outputs: routes.append(outputs[2].numpy()))
        for layer in thinker.hf.model.layers
    ]
    with torch.inference_mode():
        batch = collate([PromptInputs(ids, request.media)], thinker.spec)
        logits = thinker.hf(**hf_inputs(batch, thinker.spec)).logits[0]
    for hook in hooks:
        hook.remove()
    return logits[len(request.token_ids) - 1 :], np.stack(routes, 1)


def test_sampled_placeholders_are_words_when_they_are_gone_on_with(engine, requests, thinker):
    """A model may sample the token that stands for a picture; it is no picture then, nor later."""
    whole = engine.generate(requests[1:2])
    pad = thinker.spec.image_token_id
    begun = []
    for each in whole:
        tokens = each.token_ids.copy()
        tokens[1] = pad
        begun.append(cut(replace(each, token_ids=tokens), 3, requests[1]))
    again = engine.generate(going_on(requests[1:2], begun))
    assert [each.token_ids[1] for each in again] == [pad] * 3
    assert {len(each.token_ids) for each in again} == {MAX_NEW_TOKENS}


def test_group_is_stopped_when_enough_samples_have_finished(engine, requests):
    """The others are aborted with what they have; a group that has enough already is not run at all."""
    whole = engine.generate(requests[:1])
    begun = [cut(each, 2 + 2 * each.sample_index, requests[0]) for each in whole]
    asked = [replace(going_on(requests[:1], begun)[0], num_wanted=1)]
    made = engine.generate(asked)
    assert [each.finish_reason for each in made] == ["abort", "abort", "length"]
    assert [len(each.token_ids) for each in made] == [4, 6, MAX_NEW_TOKENS]
    assert chosen_samples(made, 1) == made[2:]
    done = engine.generate([replace(asked[0], begun=made)])
    assert [len(each.token_ids) for each in done] == [4, 6, MAX_NEW_TOKENS]


def changed(request: GenerateRequest, whole: Completion, **changes) -> list[Completion]:
    return [replace(cut(whole, 3, request), **changes)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda r, w: changed(r, w, sample_index=3), "begun must hold samples of 0 to 2 once each, got [3]"),
        (lambda r, w: changed(r, w) * 2, "begun must hold samples of 0 to 2 once each, got [0, 0]"),
        (
            lambda r, w: changed(r, w, logprobs=w.logprobs[:1]),
            "begun sample 0: every token must have a logprob and a policy version, got 3 tokens",
        ),
        (
            lambda r, w: [replace(w, finish_reason="abort")],
            "begun sample 0: must have fewer than 8 tokens, got 8",
        ),
        (
            lambda r, w: changed(r, w, token_ids=np.array([1, 2, 900], np.int32)),
            "begun sample 0: token_ids must be in [0, 512), got 1 to 900",
        ),
        (
            lambda r, w: changed(r, w, routed_experts=w.routed_experts[:1]),
            "begun sample 0: routed_experts must be of 7 tokens, got 1",
        ),
    ],
)
def test_what_cannot_be_gone_on_with_is_refused(
    requests, change: Callable[[GenerateRequest, Completion], list[Completion]], reason
):
    """It would crash the model, or be read as something else."""
    request = requests[0]
    whole = Completion(
        uid=request.uid,
        sample_index=0,
        token_ids=np.zeros(8, np.int32),
        logprobs=np.zeros(8, np.float32),
        token_policy_versions=np.zeros(8, np.int32),
        routed_experts=np.zeros((len(request.token_ids) + 7, 2, 2), np.uint8),
        finish_reason="length",
        text="",
    )
    assert refusal_of_begun(replace(request, begun=[whole]), 512) == ""
    assert refusal_of_begun(replace(request, begun=change(request, whole)), 512) == (
        f"request {request.uid}: {reason}"
    )


def test_routes_that_one_side_lacks_are_no_routes():
    """A whole completion has all of them or none."""
    old, new = np.ones((5, 2, 2), np.uint8), np.zeros((3, 2, 2), np.uint8)
    whole = joined_routes(old, new, 3, 3)
    assert whole is not None
    assert whole[:, 0, 0].tolist() == [1] * 5 + [0] * 3
    assert joined_routes(None, new, 3, 3) is None
    assert joined_routes(old, None, 3, 3) is None
    assert joined_routes(None, new, 3, 0) is new
