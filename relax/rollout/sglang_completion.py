"""One request to bodies for SGLang, and its answers to checked completions. No server is known here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from msgspec.structs import replace as replace_fields

from relax.errors import ServiceError
from relax.models.spec import ThinkerSpec
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
    first_sample: int

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

    SGLang takes a seed for all samples of a body, which would then be alike.

    Args:
        request: One that `refusal_of` lets through.
        spec: The model's sizes and token ids.
        seeded: Give each sample a seed of its own, drawn from the request's.
        cache_key: Requests share cached prefixes only under one key.
    """
    params = SamplingParams(
        max_new_tokens=request.max_new_tokens,
        temperature=0.0 if request.greedy else request.temperature,
        n=request.num_samples,
        stop_token_ids=spec.eos_token_ids,
    )
    body = GenerateBody(
        input_ids=np.asarray(request.token_ids).tolist(),
        sampling_params=params,
        return_logprob=True,
        return_routed_experts=True,
        extra_key=cache_key,
        **media_fields(request, spec),
    )
    if not seeded:
        return [Job(request, body, 0)]
    seeds = np.random.SeedSequence(request.seed).generate_state(request.num_samples, np.uint32) >> 1
    singles = [replace_fields(params, n=1, sampling_seed=int(seed)) for seed in seeds]
    return [
        Job(request, replace_fields(body, sampling_params=single), sample)
        for sample, single in enumerate(singles)
    ]


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
    return [
        replace(
            _completion(job.request, each, spec, where),
            sample_index=job.first_sample + number,
            text=decode(each.output_ids),
        )
        for number, each in enumerate(generated)
    ]


def aborted(job: Job) -> list[Completion]:
    """Return empty completions for samples of which nothing came."""
    nothing = replace(refused(job.request, ""), finish_reason="abort")
    return [replace(nothing, sample_index=job.first_sample + number) for number in range(job.num_samples)]


def one_refusal(group: list[Completion]) -> list[Completion]:
    """Return the group, or of several refusals the first."""
    return [each for each in group if each.finish_reason == "refused"][:1] or group


def _completion(request: GenerateRequest, made: Generated, spec: ThinkerSpec, where: str) -> Completion:
    meta, num_prompt, num_tokens = made.meta_info, len(request.token_ids), len(made.output_ids)
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
        uid=request.uid,
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
