"""Rewards as a user would write them; named as `my_rewards:half` with this directory on PYTHONPATH."""

from __future__ import annotations

import zlib

from relax.rewards.base import RewardInput


def half(sample: RewardInput) -> float:
    """Return 0 or 0.5 by the answer's words alone, so that groups of an untrained model differ."""
    return 0.5 * (zlib.crc32(sample.completion_text.encode()) % 2)


def no_film(sample: RewardInput) -> float:
    """Refuse to score films."""
    if sample.modality == "video":
        raise ValueError("no film, please")
    return half(sample)
