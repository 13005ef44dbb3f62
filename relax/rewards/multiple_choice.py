"""Reward `multiple_choice`: 1 when the letter that the completion settles on is the reference's."""

from __future__ import annotations

import re
from dataclasses import dataclass

from relax.errors import ConfigError
from relax.rewards.base import Reward, RewardFailedError, RewardInput

MAX_CHARS = 100_000


@dataclass(frozen=True, kw_only=True)
class MultipleChoice(Reward):
    r"""Return 1 for the right letter, 0 for another, for none, and for a hedge.

    The letter is that of the last `\boxed{B}`; else of the last "answer is B", "answer: (B)" and the like; else the
    one letter with which a line begins as "B.", "B)" or "B:", or which stands alone in it, "(B)" too. Different letters
    in such lines are no answer. The reference answer is read the same way, so "B" and "B) blue" will do.
    """

    place = "inline"
    deterministic = True

    letters: str = "ABCDEFGH"
    """The choices there are, one letter each, in capitals."""

    def __post_init__(self) -> None:
        if not re.fullmatch("[A-Z]{2,26}", self.letters) or len(set(self.letters)) < len(self.letters):
            raise ConfigError(f"letters: must be different capitals, got {self.letters!r}")

    def __call__(self, sample: RewardInput) -> float:
        wanted = chosen_letter(sample.reference_answer, self.letters)
        if wanted is None:
            raise RewardFailedError(
                f"reference_answer: must be one of the letters {self.letters}, got {sample.reference_answer[:80]!r}"
            )
        return float(chosen_letter(sample.completion_text[-MAX_CHARS:], self.letters) == wanted)


def chosen_letter(text: str, letters: str) -> str | None:
    """Return the letter that a text settles on, None if there is none."""
    one = f"[{letters}{letters.lower()}]"
    stated = re.findall(rf"\\boxed ?{{ ?(?:\\text ?{{)? ?\(?({one})\b", text) or re.findall(
        rf"\banswer(?: is|:)(?: is|:)? {{0,2}}\*{{0,2}}\(?({one})(?![\w'])", text, re.IGNORECASE
    )
    if stated:
        return stated[-1].upper()
    starts = (
        re.match(rf"[*( ]{{0,4}}(?:([{letters}])[.):]|({one})[*). ]{{0,4}}$)", line)
        for line in text.splitlines()
    )
    found = {(match.group(1) or match.group(2)).upper() for match in starts if match}
    return found.pop() if len(found) == 1 else None
