"""Requests that no engine may try: they would crash a model or kill a server. Numpy only."""

from __future__ import annotations

import math

from relax.models.errors import PromptError
from relax.models.inputs import PromptInputs, check_prompt
from relax.models.spec import ThinkerSpec
from relax.rollout.continuing import refusal_of_begun
from relax.rollout.engine import GenerateRequest


def refusal(request: GenerateRequest, spec: ThinkerSpec) -> str:
    """Return why a request cannot be run by a model of these sizes, or ''."""
    where = f"request {request.uid}"
    if request.num_samples < 1 or request.max_new_tokens < 1:
        return (
            f"{where}: num_samples and max_new_tokens must be at least 1, "
            f"got {request.num_samples} and {request.max_new_tokens}"
        )
    if not math.isfinite(request.temperature) or request.temperature < 0:
        return f"{where}: temperature must be finite and not negative, got {request.temperature}"
    try:
        check_prompt(PromptInputs(request.token_ids, request.media), spec, where)
    except PromptError as error:
        return str(error)
    total, limit = len(request.token_ids) + request.max_new_tokens, spec.max_positions
    if total > limit:
        return f"{where}: prompt and completion must be at most {limit} tokens together, got {total}"
    return refusal_of_begun(request, spec.vocab_size)
