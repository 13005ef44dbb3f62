"""Reward `format`: 1 when the completion has the form that is asked for."""

from __future__ import annotations

import re
from dataclasses import dataclass

from relax.errors import ConfigError
from relax.rewards.answer import check_pattern
from relax.rewards.base import Place, Reward, RewardInput


@dataclass(frozen=True, kw_only=True)
class Format(Reward):
    """Return 1 when the whole completion is tagged sections in order, or matches a pattern; else 0.

    Tags `[think, answer]` ask for `<think>…</think><answer>…</answer>`: each once, none empty, with nothing but white
    space outside.
    """

    deterministic = True
    reward_at_limit = 0.0

    tags: tuple[str, ...] = ()
    """Names of the sections."""
    pattern: str = ""
    """Regular expression for the whole completion, '.' being any character; instead of tags."""
    must_end: bool = True
    """Whether a completion that was cut off by its length is wrong."""

    def __post_init__(self) -> None:
        if bool(self.tags) == bool(self.pattern):
            raise ConfigError("format: must have either tags or a pattern, got both or neither")
        if self.pattern:
            check_pattern("pattern", self.pattern)
        for tag in self.tags:
            if not re.fullmatch(r"\w[\w-]*", tag) or self.tags.count(tag) > 1:
                raise ConfigError(f"tags: must be different names, got {list(self.tags)}")

    @property
    def place(self) -> Place:  # type: ignore[override]  # a class constant elsewhere
        """A pattern of the user's can take for ever."""
        return "process" if self.pattern else "inline"

    def __call__(self, sample: RewardInput) -> float:
        if self.must_end and sample.finish_reason != "stop":
            return 0.0
        text = sample.completion_text
        if self.pattern:
            return float(re.fullmatch(self.pattern, text, re.DOTALL) is not None)
        return float(has_sections(text, self.tags))


def has_sections(text: str, tags: tuple[str, ...]) -> bool:
    """Return whether the text is these tagged sections and nothing else."""
    if any(text.count(mark) != 1 for tag in tags for mark in (f"<{tag}>", f"</{tag}>")):
        return False
    rest = text
    for tag in tags:
        before, _, rest = rest.partition(f"<{tag}>")
        content, closed, rest = rest.partition(f"</{tag}>")
        if before.strip() or not content.strip() or not closed:
            return False
    return not rest.strip()
