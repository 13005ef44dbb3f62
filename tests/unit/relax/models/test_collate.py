"""Batches: padding sides, and media joined in token order."""

from __future__ import annotations

import pytest
import torch

from relax.models.batch import collate, normalise_pixels
from relax.models.errors import PromptError
from relax.models.inputs import PromptInputs


def test_collate_pads_on_the_asked_side(thinker, make_prompt):
    """Left padding ends prompts together, right padding starts them together."""
    prompts = [make_prompt(num_words=2), make_prompt(num_words=5)]
    left = collate(prompts, thinker.spec, "left")
    right = collate(prompts, thinker.spec, "right")
    assert left.attention_mask_BT.tolist() == [[0, 0, 0, 1, 1, 1, 1], [1] * 7]
    assert right.attention_mask_BT.tolist() == [[1, 1, 1, 1, 0, 0, 0], [1] * 7]
    assert left.input_ids_BT[0, 3:].tolist() == prompts[0].token_ids.tolist()
    assert right.input_ids_BT[0, 4:].tolist() == [thinker.spec.pad_token_id] * 3
    assert left.pixel_values is None
    assert left.input_features is None


def test_collate_joins_media_of_all_rows(thinker, make_prompt):
    """Patches follow one another, clips are padded with a mask, absent media are None."""
    prompts = [make_prompt("image"), make_prompt("audio", num_frames=30), make_prompt("audio", "image")]
    batch = collate(prompts, thinker.spec)
    assert batch.pixel_values.shape == (32, 384)
    assert batch.pixel_values.dtype == torch.uint8
    assert batch.image_grid_thw.tolist() == [[1, 4, 4]] * 2
    assert batch.feature_attention_mask.sum(-1).tolist() == [30, 50]
    assert batch.pixel_values_videos is None
    assert batch.to("cpu").input_features.shape == (2, 128, 50)


def test_collate_names_the_prompt_that_does_not_fit(thinker, make_prompt):
    """The place of the bad prompt is in the message."""
    bad = PromptInputs(make_prompt().token_ids + 10_000)
    with pytest.raises(PromptError, match=r"^collate: prompt 1: token_ids must be in"):
        collate([make_prompt(), bad], thinker.spec)


def test_normalise_pixels_matches_the_processor(thinker):
    """(value / 255 - mean) / std, channel by channel, with distinct means."""
    from dataclasses import replace

    spec = replace(thinker.spec, image_mean=(0.1, 0.5, 0.9), image_std=(0.2, 0.3, 0.4))
    patches = torch.arange(384, dtype=torch.uint8)[None]
    pixels = normalise_pixels(patches, spec, torch.float32).view(3, -1)
    mean, std = torch.tensor(spec.image_mean)[:, None], torch.tensor(spec.image_std)[:, None]
    torch.testing.assert_close(pixels, (patches.view(3, -1) / 255 - mean) / std)
