"""A tiny thinker with random weights, made once for the session, and prompts with random media for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

CORPUS = ("What colour is the shape?", "Which pitch do you hear?", "Which direction does the square move?")


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny Qwen3-Omni-MoE thinker with random weights."""
    torch = pytest.importorskip("torch")
    from relax.models.tiny import make_tiny_omni

    torch.set_num_threads(1)
    return make_tiny_omni(tmp_path_factory.mktemp("models") / "tiny", seed=0, corpus=CORPUS)


@pytest.fixture(scope="session")
def thinker(tiny_dir: Path):
    """The tiny thinker, loaded; tests must not change it."""
    from relax.models.thinker import load_thinker

    return load_thinker(tiny_dir)


@pytest.fixture(scope="session")
def make_prompt(tiny_dir: Path) -> Callable:
    """Factory of prompts: `make_prompt("image", "audio", num_words=5, seed=0)` has random media and words."""
    from modalities.base import num_audio_tokens
    from relax.models.inputs import PromptInputs
    from relax.models.spec import ThinkerSpec

    spec = ThinkerSpec.from_pretrained(tiny_dir)
    pads = {"image": spec.image_token_id, "audio": spec.audio_token_id, "video": spec.video_token_id}

    def make(
        *towers: str,
        num_words: int = 5,
        seed: int = 0,
        grid: Sequence[int] = (1, 4, 4),
        num_frames: int = 50,
    ) -> PromptInputs:
        rng = np.random.default_rng(seed)
        ids = rng.integers(0, 400, 2).tolist()
        media: dict[str, list[dict[str, np.ndarray]]] = {}
        for tower in towers:
            if tower == "audio":
                features = rng.standard_normal((spec.num_mel_bins, num_frames)).astype(np.float32)
                encoded, count = {"features": features}, num_audio_tokens(num_frames)
            else:
                thw = np.array(grid if tower == "image" else (3, *grid[1:]), np.int32)
                patches = rng.integers(0, 256, (int(thw.prod()), spec.patch_values), dtype=np.uint8)
                encoded, count = {"patches": patches, "grid_thw": thw}, int(thw.prod()) // spec.merge_size**2
                if tower == "video":
                    encoded["second_per_grid"] = np.array(0.5, np.float32)
            start = spec.audio_start_token_id if tower == "audio" else spec.vision_start_token_id
            ids += [start, *[pads[tower]] * count, start + 1]
            media.setdefault(tower, []).append(encoded)
        ids += rng.integers(0, 400, num_words).tolist()
        return PromptInputs(np.array(ids, np.int32), media)

    return make
