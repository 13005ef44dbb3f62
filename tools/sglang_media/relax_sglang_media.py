"""An SGLang plugin: media that arrive encoded, as a data URI with a safetensors file in it.

Tensors of a file, by tower (n items of a prompt together, in prompt order):
    image, video  patches uint8 [num_patches, values], grid_thw int64 [n, 3], mean and std float32 [3]
    audio         features float32 [n, num_mel_bins, num_frames], num_frames int64 [n]
    every one     positions int64 [3, num_prompt_tokens], delta int64 [1]: of the whole prompt, three rotary axes

They become the dictionaries that SGLang's Engine API takes as `processor_output`.
"""

from __future__ import annotations

import base64
import binascii

PREFIX = "data:application/vnd.relax.encoded;base64,"
FIELDS = {
    "image": {"patches", "grid_thw", "mean", "std", "positions", "delta"},
    "video": {"patches", "grid_thw", "mean", "std", "positions", "delta"},
    "audio": {"features", "num_frames", "positions", "delta"},
}


def activate() -> None:
    """Look at each request before SGLang does."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.managers.tokenizer_manager.TokenizerManager._tokenize_one_request"
    HookRegistry.register(target, _tokenize, HookType.AROUND)
    target = "sglang.srt.models.qwen3_omni_moe.Qwen3OmniMoeThinkerForConditionalGeneration.__init__"
    HookRegistry.register(target, _count_deepstack, HookType.AFTER)
    target = "sglang.srt.managers.scheduler.Scheduler.record_weight_version_change"
    HookRegistry.register(target, _forget_embeddings, HookType.AFTER)


def _forget_embeddings(_result, _scheduler, *_arguments, **_options) -> None:
    """Drop what the towers made of media under the old weights: SGLang 0.5.21 keeps it by content, also across updates
    and flushes of the cache."""
    from sglang.srt.managers import mm_schedule

    if mm_schedule.embedding_cache is not None:
        mm_schedule.embedding_cache.clear()


def _count_deepstack(_result, model, *_arguments, **_options) -> None:
    """Say how many language layers take features of the vision tower: SGLang 0.5.21 has a fixed 3 there, and dies at
    the first picture of a model that has fewer."""
    indexes = model.visual.deepstack_visual_indexes
    model.model.deepstack_embed_to_decoder_layer = range(len(indexes))


def _tokenize(original, manager, request):
    for tower in FIELDS:
        items = getattr(request, f"{tower}_data", None)
        if items:
            setattr(request, f"{tower}_data", _decoded(tower, items))
    return original(manager, request)


def _decoded(tower: str, items):
    one = isinstance(items, str)
    decoded = [_decode(tower, item) for item in ([items] if one else items)]
    return decoded[0] if one else decoded


def _decode(tower: str, item):
    """Return the `processor_output` in a data URI of ours; anything else as it came.

    Raises:
        ValueError: the URI does not hold what the tower needs; SGLang answers it with status 400.
    """
    if not isinstance(item, str) or not item.startswith(PREFIX):
        return item
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(base64.b64decode(item[len(PREFIX) :], validate=True))
    except (binascii.Error, SafetensorError) as error:
        raise ValueError(
            f"{tower}: encoded media must be a safetensors file in base64, got {error}"
        ) from error
    if set(tensors) != FIELDS[tower]:
        raise ValueError(
            f"{tower}: encoded media must have the tensors {sorted(FIELDS[tower])}, got {sorted(tensors)}"
        )
    made = _sound(tensors) if tower == "audio" else _patches(tower, tensors)
    rotary = {"mrope_positions": tensors["positions"], "mrope_position_delta": tensors["delta"]}
    return {"format": "processor_output", **made, **rotary}


def _patches(tower: str, tensors) -> dict:
    """Return normalised pixels; the values of a patch are channel by channel."""
    repeats = tensors["patches"].shape[1] // 3
    mean, std = (tensors[name].mul(255).repeat_interleave(repeats) for name in ("mean", "std"))
    pixels = tensors["patches"].float().sub_(mean).div_(std)
    key = "pixel_values" if tower == "image" else "pixel_values_videos"
    return {key: pixels, f"{tower}_grid_thw": tensors["grid_thw"]}


def _sound(tensors) -> dict:
    import torch

    num_frames = tensors["features"].shape[2]
    mask = torch.arange(num_frames)[None] < tensors["num_frames"][:, None]
    return {"input_features": tensors["features"], "feature_attention_mask": mask.long()}
