"""One request to bodies for SGLang, and its answers to checked completions. No server is known here."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from msgspec.structs import replace as replace_fields

from relax.errors import ServiceError
from relax.models.spec import ThinkerSpec
from relax.rollout.continuing import begun_by_sample, joined_routes
from relax.rollout.engine import Completion, FinishReason, GenerateRequest, refused
from relax.rollout.refusal import refusal
from relax.rollout.sglang_media import media_fields
from relax.rollout.sglang_messages import (
    GenerateBody,
    Generated,
    SamplingParams,
    routed_experts,
    token_versions,
)


@dataclass(frozen=True)
class Job:
    """One body for one server, and which samples of which request it answers."""

    request: GenerateRequest
    body: GenerateBody
    samples: Sequence[int]
    begun: Completion | None = None
    """What is gone on with; its tokens are the end of the body's."""

    @property
    def num_samples(self) -> int:
        return self.body.sampling_params.n


def refusal_of(request: GenerateRequest, spec: ThinkerSpec) -> str:
    """Return why a request must not be sent, or ''. A server dies of a token id outside the vocabulary."""
    reason = refusal(request, spec)
    if not reason and request.greedy and request.temperature not in (0.0, 1.0):
        return (
            f"request {request.uid}: temperature of a greedy request must be 0 or 1, got {request.temperature}; "
            "SGLang gives its logprobs unscaled"
        )
    return reason


def jobs_of(
    request: GenerateRequest, spec: ThinkerSpec, *, seeded: bool = False, cache_key: str | None = None
) -> list[Job]:
    """Return one body for the whole group, its media in it once; with `seeded` one for each sample.

    SGLang takes a seed for all samples of a body, which would then be alike. Samples that were begun have a body of
    their own, and so has each that may be aborted alone (`request.num_wanted`); those that are finished have none.

    Args:
        request: One that `refusal_of` lets through.
        spec: The model's sizes and token ids.
        seeded: Give each sample a seed of its own, drawn from the request's.
        cache_key: Requests share cached prefixes only under one key.
    """
    begun = begun_by_sample(request)
    going_on = [
        each for each in begun.values() if not each.is_finished and not _has_placeholder(each.token_ids, spec)
    ]
    known = {each.sample_index for each in (*going_on, *finished_before(request))}
    fresh = [sample for sample in range(request.num_samples) if sample not in known]
    seeds = None
    if seeded:
        seeds = np.random.SeedSequence(request.seed).generate_state(request.num_samples, np.uint32) >> 1
    jobs = [_going_on(request, old, spec, cache_key, seeds) for old in going_on]
    if not fresh:
        return jobs
    body = _body(request, spec, cache_key, num_samples=len(fresh))
    if not seeded and not request.num_wanted:
        return [*jobs, Job(request, body, fresh)]
    return [*jobs, *(Job(request, _single(body, sample, seeds), [sample]) for sample in fresh)]


def _has_placeholder(token_ids: np.ndarray, spec: ThinkerSpec) -> bool:
    """Whether sampled tokens would be read as the places of media when they come back as a prompt."""
    special = (
        spec.image_token_id,
        spec.video_token_id,
        spec.audio_token_id,
        spec.vision_start_token_id,
        spec.audio_start_token_id,
    )
    return bool(np.isin(token_ids, special).any())


def _going_on(
    request: GenerateRequest,
    old: Completion,
    spec: ThinkerSpec,
    cache_key: str | None,
    seeds: np.ndarray | None,
) -> Job:
    whole = replace(
        request,
        token_ids=np.concatenate((np.asarray(request.token_ids, np.int32), old.token_ids)),
        max_new_tokens=request.max_new_tokens - len(old.token_ids),
    )
    body = _single(_body(whole, spec, cache_key, num_samples=1), old.sample_index, seeds)
    return Job(request, body, [old.sample_index], old)


def _body(
    request: GenerateRequest, spec: ThinkerSpec, cache_key: str | None, *, num_samples: int
) -> GenerateBody:
    params = SamplingParams(
        max_new_tokens=request.max_new_tokens,
        temperature=0.0 if request.greedy else request.temperature,
        n=num_samples,
        stop_token_ids=spec.eos_token_ids,
    )
    return GenerateBody(
        input_ids=np.asarray(request.token_ids).tolist(),
        sampling_params=params,
        return_logprob=True,
        return_routed_experts=True,
        extra_key=cache_key,
        rid=None,
        **media_fields(request, spec),
    )


