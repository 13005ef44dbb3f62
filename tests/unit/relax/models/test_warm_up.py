"""The warm-up teaches how answers look, and nothing of which answer is right."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from modalities.text import Part
from relax.data.conversation import Message, Record
from relax.models.errors import CheckpointError
from relax.models.tiny import make_tiny_omni
from relax.models.warm_up import Question, WarmUpConfig, questions_of, warm_up_format

WORDS = {"image": ("red", "green", "blue", "yellow"), "audio": ("low", "middle", "high", "top")}


def _record(kind: str, text: str, answer: str) -> Record:
    parts = (Part(kind, "somewhere"), Part("text", text))
    return Record(0, "m:1", Path(), (Message("user", parts),), (), kind, answer)


def _questions() -> list[Question]:
    rows = [_record(kind, f"Which {kind}?", word) for kind, words in WORDS.items() for word in words]
    return questions_of(rows)


def test_questions_gather_the_answers_of_a_wording():
    """Each wording once, with the sorted answers of its rows and no media source."""
    assert _questions() == [
        Question((("user", (("audio", ""), ("text", "Which audio?"))),), ("high", "low", "middle", "top")),
        Question((("user", (("image", ""), ("text", "Which image?"))),), ("blue", "green", "red", "yellow")),
    ]


def test_questions_with_one_answer_borrow_those_of_their_modality():
    """A wording that occurs once must not give its answer away."""
    rows = [_record("image", "Colour of picture 1?", "red"), _record("image", "Colour of picture 2?", "blue")]
    assert [question.answers for question in questions_of(rows)] == [("blue", "red")] * 2


def test_warm_up_leaves_a_model_that_speaks_at_chance(tiny_dir, tmp_path):
    """Nearly all probability is on well-formed answers, spread evenly; towers are untouched; seeds decide."""
    from safetensors.torch import load_file

    config = WarmUpConfig(num_steps=60, questions_per_step=12)
    weights = []
    for name in ("first", "second"):
        directory = tmp_path / name
        shutil.copytree(tiny_dir, directory)
        report = warm_up_format(directory, _questions(), seed=3, config=config)
        weights.append((directory / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    assert report.num_questions == 2
    assert report.format_share > 0.9
    assert report.chance_accuracy == pytest.approx(0.25, abs=0.03)
    assert report.largest_share < 0.4
    before, after = (load_file(path / "model.safetensors") for path in (tiny_dir, directory))
    changed = {name for name in before if not before[name].equal(after[name])}
    assert changed
    assert all(name.startswith(("thinker.model.", "thinker.lm_head.")) for name in changed)


def test_warm_up_learns_answers_of_several_tokens(tmp_path):
    """Answers that share their first tokens are told apart where they part."""
    directory = make_tiny_omni(tmp_path / "model", seed=1)
    question = Question((("user", (("text", "Say it"),)),), ("dark blue", "dark red", "light red"))
    config = WarmUpConfig(num_steps=80, questions_per_step=8, noise_share=0.0)
    report = warm_up_format(directory, [question], seed=0, config=config)
    assert report.format_share > 0.9
    assert report.largest_share < 0.45


def test_warm_up_refuses_what_it_cannot_teach(tiny_dir):
    """No usable question, or no trained parameter, is said before any step."""
    smuggling = Question((("user", (("text", "<|image_pad|>"),)),), ("red", "blue"))
    with pytest.raises(CheckpointError, match="must have a usable one, got 1 unusable"):
        warm_up_format(tiny_dir, [smuggling], seed=0)
    with pytest.raises(CheckpointError, match=r"trained must match a parameter, got \['nothing'\]"):
        warm_up_format(tiny_dir, _questions(), seed=0, config=WarmUpConfig(trained=("nothing",)))
    with pytest.raises(CheckpointError, match=r"noise_share must be in \[0, 1\]"):
        WarmUpConfig(noise_share=2.0)
