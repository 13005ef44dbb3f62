"""Rotary positions of every family are those that transformers computes, padding on either side."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from relax.models.batch import collate, hf_inputs
from relax.models.families import FAMILIES
from relax.models.loading import Thinker, load_thinker
from relax.models.positions import rotary_positions
from tests.kit.families import make_family
from tests.unit.relax.train import conftest

KINDS = (("image", "video", "audio"), ("video", "video", "image"), (), ("audio",), ("image", "image"))
FILMED = [family.name for family in FAMILIES if family.towers]


@pytest.fixture(scope="module", params=FILMED)
def model(request, tmp_path_factory: pytest.TempPathFactory) -> Thinker:
    """A tiny model of each family that takes films."""
    torch.set_num_threads(1)
    return load_thinker(make_family(tmp_path_factory.mktemp("model") / request.param, request.param))


def theirs(model: Thinker, batch) -> torch.Tensor:
    """Return what transformers' own `get_rope_index` says of a batch."""
    given = hf_inputs(batch, model.spec)
    named = {key: given.get(key) for key in ("image_grid_thw", "video_grid_thw", "attention_mask")}
    if model.spec.family.hf_token_types:
        named["mm_token_type_ids"] = given["mm_token_type_ids"]
        if model.spec.family.hf_film_seconds:
            named["second_per_grid_ts"] = given.get("second_per_grid_ts")
        return model.hf.model.get_rope_index(batch.input_ids_BT, **named)[0]
    frames = batch.feature_attention_mask
    named["audio_seqlens"] = None if frames is None else frames.sum(-1)
    return model.hf.get_rope_index(batch.input_ids_BT, second_per_grids=batch.video_second_per_grid, **named)[
        0
    ]


@pytest.mark.parametrize("seconds", [0.37, 1.0, 2.5])
@pytest.mark.parametrize("pad", ["left", "right"])
def test_positions_equal_transformers(model: Thinker, seconds: float, pad, monkeypatch) -> None:
    """All mixtures of media, films whose patches are a fraction, one and several seconds apart."""
    monkeypatch.setattr(conftest, "SECONDS", seconds)
    rng = np.random.default_rng(3)
    kinds = [tuple(kind for kind in row if kind in model.spec.family.towers) for row in KINDS]
    batch = collate([conftest.make_prompt(rng, row, model.spec) for row in kinds], model.spec, pad)
    kept = batch.attention_mask_BT.bool()
    expected = theirs(model, batch).float()[:, kept]
    torch.testing.assert_close(batch.position_ids_3BT[:, kept], expected, atol=1e-4, rtol=0)


def test_next_position_is_that_of_the_first_completion_token(model: Thinker) -> None:
    """What a text token after the prompt would have."""
    rng = np.random.default_rng(3)
    prompt = conftest.make_prompt(rng, model.spec.family.towers, model.spec)
    longer = type(prompt)(np.append(prompt.token_ids, 7), prompt.media)
    assert (
        rotary_positions(longer, model.spec)[0][:, -1].tolist()
        == [rotary_positions(prompt, model.spec)[1]] * 3
    )


def test_positions_of_text_count_up(model: Thinker) -> None:
    """From 0, on all axes alike."""
    prompt = conftest.make_prompt(np.random.default_rng(0), (), model.spec)
    positions, following = rotary_positions(prompt, model.spec)
    assert positions.tolist() == [list(range(len(prompt.token_ids)))] * 3
    assert following == len(prompt.token_ids)
