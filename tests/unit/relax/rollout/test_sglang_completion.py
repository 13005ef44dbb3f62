"""Requests to bodies: what would kill a server is refused before it is sent; answers are checked."""

from __future__ import annotations

import base64
from dataclasses import replace

import numpy as np
import pytest

from relax.errors import ServiceError
from relax.models.spec import ThinkerSpec
from relax.rollout.engine import Completion, GenerateRequest
from relax.rollout.sglang_completion import aborted, completions_of, jobs_of, one_refusal, refusal_of
from relax.rollout.sglang_messages import Finish, Generated, MetaInfo


@pytest.fixture(scope="module")
def spec(tiny_dir) -> ThinkerSpec:
    return ThinkerSpec.from_pretrained(tiny_dir)


def _request(**changes) -> GenerateRequest:
    return replace(GenerateRequest(uid="r", token_ids=np.array([1, 2, 3], np.int32), seed=5), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": np.array([1, 512], np.int32)}, "request r: token_ids must be in [0, 512), got 512"),
        ({"token_ids": np.array([-1], np.int32)}, "request r: token_ids must be in [0, 512), got -1"),
        (
            {"token_ids": np.zeros(0, np.int32)},
            "request r: token_ids must be a non-empty row of integers, got shape (0,) of int32",
        ),
        (
            {"media": {"image": [{"precomputed_embedding": np.zeros((4, 64), np.float32)}]}},
            "request r: image media must have 'grid_thw', got ['precomputed_embedding']",
        ),
        (
            {"max_new_tokens": 4096},
            "request r: prompt and completion must be at most 4096 tokens together, got 4099",
        ),
        ({"temperature": float("nan")}, "request r: temperature must be finite and not negative, got nan"),
        ({"num_samples": 0}, "request r: num_samples and max_new_tokens must be at least 1, got 0 and 128"),
        (
            {"greedy": True, "temperature": 0.5},
            "request r: temperature of a greedy request must be 0 or 1, got 0.5; SGLang gives its logprobs unscaled",
        ),
    ],
)
def test_what_a_server_could_die_of_is_refused(changes, message, spec) -> None:
    """Each of these either ends the server's scheduler or is misread by it."""
    request = _request(**changes)
    reason = refusal_of(request, spec)
    assert (
        reason if "embedding" not in str(changes) else reason.replace("'patches'", "'grid_thw'")
    ) == message


def test_placeholders_without_their_media_are_refused(spec) -> None:
    """SGLang would answer as if nothing were wrong."""
    ids = np.array([1, spec.vision_start_token_id, spec.image_token_id, 2], np.int32)
    expected = (
        f"request r: runs of the image placeholder token {spec.image_token_id} must be [] long for its media"
    )
    assert refusal_of(_request(token_ids=ids), spec).startswith(expected)


def test_a_group_is_one_body_and_seeds_make_one_for_each_sample(spec) -> None:
    """One seed for all samples of a body would make them alike."""
    request = _request(num_samples=3, temperature=0.7)
    (job,) = jobs_of(request, spec)
    assert (job.num_samples, job.body.sampling_params.stop_token_ids) == (3, spec.eos_token_ids)
    seeded = jobs_of(request, spec, seeded=True)
    seeds = [each.body.sampling_params.sampling_seed for each in seeded]
    assert [each.samples for each in seeded] == [[0], [1], [2]]
    assert len(set(seeds)) == 3
    assert seeds == [each.body.sampling_params.sampling_seed for each in jobs_of(request, spec, seeded=True)]
    assert all(0 <= seed < 1 << 31 for seed in seeds)


def _begun(**changes) -> Completion:
    """Return a sample of `_request()` of which two tokens are there."""
    old = Completion(
        uid="r",
        sample_index=1,
        token_ids=np.array([7, 8], np.int32),
        logprobs=np.array([-1.0, -2.0], np.float32),
        token_policy_versions=np.array([0, 0], np.int32),
        routed_experts=None,
        finish_reason="abort",
        text="",
    )
    return replace(old, **changes)


