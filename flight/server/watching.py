"""Statistics as a stream: what `watch` sends every tick. Rates are differences between two looks; no sockets here.

One batch a tick, one row a table, in the order of their names. A server without tables sends empty batches.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from flight.broker import Broker
from flight.errors import InvalidRequestError, TableNotFoundError

MIN_INTERVAL_S = 0.1
MAX_INTERVAL_S = 60.0
CHECK_CALLER_S = 1.0
"""How often a stream that waits for its next tick looks whether its caller is still there."""

_CONSUMER = pa.struct(
    [
        pa.field("name", pa.string()),
        pa.field("ready", pa.int64()),
        pa.field("leased", pa.int64()),
        pa.field("taken_per_s", pa.float64()),
        pa.field("acked_per_s", pa.float64()),
    ]
)
SCHEMA = pa.schema(
    [
        pa.field("time", pa.timestamp("us", "UTC")),
        pa.field("table", pa.string()),
        pa.field("rows", pa.int64()),
        pa.field("bytes", pa.int64()),
        pa.field("put_per_s", pa.float64(), metadata={"unit": "rows/s"}),
        pa.field("consumers", pa.list_(_CONSUMER)),
        pa.field("policy_version", pa.int64()),
        pa.field("max_staleness", pa.int64(), metadata={"unit": "policy versions"}),
        pa.field("outstanding", pa.int64(), metadata={"unit": "rows"}),
    ]
)


class RateMeter:
    """Turns counts that only grow into rows per second since the last look."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, ...], float] = {}
        self._last_s: float | None = None
        self._elapsed_s = 0.0

    def look(self, now_s: float) -> None:
        """Begin a new look at time `now_s`."""
        self._elapsed_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s

    def rate(self, count: int, *key: str) -> float:
        """Return the growth of a count per second; 0 at the first look and for a table that was made anew."""
        before = self._last.get(key)
        self._last[key] = count
        if before is None or self._elapsed_s <= 0:
            return 0.0
        return max(0.0, (count - before) / self._elapsed_s)


def snapshot(
    stats: Mapping[str, Mapping[str, Any]], meter: RateMeter, *, now_s: float, time: datetime.datetime
) -> pa.RecordBatch:
    """Return one tick. `now_s` is on the clock of the rates, `time` is what the rows say."""
    meter.look(now_s)
    rows = []
    for name in sorted(stats):
        each = stats[name]
        bound = each["staleness"] or {}
        rows.append(
            {
                "time": time,
                "table": name,
                "rows": each["rows"],
                "bytes": each["bytes"],
                "put_per_s": meter.rate(each["put"], name),
                "consumers": [
                    {
                        "name": consumer,
                        "ready": found.get("ready"),
                        "leased": found.get("leased"),
                        "taken_per_s": meter.rate(found.get("taken", 0), name, consumer, "taken"),
                        "acked_per_s": meter.rate(found["acked"], name, consumer, "acked"),
                    }
                    for consumer, found in each["consumers"].items()
                ],
                "policy_version": bound.get("policy_version"),
                "max_staleness": bound.get("max_staleness"),
                "outstanding": bound.get("outstanding"),
            }
        )
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def check_interval(interval_s: float) -> float:
    """Return `interval_s` if a stream may tick that often.

    Raises:
        InvalidRequestError: it may not.
    """
    if not MIN_INTERVAL_S <= interval_s <= MAX_INTERVAL_S:
        raise InvalidRequestError(
            f"watch: interval_s must be from {MIN_INTERVAL_S} to {MAX_INTERVAL_S:.0f}, got {interval_s}"
        )
    return interval_s


def ticks(
    broker: Broker,
    tables: Sequence[str] | None,
    *,
    interval_s: float,
    deadline: float,
    pause: Callable[[float], bool],
    visible: Callable[[Sequence[str]], Sequence[str]] = lambda names: names,
) -> Iterator[pa.RecordBatch]:
    """Yield a tick at once and then every `interval_s`, until `deadline` (on the broker's clock).

    `pause(seconds)` waits and returns whether to go on. A table that is not there is left out, as is one that is not
    `visible`.
    """
    meter = RateMeter()
    while True:
        now_s = broker.clock()
        found = _stats(broker, tables)
        shown = {name: found[name] for name in visible(list(found))}
        yield snapshot(shown, meter, now_s=now_s, time=datetime.datetime.now(datetime.UTC))
        due = now_s + interval_s
        while (left_s := min(due, deadline) - broker.clock()) > 0:
            if not pause(min(left_s, CHECK_CALLER_S)):
                return
        if broker.clock() >= deadline:
            return


def _stats(broker: Broker, tables: Sequence[str] | None) -> dict[str, Any]:
    if tables is None:
        return broker.stats()
    found: dict[str, Any] = {}
    for name in tables:
        try:
            found |= broker.stats(name)
        except TableNotFoundError:
            continue
    return found
