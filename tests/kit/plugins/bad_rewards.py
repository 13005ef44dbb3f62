"""Rewards with faults, as users might write them; named as `bad_rewards:hangs` with this directory on PYTHONPATH."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from relax.rewards.base import Reward, RewardInput, RewardResult


def hangs(sample: RewardInput) -> float:
    """Never end for a completion that says so."""
    while sample.completion_text == "hang":
        pass
    return 1.0


def leaves(sample: RewardInput) -> float:
    """End the process without a word."""
    if sample.completion_text == "leave":
        os._exit(0)
    return 1.0


def leaves_once(sample: RewardInput, mark: str) -> float:
    """End the process, but not when file `mark` is there already."""
    if not Path(mark).exists():
        Path(mark).write_text("")
        os._exit(3)
    return 1.0


def has_children(sample: RewardInput, pids: str) -> float:
    """Start a process that writes its number into file `pids`, and never end."""
    code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", code, pids])
    time.sleep(600)
    return 0.0


def eats_memory(sample: RewardInput) -> float:
    """Want more than there is."""
    return float(len(b"x" * (1 << 40)))


def prints(sample: RewardInput) -> float:
    """Write to standard output, where a protocol might be."""
    print("hello " * 1000, flush=True)
    return 1.0


def exits(sample: RewardInput) -> float:
    """Say that the program is over."""
    sys.exit("enough")


def fails(sample: RewardInput) -> float:
    """Raise."""
    raise KeyError("colour")


def words(sample: RewardInput) -> float:
    """Return no number."""
    return "good"  # type: ignore[return-value]


def infinite(sample: RewardInput) -> float:
    """Return what no loss can bear."""
    return float("inf")


def judged(sample: RewardInput) -> RewardResult:
    """Say why there is no reward."""
    return RewardResult(reward=0.0, error="the judge did not answer")


def length(sample: RewardInput, scale: float = 1.0) -> float:
    """Return a number without fault."""
    return scale * len(sample.completion_text)


class Counting(Reward):
    """Counts its calls: the second is another number for the same input."""

    deterministic = True

    def __init__(self, start: int = 0) -> None:
        self.count = start

    def __call__(self, sample: RewardInput) -> float:
        """Return the number of the call."""
        self.count += 1
        return float(self.count)