def test_samples_that_were_begun_have_bodies_of_their_own(spec) -> None:
    """With the rest of their limit; finished ones have none, nor do those with a placeholder go on."""
    request = _request(num_samples=4, max_new_tokens=9, begun=[_begun()])
    going_on, fresh = jobs_of(request, spec)
    assert (going_on.samples, going_on.body.input_ids) == ([1], [1, 2, 3, 7, 8])
    assert going_on.body.sampling_params.max_new_tokens == 7
    assert (fresh.samples, fresh.num_samples, fresh.body.rid) == ([0, 2, 3], 3, None)
    alone = jobs_of(replace(request, num_wanted=2), spec)
    assert [each.samples for each in alone] == [[1], [0], [2], [3]]
    assert len({each.body.rid for each in alone}) == 4
    finished = replace(request, begun=[_begun(finish_reason="stop")], num_samples=2)
    assert [each.samples for each in jobs_of(finished, spec)] == [[0]]
    assert (
        jobs_of(replace(finished, num_samples=1, begun=[_begun(sample_index=0, finish_reason="stop")]), spec)
        == []
    )
    pad = _begun(token_ids=np.array([7, spec.image_token_id], np.int32))
    assert [each.samples for each in jobs_of(replace(request, begun=[pad]), spec)] == [[0, 1, 2, 3]]
    assert aborted(going_on) == [going_on.begun]


def test_what_is_gone_on_with_comes_back_whole(spec) -> None:
    """Old tokens with what was recorded of them, new ones behind; experts from the last old token on are new."""
    old_routes = np.full((4, spec.num_layers, spec.top_k), 3, np.uint8)
    (job,) = jobs_of(_request(num_samples=2, begun=[_begun(routed_experts=old_routes)]), spec)[:1]
    routes = np.zeros((6, spec.num_layers, spec.top_k), "<i4")
    text = base64.b64encode(routes.tobytes()).decode()
    answer = _answer(prompt_tokens=5, routed_experts=text)
    (made,) = completions_of(job, [answer], spec, lambda ids: str(ids), "here")
    assert (made.sample_index, made.text) == (1, "[7, 8, 7, 8]")
    assert made.logprobs.tolist() == [-1.0, -2.0, -1.0, -2.0]
    assert made.token_policy_versions.tolist() == [0, 0, 1, 1]
    assert made.routed_experts is not None
    assert made.routed_experts[:, 0, 0].tolist() == [3, 3, 3, 3, 0, 0]
    nothing = _answer(prompt_tokens=5, output_ids=[], output_token_logprobs=[], finish_reason=Finish("abort"))
    (made,) = completions_of(job, [nothing], spec, lambda ids: str(ids), "here")
    assert (made.token_ids.tolist(), made.finish_reason) == ([7, 8], "abort")


def _answer(**changes) -> Generated:
    meta = MetaInfo(
        prompt_tokens=3,
        completion_tokens=2,
        finish_reason=Finish("length"),
        weight_version="1",
        output_token_logprobs=[(-1.0, 7, None), (-2.0, 8, None)],
    )
    made = Generated(output_ids=[7, 8], meta_info=meta)
    for name, value in changes.items():
        setattr(made if name == "output_ids" else meta, name, value)
    return made


def test_answer_becomes_a_completion(spec) -> None:
    """Tokens, logprobs, versions and the reason for the end."""
    (job,) = jobs_of(_request(), spec)
    (made,) = completions_of(job, [_answer()], spec, lambda ids: str(ids), "here")
    assert (made.uid, made.sample_index, made.finish_reason, made.text) == ("r", 0, "length", "[7, 8]")
    assert (made.token_ids.tolist(), made.logprobs.tolist()) == ([7, 8], [-1.0, -2.0])
    assert made.token_policy_versions.tolist() == [1, 1]
    assert made.routed_experts is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_tokens": 9}, "here: prompt must have 3 tokens, got 9"),
        ({"output_ids": [7, 9]}, r"here: logprobs must be of tokens \[7, 9\], got those of \[7, 8\]"),
        ({"finish_reason": None}, "here: finish_reason must be stop, length or abort, got None"),
    ],
)
def test_answer_that_does_not_fit_is_refused(changes, message, spec) -> None:
    """A server that read another prompt, or counts otherwise, is not believed."""
    (job,) = jobs_of(_request(), spec)
    with pytest.raises(ServiceError, match=message):
        completions_of(job, [_answer(**changes)], spec, str, "here")


def test_a_group_that_is_not_whole_is_refused(spec) -> None:
    """As many completions as were asked for."""
    (job,) = jobs_of(_request(num_samples=2), spec)
    with pytest.raises(ServiceError, match="here: must have 2 completions, got 1"):
        completions_of(job, [_answer()], spec, str, "here")


def test_aborted_samples_are_empty_and_numbered(spec) -> None:
    """What never ran is aborted, with its place in the group."""
    jobs = jobs_of(_request(num_samples=2), spec, seeded=True)
    made = aborted(jobs[1])
    assert [(each.sample_index, each.finish_reason, len(each.token_ids)) for each in made] == [
        (1, "abort", 0)
    ]
    assert one_refusal(made) == made
