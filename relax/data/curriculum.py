"""Curriculum by reward: prompts whose recent mean reward lies in a band are preferred. Pure.

    observe(source, row, mean)     a group of rollouts of that prompt was scored
    admits(source, row, number)    whether the `number`-th draw, which fell on that prompt, is taken

A prompt that has no reward yet is taken. One outside the band is put off till its next turn, but for a share `retry` of
such draws, chosen by the seed and the number of the draw, so that it can come back and the run never stands still. The
order of draws stays what it is; a curriculum only leaves some out. Nothing is drawn more often than once an epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from relax.data.config import CurriculumConfig
from relax.data.errors import PositionError


class Curriculum:
    """The recent mean reward of every prompt, 4 bytes each, and what follows from it.

    Args:
        config: Band, retry share and memory.
        sizes: Rows of each source by name.
        seed: Decides which draws outside the band are taken all the same.
    """

    def __init__(self, config: CurriculumConfig, sizes: Mapping[str, int], *, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._means = {name: np.full(size, np.nan, np.float32) for name, size in sizes.items()}
        self.num_put_off = 0
        """Draws left out so far."""

    def observe(self, source: str, row: int, mean_reward: float) -> None:
        """Note the mean reward of a prompt's newest group; one that is not finite says nothing."""
        if not np.isfinite(mean_reward):
            return
        means, memory = self._means[source], self._config.memory
        known = float(means[row])
        means[row] = mean_reward if np.isnan(known) else known + memory * (mean_reward - known)

    def mean(self, source: str, row: int) -> float | None:
        """Return a prompt's recent mean reward, None before its first."""
        value = float(self._means[source][row])
        return None if np.isnan(value) else value

    def admits(self, source: str, row: int, number: int) -> bool:
        """Return whether draw `number`, of that prompt, is taken; counts it if it is not."""
        mean = self.mean(source, row)
        if mean is None or self._config.low <= mean <= self._config.high or self._is_retry(number):
            return True
        self.num_put_off += 1
        return False

    def state(self) -> dict[str, Any]:
        """Return the means of all prompts that have one, as plain values: rows and means by source."""
        saved = {}
        for name, means in self._means.items():
            rows = np.flatnonzero(~np.isnan(means))
            saved[name] = {"rows": rows.tolist(), "means": means[rows].tolist()}
        return saved

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take the means over that `state()` gave.

        Raises:
            PositionError: it is of other sources.
        """
        restored = {}
        for name, means in self._means.items():
            try:
                rows, values = state[name]["rows"], state[name]["means"]
                fresh = np.full_like(means, np.nan)
                fresh[np.array(rows, np.int64)] = values
            except (LookupError, TypeError, ValueError) as error:
                raise PositionError(
                    f"curriculum: state must be of sources {list(self._means)}, got {type(error).__name__}: {error}"
                ) from error
            restored[name] = fresh
        self._means = restored

    def _is_retry(self, number: int) -> bool:
        digest = hashlib.blake2b(f"{self._seed}/{number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self._config.retry * 2**64
