"""How long a client tries to reach its server: growing waits, jittered, bounded in all. It tries nothing itself."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

PATIENCE_S = 0.75
"""Unless told otherwise: enough for a connection that dropped, not for a server that is started anew."""

FIRST_S = 0.05
MOST_S = 2.0


def waits(
    patience_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    draw: Callable[[], float] = random.random,
) -> Iterator[float]:
    """Yield the seconds to wait before each further try, until `patience_s` have passed since the first was asked for.

    Each is between half and all of 0.05 s, 0.1 s, 0.2 s and so on up to 2 s, so that clients do not come back all at
    once. `draw` returns a number from 0 to 1.
    """
    ends_at = clock() + patience_s
    longest_s = FIRST_S
    while (left_s := ends_at - clock()) > 0:
        yield min(longest_s * (0.5 + 0.5 * draw()), left_s)
        longest_s = min(2 * longest_s, MOST_S)
