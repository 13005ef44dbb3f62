"""Rules that run inline: exact and fuzzy match, multiple choice, format."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax.rewards.base import RewardFailedError
from relax.rewards.exact_match import ExactMatch
from relax.rewards.format import Format
from relax.rewards.fuzzy_match import FuzzyMatch, character_likeness, edit_distance, word_f1
from relax.rewards.multiple_choice import MultipleChoice
from tests.kit.rewards import sample


@pytest.mark.parametrize(
    ("completion", "reference", "reward"),
    [
        ("red", "red", 1.0),
        ("  Red\n", "red", 1.0),
        ("dark  red", "Dark red", 1.0),
        ("ＲＥＤ", "red", 1.0),  # full-width letters
        ("reddish", "red", 0.0),
        ("", "red", 0.0),
    ],
)
def test_exact_match_compares_normalised_text(completion, reference, reward):
    """Case, white space and Unicode forms do not matter, anything else does."""
    assert ExactMatch()(sample(completion, reference)) == reward


def test_exact_match_wants_an_answer_that_ended():
    """The right words without an end token are not an answer, unless that is allowed."""
    cut = sample("red", finish_reason="length")
    assert ExactMatch()(cut) == 0.0
    assert ExactMatch(must_end=False)(cut) == 1.0


def test_exact_match_takes_the_last_match_of_a_pattern():
    """Thoughts before it do not count, and a pattern runs in a worker process."""
    match = ExactMatch(extract="<answer>(.*?)</answer>")
    assert match(sample("<answer>blue</answer> no: <answer> red </answer>")) == 1.0
    assert match(sample("red")) == 0.0
    assert (match.place, ExactMatch().place) == ("process", "inline")


@pytest.mark.parametrize(
    ("first", "second", "distance"),
    [
        ("", "", 0),
        ("", "abc", 3),
        ("abc", "", 3),
        ("kitten", "sitting", 3),
        ("flaw", "lawn", 2),
        ("a", "a", 0),
    ],
)
def test_edit_distance_of_known_words(first, second, distance):
    """Insertions, deletions and replacements, one each."""
    assert edit_distance(first, second) == distance


@settings(max_examples=150, deadline=None)
@given(st.text("ab", max_size=9), st.text("ab", max_size=9))
def test_edit_distance_is_that_of_the_table(first, second):
    """Equal to the textbook's table of distances between beginnings."""
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, start=1):
        above, row[0] = row[0], i
        for j, b in enumerate(second, start=1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (a != b))
    assert edit_distance(first, second) == row[-1]


def test_fuzzy_match_is_a_share():
    """Of characters or of words; below the threshold it is nothing."""
    assert character_likeness("abcd", "abxd") == 0.75
    assert word_f1("a red square", "the red square") == pytest.approx(2 / 3)
    assert word_f1("", "") == character_likeness("", "") == 1.0
    near = sample("A red sqare", "a red square")
    assert FuzzyMatch()(near) == pytest.approx(11 / 12)
    assert FuzzyMatch(by="words")(near) == pytest.approx(2 / 3)
    assert FuzzyMatch(threshold=0.95)(near) == 0.0
    assert FuzzyMatch()(sample("x" * 20_001, "x")) == 0.0


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("B", 1.0),
        (" (b) ", 1.0),
        ("**B.** because", 1.0),
        ("B. A square", 1.0),
        ("I think of A first.\nThe answer is **B**.", 1.0),
        ("Answer: (B)", 1.0),
        (r"so \boxed{B}", 1.0),
        (r"\boxed{A} no, \boxed{\text{B}}", 1.0),
        ("The answer is A", 0.0),
        ("A\nB", 0.0),
        ("A. red\nB. blue", 0.0),
        ("Answer: Blue", 0.0),
        ("a square", 0.0),
        ("", 0.0),
    ],
)
def test_multiple_choice_reads_what_a_completion_settles_on(completion, reward):
    """A box, a statement or a line of its own; a hedge is wrong."""
    assert MultipleChoice()(sample(completion, "B")) == reward


def test_multiple_choice_needs_a_letter_to_compare_with():
    """Else it is the data's fault, not the completion's."""
    with pytest.raises(RewardFailedError) as caught:
        MultipleChoice(letters="ABC")(sample("B", "D"))
    assert str(caught.value) == "reference_answer: must be one of the letters ABC, got 'D'"


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>so</think>\n<answer>red</answer>\n", 1.0),
        ("<think>so</think><answer></answer>", 0.0),
        ("<answer>red</answer><think>so</think>", 0.0),
        ("<think>so<answer>red</think></answer>", 0.0),
        ("<think>a</think><think>b</think><answer>red</answer>", 0.0),
        ("well: <think>so</think><answer>red</answer>", 0.0),
        ("<think>so</think><answer>red</answer>!", 0.0),
        ("</think><think>so<answer>red</answer>", 0.0),
        ("red", 0.0),
    ],
)
def test_format_of_tags_is_each_once_in_order_and_nothing_else(completion, reward):
    """Empty, swapped, nested, doubled or surrounded sections do not count."""
    assert Format(tags=("think", "answer"))(sample(completion)) == reward


def test_format_of_a_pattern_is_for_the_whole_completion():
    """In a worker process, since patterns can take for ever; a completion that was cut off has no format."""
    form = Format(pattern=r"(red|blue)\.\n?")
    assert [form(sample(text)) for text in ("red.", "blue.\n", "red. blue.", "green.")] == [
        1.0,
        1.0,
        0.0,
        0.0,
    ]
    assert form(sample("red.", finish_reason="length")) == 0.0
    assert (form.place, Format(tags=("a",)).place) == ("process", "inline")
