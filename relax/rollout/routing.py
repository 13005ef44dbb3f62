"""Which of several engines gets a request: the least loaded, or the one that has seen the prompt. Pure.

choose(key, weight) -> engine        count the weight as its load
done(engine, weight)                 take it off again
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

MAX_KEYS = 4096
"""Prompts whose engine is remembered."""


class Router:
    """Loads and affinities of a set of engines that may change. Not for several threads at once.

    Args:
        engines: Names of the engines that take requests.
        slack: Load by which an engine that has seen the prompt may exceed the least loaded one and still be chosen.
    """

    def __init__(self, engines: Iterable[str] = (), *, slack: int = 64) -> None:
        self._load: dict[str, int] = {}
        self._seen: OrderedDict[str, str] = OrderedDict()
        self._open: set[str] = set()
        self._slack = slack
        self.open(engines)

    @property
    def engines(self) -> list[str]:
        """Return the engines that take requests, by name."""
        return sorted(self._open)

    def load(self, engine: str) -> int:
        """Return what was chosen and is not done."""
        return self._load.get(engine, 0)

    def open(self, engines: Iterable[str]) -> None:
        """Let exactly these engines take requests; the others finish what they have."""
        self._open = set(engines)

    def choose(self, key: str, weight: int = 1) -> str | None:
        """Return the engine for a prompt and count its load; None when no engine takes requests.

        Args:
            key: Equal for requests that share a long prefix, such as the samples of a group.
            weight: Completions asked for.
        """
        if not self._open:
            return None
        least = min(self.engines, key=self.load)
        known = self._seen.get(key)
        chosen = least
        if known in self._open and self.load(known) - self.load(least) <= self._slack:
            chosen = known
        self._load[chosen] = self.load(chosen) + weight
        self._seen[key] = chosen
        self._seen.move_to_end(key)
        while len(self._seen) > MAX_KEYS:
            self._seen.popitem(last=False)
        return chosen

    def done(self, engine: str, weight: int = 1) -> None:
        """Take a request's weight off again."""
        self._load[engine] = max(0, self.load(engine) - weight)
