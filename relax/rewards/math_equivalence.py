"""Reward `math`: 1 when the answer is mathematically equal to the reference answer. The home of math-verify.

The library parses LaTeX and plain expressions into sympy, which can take for ever or all memory: it runs in a worker
process, and a completion on which the time limit passes gets 0.
"""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from typing import Any

from relax.errors import ConfigError
from relax.rewards.base import Reward, RewardFailedError, RewardInput

BOX = "\\boxed"
MAX_CHARS = 50_000
"""Characters at the end of a completion in which the answer is looked for."""


@dataclass(frozen=True, kw_only=True)
class MathEquivalence(Reward):
    r"""Return 1 when the last answer in the completion, `\boxed{…}` first, equals the reference answer, else 0."""

    deterministic = True
    reward_at_limit = 0.0

    num_digits: int = 6
    """Decimal digits to which numbers have to agree."""
    strict: bool = True
    """Whether kinds of answers must agree: sets with sets, tuples with tuples, variables by their names."""

    def check(self) -> None:
        """Look whether math-verify is installed."""
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(
                "math: math-verify must be installed, got nothing; pip install 'relax-omni[math]'"
            )

    def warm_up(self) -> None:
        """Import sympy, which takes about a second."""
        import math_verify

        logging.getLogger(math_verify.__name__).setLevel(
            logging.CRITICAL
        )  # it logs each answer it cannot read

    def __call__(self, sample: RewardInput) -> float:
        from math_verify import verify

        wanted = _parsed(f"${sample.reference_answer}$") or _parsed(sample.reference_answer)
        if not wanted:
            raise RewardFailedError(
                f"reference_answer: must be an expression, got {sample.reference_answer[:80]!r}"
            )
        text = sample.completion_text[-MAX_CHARS:]
        answer = _parsed(text[max(text.rfind(BOX), 0) :])  # the library would make a set of several boxes
        # Without its own alarms (`None`), which only work in a main thread: the worker process has a limit.
        return float(
            bool(answer)
            and verify(
                wanted, answer, float_rounding=self.num_digits, strict=self.strict, timeout_seconds=None
            )
        )


def _parsed(text: str) -> list[Any]:
    from math_verify import parse

    return parse(text, parsing_timeout=None)
