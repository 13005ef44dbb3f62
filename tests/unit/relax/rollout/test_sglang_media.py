"""Media for SGLang: the file that is sent holds the trainer's own inputs, and positions are the model's."""

from __future__ import annotations

import base64
import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from relax.models.batch import collate, hf_inputs
from relax.models.inputs import PromptInputs
from relax.models.thinker import embed
from relax.rollout.engine import GenerateRequest
from relax.rollout.sglang_media import PREFIX, media_fields

PLUGIN = Path(__file__).resolve().parents[4] / "tools" / "sglang_media" / "relax_sglang_media.py"
MIXTURES = (("image",), ("audio",), ("video",), ("video", "image", "audio", "image"))


@pytest.fixture(scope="module")
def plugin():
    """The server's side, which needs SGLang only when it is activated."""
    spec = importlib.util.spec_from_file_location("relax_sglang_media", PLUGIN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _request(prompt: PromptInputs) -> GenerateRequest:
    return GenerateRequest(uid="r", token_ids=prompt.token_ids, media=prompt.media)


@pytest.mark.parametrize("towers", MIXTURES, ids="+".join)
def test_server_decodes_what_the_model_would_get(towers, make_prompt, thinker, plugin) -> None:
    """The plugin makes of the data URIs the very tensors of the Hugging Face processor's names, and the positions."""
    prompt = make_prompt(*towers, num_words=4, seed=2)
    fields = media_fields(_request(prompt), thinker.spec)
    assert sorted(fields) == sorted({f"{tower}_data" for tower in towers})
    expected = hf_inputs(collate([prompt], thinker.spec), thinker.spec)
    # Whole numbers, of which the last is that of the last word.
    positions = embed(thinker, collate([prompt], thinker.spec)).position_ids_3BT[:, 0].long()
    following = positions.max().item() + 1
    for name, (uri,) in fields.items():
        decoded = plugin._decode(name.removesuffix("_data"), uri)
        assert decoded.pop("format") == "processor_output"
        torch.testing.assert_close(decoded.pop("mrope_positions"), positions, atol=0, rtol=0)
        assert decoded.pop("mrope_position_delta").item() == following - len(prompt.token_ids)
        for key, value in decoded.items():
            torch.testing.assert_close(value, expected[key], atol=0, rtol=0)


def test_prompt_without_media_sends_none(make_prompt, thinker) -> None:
    """Text needs neither files nor positions."""
    assert media_fields(_request(make_prompt(num_words=3)), thinker.spec) == {}


def test_plugin_leaves_other_media_alone(plugin) -> None:
    """Raw media go SGLang's own way."""
    assert plugin._decoded("image", ["a.png", {"url": "b"}]) == ["a.png", {"url": "b"}]


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ("!", "image: encoded media must be a safetensors file in base64"),
        (base64.b64encode(b"12345678").decode(), "image: encoded media must be a safetensors file in base64"),
        (
            base64.b64encode(save({"patches": torch.zeros(1)})).decode(),
            r"image: encoded media must have the tensors \['delta', .*\], got \['patches'\]",
        ),
    ],
)
def test_plugin_names_what_is_wrong(payload, message, plugin) -> None:
    """SGLang answers a ValueError with status 400; anything else would be its own failure."""
    with pytest.raises(ValueError, match=message):
        plugin._decode("image", PREFIX + payload)


def test_both_sides_know_the_same_prefix(plugin) -> None:
    """The plugin has no import from here."""
    assert plugin.PREFIX == PREFIX
