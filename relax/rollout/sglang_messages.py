"""What is said to an SGLang server over HTTP and what it answers, as types. No socket is opened here.

SGLang ignores unknown fields of a request, so every field that is sent has its name here, once. Names are SGLang's own
(0.5.21); its `weight_version` is our policy version as text.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import msgspec
import numpy as np

from relax.errors import ServiceError


class SamplingParams(msgspec.Struct, omit_defaults=True, kw_only=True):
    """How one completion is sampled."""

    max_new_tokens: int
    temperature: float
    n: int = 1
    stop_token_ids: tuple[int, ...] = ()
    sampling_seed: int | None = None
    """Obeyed by servers with deterministic inference alone."""


class GenerateBody(msgspec.Struct, omit_defaults=True, kw_only=True):
    """POST /generate."""

    input_ids: list[int]
    sampling_params: SamplingParams
    return_logprob: bool = False
    return_routed_experts: bool = False
    image_data: list[str] | None = None
    video_data: list[str] | None = None
    audio_data: list[str] | None = None
    extra_key: str | None = None
    """Requests share cached prefixes only with those of the same key."""
    rid: str | None = None
    """Name by which it can be aborted; of bodies of one sample alone, as SGLang gives others names of its own."""


class Span(msgspec.Struct):
    """Tokens [start, end) of a completion that one version of the weights sampled."""

    version: str
    start: int
    end: int


class Finish(msgspec.Struct):
    type: str
    message: str | None = None


class MetaInfo(msgspec.Struct, kw_only=True):
    """What SGLang says beside the tokens."""

    prompt_tokens: int
    completion_tokens: int
    finish_reason: Finish | None
    weight_version: str
    weight_versions: list[Span] | None = None
    """Absent before 0.5.20."""
    output_token_logprobs: list[tuple[float, int, str | None]] = msgspec.field(default_factory=list)
    routed_experts: str | None = None


class Generated(msgspec.Struct, kw_only=True):
    """One completion."""

    output_ids: list[int]
    meta_info: MetaInfo


class UpdateAnswer(msgspec.Struct, kw_only=True):
    """What every weight endpoint says."""

    success: bool
    message: str = ""


class ChecksumAnswer(msgspec.Struct, kw_only=True):
    """POST /weights_checker."""

    success: bool
    message: str = ""
    per_engine_checksum: str = ""


class ServerInfo(msgspec.Struct, kw_only=True):
    """GET /server_info, the part that matters here."""

    version: str
    model_path: str
    tp_size: int = 1
    enable_return_routed_experts: bool = False
    enable_deterministic_inference: bool = False

    @property
    def release(self) -> tuple[int, ...]:
        """The version's leading numbers, such as (0, 5, 21)."""
        return release_of(self.version)


def release_of(version: str) -> tuple[int, ...]:
    """Return a version's leading numbers; '0.5.15.post1' gives (0, 5, 15)."""
    numbers: list[int] = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def decode(body: bytes, kind: Any, where: str) -> Any:
    """Return a server's answer as `kind`.

    Raises:
        ServiceError: it is not JSON of that form.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise ServiceError(
            f"{where}: answer must be {getattr(kind, '__name__', kind)}, got {error}: {body[:200]!r}"
        ) from error


def error_of(body: bytes) -> str:
    """Return the message in an error answer, whichever of SGLang's forms it has."""
    try:
        found = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return body[:500].decode("utf-8", "replace").strip() or "nothing"
    if isinstance(found, dict):
        inner = found.get("error", found.get("message", found))
        return str(inner.get("message", inner) if isinstance(inner, dict) else inner)
    return str(found)


def token_versions(meta: MetaInfo, num_tokens: int, where: str) -> np.ndarray:
    """Return the policy version that sampled each token, int32 [num_tokens].

    Raises:
        ServiceError: the spans do not cover the tokens one after another, or a version is no number.
    """
    spans = meta.weight_versions
    if spans is None:
        spans = [Span(meta.weight_version, 0, num_tokens)]
    versions = np.zeros(num_tokens, np.int32)
    at = 0
    for span in spans:
        if span.start != at or not at <= span.end <= num_tokens:
            break
        versions[at : span.end] = _number(span.version, where)
        at = span.end
    if at != num_tokens:
        shown = [(span.version, span.start, span.end) for span in spans]
        raise ServiceError(f"{where}: weight_versions must cover tokens 0 to {num_tokens}, got {shown}")
    if (np.diff(versions) < 0).any():
        raise ServiceError(f"{where}: weight_versions must not go back, got {versions.tolist()}")
    return versions


def routed_experts(text: str, shape: tuple[int, int, int], num_experts: int, where: str) -> np.ndarray:
    """Return the chosen experts, uint8 (uint16 from 257 experts on) [num_tokens, num_layers, top_k].

    Raises:
        ServiceError: the text is not base64 of that many little-endian int32, or names an expert that is not there.
    """
    try:
        values = np.frombuffer(base64.b64decode(text, validate=True), "<i4")
    except (binascii.Error, ValueError) as error:
        raise ServiceError(f"{where}: routed_experts must be base64 of int32, got {error}") from error
    if values.size != np.prod(shape):
        raise ServiceError(
            f"{where}: routed_experts must be {list(shape)} (tokens, layers, experts a token), "
            f"got {values.size} numbers"
        )
    if values.size and not 0 <= values.min() <= values.max() < num_experts:
        raise ServiceError(
            f"{where}: routed_experts must be in [0, {num_experts}), got {values.min()} to {values.max()}"
        )
    return values.reshape(shape).astype(np.uint8 if num_experts <= 256 else np.uint16)


def _number(version: str, where: str) -> int:
    if not version.isdigit():
        raise ServiceError(
            f"{where}: weight_version must be a policy version, got {version!r}; "
            "somebody else updated the server's weights"
        )
    return int(version)
