"""Reward `exact_match`: 1 when the answer is the reference answer, else 0."""

from __future__ import annotations

from dataclasses import dataclass

from relax.rewards.answer import check_pattern, extracted, normalised
from relax.rewards.base import Place, Reward, RewardInput


@dataclass(frozen=True, kw_only=True)
class ExactMatch(Reward):
    """Return 1 when the answer is the reference answer and the completion ended by itself, else 0.

    Both are compared after Unicode NFKC, case folding, and joining of runs of white space.
    """

    deterministic = True

    extract: str = ""
    """Regular expression whose one group is the answer, the last match counts; absent: the whole completion."""
    must_end: bool = True
    """Whether a completion that was cut off by its length is wrong."""

    def __post_init__(self) -> None:
        if self.extract:
            check_pattern("extract", self.extract, num_groups=1)

    @property
    def place(self) -> Place:  # type: ignore[override]  # a class constant elsewhere
        """A pattern of the user's can take for ever."""
        return "process" if self.extract else "inline"

    def __call__(self, sample: RewardInput) -> float:
        if self.must_end and sample.finish_reason != "stop":
            return 0.0
        answer = extracted(sample.completion_text, self.extract)
        return float(answer is not None and normalised(answer) == normalised(sample.reference_answer))
