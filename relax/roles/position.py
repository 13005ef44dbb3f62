"""Where a preprocess service stands in the order of its prompts, kept in the queue: table `positions`, a row a service.

Kept there, it goes back with the queue when the run goes back to a checkpoint. A position is written after the prompts
before it were put; a service that dies between the two puts the last few again, which changes nothing, by their uids.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from flight.client import QueueClient

TABLE = "positions"
CONSUMER = "preprocess"
COLUMNS = ["service", "next_draw", "order", "curriculum", "evaluation"]


@dataclass(frozen=True, kw_only=True)
class Position:
    """What comes next."""

    order: dict[str, Any] | None = None
    """`PromptOrder.position()`; None is the beginning."""
    curriculum: dict[str, Any] | None = None
    """`Curriculum.state()`; None without one."""
    evaluation: int = 0
    """Last round of evaluation whose prompts were put."""


class PositionBook:
    """The position of one service. Each is a row; the one before is finished once the next is there."""

    def __init__(self, queue: QueueClient, service: str) -> None:
        self._queue = queue
        self._service = service
        self._number = 0

    def read(self) -> Position:
        """Return the last position that was written, the beginning if there is none."""
        rows = self._queue.read(TABLE, columns=COLUMNS).to_pylist()
        own = sorted((_number(row["uid"]), row) for row in rows if row["service"] == self._service)
        if not own:
            return Position()
        self._number, last = own[-1]
        self._finish([row["uid"] for _, row in own[:-1]])
        return Position(
            order=None if not last["order"] else {"next": last["next_draw"], "order": last["order"]},
            curriculum=None if not last["curriculum"] else json.loads(last["curriculum"]),
            evaluation=last["evaluation"],
        )

    def write(self, position: Position) -> None:
        """Keep a position in place of the one before."""
        before, self._number = self._number, self._number + 1
        order = position.order or {"next": 0, "order": ""}
        curriculum = "" if position.curriculum is None else json.dumps(position.curriculum)
        row = {
            "uid": [self._uid(self._number)],
            "service": [self._service],
            "next_draw": [order["next"]],
            "order": [order["order"]],
            "curriculum": [curriculum],
            "evaluation": [position.evaluation],
        }
        self._queue.put(TABLE, pa.table(row), writer=CONSUMER)
        if before:
            self._finish([self._uid(before)])

    def _finish(self, uids: list[str]) -> None:
        if uids:
            self._queue.ack(TABLE, CONSUMER, uids=uids)

    def _uid(self, number: int) -> str:
        return f"{self._service}/{number}"


def _number(uid: str) -> int:
    return int(uid.rpartition("/")[2])
