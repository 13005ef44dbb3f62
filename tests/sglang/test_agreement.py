"""SGLang and the embedded engine answer alike on the same checkpoint: tokens, logprobs, routing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from relax.rollout.engine import Completion
from tests.sglang.conftest import request_of

LOGPROB_TOLERANCE = 1e-4


def assert_alike(theirs: list[Completion], ours: list[Completion]) -> None:
    """Fail unless both engines gave the same tokens, logprobs within the tolerance, and the same experts."""
    assert [(each.uid, each.sample_index, each.error) for each in theirs] == [
        (each.uid, each.sample_index, each.error) for each in ours
    ]
    for a, b in zip(theirs, ours, strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids, err_msg=a.uid)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=LOGPROB_TOLERANCE, err_msg=a.uid)
        np.testing.assert_array_equal(
            np.sort(a.routed_experts, -1), np.sort(b.routed_experts, -1), err_msg=a.uid
        )
        assert a.routed_experts.dtype == b.routed_experts.dtype
        np.testing.assert_array_equal(a.token_policy_versions, b.token_policy_versions)
        assert (a.finish_reason, a.text) == (b.finish_reason, b.text)


def test_greedy_answers_are_those_of_the_embedded_engine(servers, torch_engine, requests) -> None:
    """Picture, sound, film and text: equal tokens, logprobs and experts."""
    assert {tower for request in requests for tower in request.media} == {"image", "audio", "video"}
    assert_alike(servers.generate(requests), torch_engine.generate(requests))


def test_a_prompt_with_all_media_is_read_alike(servers, torch_engine, requests) -> None:
    """Several media in one prompt keep their order and their places."""
    chosen = [next(each for each in requests if tower in each.media) for tower in ("video", "image", "audio")]
    ids = np.concatenate([each.token_ids for each in chosen])
    media = {tower: items for each in chosen for tower, items in each.media.items()}
    mixed = [request_of("mixed", ids, media)]
    assert_alike(servers.generate(mixed), torch_engine.generate(mixed))


def test_sounds_of_different_length_go_together(servers, torch_engine, requests) -> None:
    """Clips of several prompts in one batch do not touch each other."""
    sound = next(each for each in requests if "audio" in each.media)
    (clip,) = sound.media["audio"]
    pads = sound.token_ids == servers._spec.audio_token_id
    short = {"features": clip["features"][:, : clip["features"].shape[1] // 2]}
    from modalities.base import num_audio_tokens

    kept = np.flatnonzero(pads)[: num_audio_tokens(short["features"].shape[1])]
    ids = sound.token_ids[~pads | np.isin(np.arange(len(pads)), kept)]
    both = [sound, request_of("short", ids, {"audio": [short]})]
    assert_alike(servers.generate(both), torch_engine.generate(both))


def test_sampled_logprobs_are_those_of_the_model(servers, torch_engine, requests) -> None:
    """A sample's logprobs are what the embedded engine's weights give its tokens under the temperature."""
    asked = [replace(request, num_samples=2, greedy=False, temperature=1.3) for request in requests[:3]]
    completions = servers.generate(asked)
    assert [each.sample_index for each in completions] == [0, 1] * 3
    by_uid = {request.uid: request for request in asked}
    spec = servers._spec
    pads = [spec.image_token_id, spec.audio_token_id, spec.video_token_id]
    readable = [each for each in completions if not np.isin(each.token_ids, pads).any()]
    assert readable  # the plain forward pass takes a sampled placeholder for a medium
    for each in readable:
        expected = _teacher_forced(torch_engine, by_uid[each.uid], each, 1.3)
        np.testing.assert_allclose(each.logprobs, expected, atol=LOGPROB_TOLERANCE)


def test_stop_token_ends_a_completion(servers, requests) -> None:
    """A completion ends with the end token, which is part of it, or at the limit."""
    asked = [
        replace(requests[-1], max_new_tokens=64, num_samples=8, greedy=False, temperature=2.0, uid="stop")
    ]
    ends = servers._spec.eos_token_ids
    completions = servers.generate(asked)
    for each in completions:
        stopped = each.token_ids[-1] in ends
        assert each.finish_reason == ("stop" if stopped else "length")
        assert not np.isin(each.token_ids[:-1], ends).any()
    assert {each.finish_reason for each in completions} >= {"length"}


def _teacher_forced(engine, request, completion, temperature):
    import torch

    from relax.models.batch import collate, hf_inputs
    from relax.models.inputs import PromptInputs

    thinker = engine._thinker
    ids = np.concatenate((request.token_ids, completion.token_ids[:-1]))
    batch = collate([PromptInputs(ids, request.media)], thinker.spec)
    with torch.inference_mode():
        logits = thinker.hf(**hf_inputs(batch, thinker.spec)).logits[0, len(request.token_ids) - 1 :]
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(1, torch.from_numpy(completion.token_ids).long()[:, None])[:, 0].numpy()
