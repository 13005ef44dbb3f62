"""A turn encoder for the tiny thinker, and episodes to begin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from modalities.base import EncodingProfile, MediaLimits
from modalities.registry import load_modalities
from relax.agents.environment import Task
from relax.agents.episode import Start
from relax.agents.turns import TurnEncoder


@pytest.fixture(scope="session")
def turns(tiny_dir: Path) -> TurnEncoder:
    """Encodes for the tiny thinker."""
    return TurnEncoder(tiny_dir, load_modalities(EncodingProfile.from_pretrained(tiny_dir), MediaLimits()))


@pytest.fixture
def start(turns: TurnEncoder) -> Callable[..., Start]:
    """Factory of starts: `start("uid", 1)` asks "What is it?", the right answer is red."""

    def make(uid: str = "a", sample: int = 0) -> Start:
        prompt = turns.whole([{"role": "user", "content": [{"type": "text", "text": "What is it?"}]}], ())
        task = Task(uid=uid, prompt_text="What is it?", reference_answer="red")
        return Start(task=task, token_ids=prompt.token_ids, sample_index=sample)

    return make
