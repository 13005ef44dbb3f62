"""The split forward pass (towers, splice, language model) is the Hugging Face model's own."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from relax.models.batch import collate, hf_inputs
from relax.models.errors import CheckpointError
from relax.models.thinker import checkpoint_views, embed, language_model, load_thinker, train_towers


def _logits(thinker, batch):
    embedded = embed(thinker, batch)
    return thinker.hf.lm_head(language_model(thinker, embedded, batch.attention_mask_BT))


@pytest.mark.parametrize("pad", ["left", "right"])
@pytest.mark.parametrize(
    "towers",
    [
        [()],
        [("image",), ("image", "image")],
        [("audio",), ()],
        [("video",), ()],
        [("image",), ("audio",), ("video",), (), ("video", "image", "audio", "image", "video")],
    ],
)
@torch.inference_mode()
def test_embed_and_language_model_equal_hugging_face(thinker, make_prompt, towers, pad):
    """Logits at every token agree with `hf.forward` on the same batch, for each mixture of media."""
    prompts = [make_prompt(*each, num_words=3 + i, seed=i) for i, each in enumerate(towers)]
    batch = collate(prompts, thinker.spec, pad)
    expected = thinker.hf(**hf_inputs(batch, thinker.spec)).logits
    real = batch.attention_mask_BT.bool()
    torch.testing.assert_close(_logits(thinker, batch)[real], expected[real], atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_embed_does_not_depend_on_the_batch(thinker, make_prompt):
    """Clips of unequal lengths give the embeddings that each has alone."""
    prompts = [make_prompt("audio", num_frames=n, seed=i) for i, n in enumerate((50, 137, 20, 99, 50))]
    together = embed(thinker, collate(prompts, thinker.spec, "right"))
    for row, prompt in enumerate(prompts):
        alone = embed(thinker, collate([prompt], thinker.spec))
        length = len(prompt.token_ids)
        torch.testing.assert_close(
            together.inputs_embeds_BTH[row, :length], alone.inputs_embeds_BTH[0], atol=1e-5, rtol=1e-5
        )
        assert together.next_position_B[row] == alone.next_position_B[0]


@torch.inference_mode()
def test_embed_takes_embeddings_of_another_language_model(thinker, make_prompt):
    """Given token embeddings stay where there are no media; towers' outputs replace the rest."""
    batch = collate([make_prompt("image")], thinker.spec)
    own = embed(thinker, batch)
    given = embed(thinker, batch, torch.zeros_like(own.inputs_embeds_BTH))
    visual = own.visual_mask_BT
    assert torch.equal(given.inputs_embeds_BTH[visual], own.inputs_embeds_BTH[visual])
    assert not given.inputs_embeds_BTH[~visual].any()


def test_embed_reaches_the_towers_only_when_trained(tiny_dir, make_prompt):
    """Frozen towers get no gradient, trained ones do, deepstack included."""
    thinker = load_thinker(tiny_dir)
    batch = collate([make_prompt("image", "audio", "video")], thinker.spec)
    train_towers(thinker, False)
    _logits(thinker, batch).square().mean().backward()
    towers = [*thinker.hf.visual.parameters(), *thinker.hf.audio_tower.parameters()]
    assert all(parameter.grad is None for parameter in towers)
    train_towers(thinker, True)
    _logits(thinker, batch).square().mean().backward()
    assert all(parameter.grad is not None for parameter in towers)
    assert thinker.hf.visual.merger_list[0].mlp[0].weight.grad.any()


def test_checkpoint_views_are_the_files_tensors(tiny_dir, thinker):
    """Names, shapes and values are those of the directory, experts unfused."""
    saved = load_file(tiny_dir / "model.safetensors")
    views = checkpoint_views(thinker)
    assert views.keys() == saved.keys()
    assert all(torch.equal(views[name], saved[name]) for name in saved)
    assert "thinker.model.layers.1.mlp.experts.3.up_proj.weight" in views


def test_checkpoint_views_write_through(tiny_dir, make_prompt):
    """Writing into an expert's view changes what the model computes."""
    thinker = load_thinker(tiny_dir)
    batch = collate([make_prompt()], thinker.spec)
    with torch.no_grad():
        before = _logits(thinker, batch)
        for name, view in checkpoint_views(thinker).items():
            if "experts" in name and "down_proj" in name:
                view.zero_()
        assert not torch.allclose(before, _logits(thinker, batch))


def test_load_thinker_names_what_is_missing(tiny_dir, tmp_path):
    """A directory without a tensor, or without its configuration, is refused."""
    broken = tmp_path / "broken"
    shutil.copytree(tiny_dir, broken)
    tensors = load_file(broken / "model.safetensors")
    del tensors["thinker.lm_head.weight"]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks 1, first lm_head\.weight"):
        load_thinker(broken)
    with pytest.raises(CheckpointError, match=r"config\.json must be readable"):
        load_thinker(tmp_path)
