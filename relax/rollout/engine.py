"""The engine protocol: what a rollout engine is asked and what it answers. No engine lives here, no torch.

Life cycle: made from a model directory (policy version 0), then any number of `generate` and `adopt` calls, then
`close`. `pause`, `resume`, `abort` and `adopt` may come from other threads than `generate`'s and take effect
between two decoding steps; weights adopted in the middle of a completion show in its `token_policy_versions`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

FinishReason = Literal["stop", "length", "abort", "refused"]
"""End token sampled; limit reached; `abort` was called; the request does not fit the model (see `error`)."""


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One prompt to be completed `num_samples` times."""

    uid: str
    token_ids: np.ndarray
    """int32 [num_prompt_tokens], placeholders expanded."""
    media: Mapping[str, Sequence[Mapping[str, np.ndarray]]] = field(default_factory=dict)
    """Encoded media of each tower ("image", "audio", "video") in prompt order."""
    num_samples: int = 1
    seed: int = 0
    """Same seed, same samples, whatever else is in the batch (up to rounding of the logits)."""
    max_new_tokens: int = 128
    """Limit for each completion, its end token included."""
    temperature: float = 1.0
    """Divides the logits; 0 means greedy."""
    greedy: bool = False
    """Take the likeliest token at each step."""
    begun: Sequence[Completion] = ()
    """What an earlier call has made of some samples: unfinished ones are gone on with under the present weights,
    finished ones given back as they are; samples that are not named begin anew."""
    num_wanted: int = 0
    """Once so many samples have finished, those finished in `begun` included, the others are aborted; 0: never."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sample. Arrays have an entry for each completion token, the end token included."""

    uid: str
    sample_index: int
    """0 .. num_samples - 1 within the request."""
    token_ids: np.ndarray
    """int32 [num_completion_tokens]."""
    logprobs: np.ndarray
    """float32 [num_completion_tokens], nats, of the temperature-scaled distribution over the full vocabulary
    (of the unscaled one when the temperature is 0)."""
    token_policy_versions: np.ndarray
    """int32 [num_completion_tokens]: the weights that sampled each token."""
    routed_experts: np.ndarray | None
    """uint8 (uint16 from 257 experts on) [num_prompt_tokens + num_completion_tokens - 1, num_layers, top_k]: the
    last sampled token is never routed. None when nothing was generated or the engine reports no routing."""
    finish_reason: FinishReason
    text: str
    """The tokens as text, special tokens left out."""
    error: str = ""
    """Why the request was refused; empty otherwise."""

    @property
    def is_finished(self) -> bool:
        """Whether the model has ended it, or its limit has."""
        return self.finish_reason in ("stop", "length")


class RolloutEngine(Protocol):
    """Generates completions under weights that can be replaced while it runs."""

    @property
    def policy_version(self) -> int:
        """Return the version of the weights that the next step uses."""
        ...

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Return completions request by request, samples in order. Blocks until all are done or aborted.

        A request that does not fit the model costs itself only: it yields a single completion with
        finish_reason "refused", no tokens, and the reason in `error`.

        A completion that is gone on with comes back whole: its old tokens with their logprobs, versions and experts as
        they were, and the new ones behind them. An engine that cannot go on with one begins it anew.
        """
        ...

    def adopt(self, snapshot_dir: Path | str, policy_version: int) -> None:
        """Replace the weights by a snapshot's between two decoding steps. Blocks until that is done.

        Raises:
            SnapshotError: The snapshot is missing, altered, of another version, or not of this model; the
                weights are then as before. It is also a FileNotFoundError when there is no such snapshot.
        """
        ...

    def pause(self) -> None:
        """Hold generation before its next step; what was computed is kept. Idempotent."""
        ...

    def resume(self) -> None:
        """Go on after `pause`. Idempotent."""
        ...

    def abort(self) -> None:
        """End the `generate` calls in flight: they return what they have, with finish_reason "abort"."""
        ...

    def close(self) -> None:
        """Abort and release the model. Idempotent; nothing else may be called afterwards."""
        ...


def refused(request: GenerateRequest, error: str) -> Completion:
    """Return the single completion of a request that does not fit the model."""
    return Completion(
        uid=request.uid,
        sample_index=0,
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        token_policy_versions=np.zeros(0, np.int32),
        routed_experts=None,
        finish_reason="refused",
        text="",
        error=error,
    )