def _single(body: GenerateBody, sample: int, seeds: np.ndarray | None) -> GenerateBody:
    """Return the body for one sample, with a name by which it can be aborted."""
    seed = None if seeds is None else int(seeds[sample])
    params = replace_fields(body.sampling_params, n=1, sampling_seed=seed)
    return replace_fields(body, sampling_params=params, rid=uuid.uuid4().hex)


def completions_of(
    job: Job, generated: list[Generated], spec: ThinkerSpec, decode: Callable[[list[int]], str], where: str
) -> list[Completion]:
    """Return what a server answered, checked.

    Raises:
        ServiceError: There are not as many completions as asked for, the server counted another prompt, or tokens,
            logprobs, routing and versions do not fit together.
    """
    if len(generated) != job.num_samples:
        raise ServiceError(f"{where}: must have {job.num_samples} completions, got {len(generated)}")
    made = [
        _whole(_completion(job, each, spec, where), job.begun, len(job.request.token_ids))
        for each in generated
    ]
    return [
        replace(each, sample_index=sample, text=decode(each.token_ids.tolist()))
        for sample, each in zip(job.samples, made, strict=True)
    ]


def _whole(made: Completion, old: Completion | None, num_prompt_tokens: int) -> Completion:
    """Return what was begun with what a server made of it behind."""
    if old is None:
        return made
    if not len(made.token_ids):
        return replace(old, finish_reason=made.finish_reason)
    first = num_prompt_tokens + len(old.token_ids) - 1
    new_routes = None if made.routed_experts is None else made.routed_experts[first:]
    return replace(
        made,
        token_ids=np.concatenate((old.token_ids, made.token_ids)),
        logprobs=np.concatenate((old.logprobs, made.logprobs)),
        token_policy_versions=np.concatenate((old.token_policy_versions, made.token_policy_versions)),
        routed_experts=joined_routes(old.routed_experts, new_routes, num_prompt_tokens, len(old.token_ids)),
    )


def finished_before(request: GenerateRequest) -> list[Completion]:
    """Return the samples of which nothing is to be asked."""
    return [each for each in request.begun if each.is_finished]


def aborted(job: Job) -> list[Completion]:
    """Return what is there of samples that were not asked for: what was begun, or nothing."""
    if job.begun is not None:
        return [job.begun]
    nothing = replace(refused(job.request, ""), finish_reason="abort")
    return [replace(nothing, sample_index=sample) for sample in job.samples]


def one_refusal(group: list[Completion]) -> list[Completion]:
    """Return the group, or of several refusals the first."""
    return [each for each in group if each.finish_reason == "refused"][:1] or group


def _completion(job: Job, made: Generated, spec: ThinkerSpec, where: str) -> Completion:
    meta, num_prompt, num_tokens = made.meta_info, len(job.body.input_ids), len(made.output_ids)
    if meta.prompt_tokens != num_prompt:
        raise ServiceError(f"{where}: prompt must have {num_prompt} tokens, got {meta.prompt_tokens}")
    scored = [token for _, token, _ in meta.output_token_logprobs]
    if scored != made.output_ids:
        raise ServiceError(f"{where}: logprobs must be of tokens {made.output_ids}, got those of {scored}")
    routes = None
    if num_tokens and meta.routed_experts is not None:
        shape = (num_prompt + num_tokens - 1, spec.num_layers, spec.top_k)
        routes = routed_experts(meta.routed_experts, shape, spec.num_experts, where)
    return Completion(
        uid=job.request.uid,
        sample_index=0,
        token_ids=np.array(made.output_ids, np.int32),
        logprobs=np.array([logprob for logprob, _, _ in meta.output_token_logprobs], np.float32),
        token_policy_versions=token_versions(meta, num_tokens, where),
        routed_experts=routes,
        finish_reason=_finish(made, where),
        text="",
    )


def _finish(made: Generated, where: str) -> FinishReason:
    reasons: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
    finish = made.meta_info.finish_reason
    if finish is None or finish.type not in reasons:
        raise ServiceError(f"{where}: finish_reason must be stop, length or abort, got {finish}")
    return reasons[finish.type]
