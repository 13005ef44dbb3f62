"""How long property tests search: short in the suite, longer when `SEARCH_TIMES` says so (see `make soak`)."""

from __future__ import annotations

import os


def num_examples(in_suite: int) -> int:
    """Return how many examples to try: `in_suite` times the environment's SEARCH_TIMES (1 if not set)."""
    return in_suite * int(os.environ.get("SEARCH_TIMES", "1"))
