"""Checks that a reward keeps its promises: before a run depends on it.

    python -m relax.rewards.conformance my_pkg.rewards:score samples.jsonl
    python -m relax.rewards.conformance my_pkg.rewards:Judge samples.jsonl --options '{"url": "http://…"}'

A line of samples is a `RewardInput` as JSON, and `expected`, the reward that it shall get, if that is known. In a test:

    check_reward(RewardPart(name="my_pkg.rewards:score"), [(sample, 1.0), (other, None)])
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from relax.errors import ConfigError, WiringError
from relax.rewards.base import Reward, RewardInput
from relax.rewards.config import RewardConfig, RewardPart
from relax.rewards.registry import load_reward
from relax.rewards.scorer import Score, Scorer

TOLERANCE = 1e-6
ODD_COMPLETIONS = {
    "an empty completion": "",
    "white space": " \n\t ",
    "a NUL byte": "a\x00b",
    "letters beyond the basic plane": "𝟙 🎬 \u202e",
    "unbalanced brackets and tags": "((( </think> <answer> \\boxed{ ``` $",
    "a completion of 200,000 characters": "word " * 40_000,
}

Sample = tuple[RewardInput, float | None]


def check_reward(part: RewardPart, samples: Sequence[Sample], *, time_limit_s: float = 10.0) -> None:
    """Run every check.

    Raises:
        WiringError: the reward breaks promises; the message lists all that were found.
    """
    problems = find_problems(part, samples, time_limit_s=time_limit_s)
    if problems:
        raise WiringError(f"reward {part.name!r}:" + "".join(f"\n  - {problem}" for problem in problems))


def find_problems(part: RewardPart, samples: Sequence[Sample], *, time_limit_s: float = 10.0) -> list[str]:
    """Return what `check_reward` would complain about; empty when all is well."""
    try:
        reward = load_reward(part)
        reward.check()
    except ValueError as error:
        return [str(error)]
    if not samples:
        return ["samples must hold at least one row, got none"]
    config = RewardConfig(
        parts=[dataclasses.replace(part, weight=1.0)], time_limit_s=time_limit_s, retries=0, workers=1
    )
    with Scorer(config) as scorer:
        return [*_sample_problems(scorer, reward, samples), *_odd_problems(scorer, samples[0][0])]


def _sample_problems(scorer: Scorer, reward: Reward, samples: Sequence[Sample]) -> Iterator[str]:
    inputs = [sample for sample, _ in samples]
    scores, again = scorer.score(inputs), scorer.score(inputs)
    for number, ((_, expected), score, second) in enumerate(zip(samples, scores, again, strict=True)):
        where = f"sample {number}"
        if score.error:
            yield f"{where}: must be scored, got {score.error}"
        elif expected is not None and abs(score.reward - expected) > TOLERANCE:
            yield f"{where}: the reward must be {expected:g}, got {score.reward:g}"
        elif reward.deterministic and score != second:
            yield f"{where}: the reward must be the same each time, got {_told(score)} and {_told(second)}"


def _odd_problems(scorer: Scorer, sample: RewardInput) -> Iterator[str]:
    odd = [dataclasses.replace(sample, completion_text=text) for text in ODD_COMPLETIONS.values()]
    for name, score in zip(ODD_COMPLETIONS, scorer.score(odd), strict=True):
        if score.error:
            yield f"{name} must be scored, got {score.error}"


def _told(score: Score) -> str:
    return score.error or f"{score.reward:g}"


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A line of samples."""

    completion_text: str
    reference_answer: str
    prompt_text: str = ""
    finish_reason: str = "stop"
    modality: str = ""
    num_completion_tokens: int = 0
    expected: float | None = None


def read_samples(path: Path) -> list[Sample]:
    """Return the samples of a JSONL file.

    Raises:
        ConfigError: a line is none.
    """
    samples = []
    for number, text in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            line = msgspec.structs.asdict(msgspec.json.decode(text, type=_Line))
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}:{number}: must be a sample as JSON, got {error}") from error
        expected = line.pop("expected")
        samples.append((RewardInput(**line), expected))
    return samples


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a reward from the command line; 0 when it keeps its promises."""
    parser = argparse.ArgumentParser(
        prog="python -m relax.rewards.conformance", description="Check a reward."
    )
    parser.add_argument("reward", help="a name, or package.module:thing")
    parser.add_argument("samples", type=Path, help="JSONL file of samples")
    parser.add_argument("--options", default="{}", help="what the plug-in takes, as JSON")
    parser.add_argument("--time-limit-s", type=float, default=10.0, help="longest time of one call")
    words = parser.parse_args(arguments)
    try:
        samples = read_samples(words.samples)
        part = RewardPart(name=words.reward, options=msgspec.json.decode(words.options, type=dict))
        problems = find_problems(part, samples, time_limit_s=words.time_limit_s)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    for problem in problems:
        print(f"{words.reward}: {problem}")
    if not problems:
        print(f"{words.reward}: keeps its promises ({len(samples)} samples)")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
