"""Reward `fuzzy_match`: how near the answer comes to the reference answer, from 0 to 1."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from relax.errors import ConfigError
from relax.rewards.answer import check_pattern, extracted, normalised
from relax.rewards.base import Place, Reward, RewardInput

MAX_CHARS = 20_000
"""Longer answers count as wrong: the distance takes time in proportion to both lengths."""


@dataclass(frozen=True, kw_only=True)
class FuzzyMatch(Reward):
    """Return the likeness of answer and reference answer, both normalised as for `exact_match`.

    `characters`: 1 minus the Levenshtein distance over the longer length. `words`: F1 of the words as bags.
    """

    deterministic = True

    by: Literal["characters", "words"] = "characters"
    """What is compared."""
    threshold: float = 0.0
    """Likeness below which the reward is 0."""
    extract: str = ""
    """Regular expression whose one group is the answer, the last match counts; absent: the whole completion."""

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ConfigError(f"threshold: must be from 0 to 1, got {self.threshold}")
        if self.extract:
            check_pattern("extract", self.extract, num_groups=1)

    @property
    def place(self) -> Place:  # type: ignore[override]  # a class constant elsewhere
        """A pattern of the user's can take for ever."""
        return "process" if self.extract else "inline"

    def __call__(self, sample: RewardInput) -> float:
        answer = extracted(sample.completion_text, self.extract)
        if answer is None or len(answer) > MAX_CHARS:
            return 0.0
        answer, reference = normalised(answer), normalised(sample.reference_answer)
        likeness = (
            character_likeness(answer, reference) if self.by == "characters" else word_f1(answer, reference)
        )
        return likeness if likeness >= self.threshold else 0.0


def character_likeness(first: str, second: str) -> float:
    """Return 1 minus the edit distance over the longer length; 1 for two empty texts."""
    longest = max(len(first), len(second))
    return 1.0 - edit_distance(first, second) / longest if longest else 1.0


def edit_distance(first: str, second: str) -> int:
    """Return the Levenshtein distance. Time: len(second) operations on integers of len(first) bits.

    Source: Hyyrö, A bit-vector algorithm for computing Levenshtein and Damerau edit distances (2003), section 3.
    """
    if not first:
        return len(second)
    places: dict[str, int] = {}
    for index, character in enumerate(first):
        places[character] = places.get(character, 0) | 1 << index
    mask, last = (1 << len(first)) - 1, 1 << len(first) - 1
    distance, rises, falls = len(first), mask, 0
    for character in second:
        equal = places.get(character, 0)
        diagonal = (((equal & rises) + rises) ^ rises) | equal | falls
        right, left = falls | ~(diagonal | rises) & mask, rises & diagonal
        distance += bool(right & last) - bool(left & last)
        right = (right << 1 | 1) & mask
        rises, falls = (left << 1 & mask) | ~(diagonal | right) & mask, right & diagonal
    return distance


def word_f1(first: str, second: str) -> float:
    """Return the harmonic mean of precision and recall of the words; 1 for two empty texts."""
    words, wanted = (Counter(re.findall(r"\w+", text)) for text in (first, second))
    if not words and not wanted:
        return 1.0
    return 2 * (words & wanted).total() / (words.total() + wanted.total())
