"""The ledger of a run: that what was issued is trained on, waiting, or dropped and counted. Pure: statistics in.

    prompts issued  = answered + waiting + refused              rows of table `prompts`
    rows generated  = trained + waiting + dropped               rows of table `rollouts`
    rows generated  = prompts answered x group_size

All three hold whenever no rollout service is between its put and its ack, so at the end of a run, after any faults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Counts of a run since its beginning; after a return to a checkpoint, those of that moment and what came since."""

    prompts_issued: int
    prompts_answered: int
    prompts_waiting: int
    prompts_refused: int
    rows_generated: int
    rows_trained: int
    rows_waiting: int
    rows_dropped: int
    group_size: int

    @classmethod
    def of(cls, prompts: Mapping[str, Any], rollouts: Mapping[str, Any], group_size: int) -> Ledger:
        """Read the statistics of both tables, taken while no rollout service works."""
        taker, trainer = prompts["consumers"]["rollout"], rollouts["consumers"]["actor"]
        books = rollouts["staleness"]
        return cls(
            prompts_issued=prompts["put"],
            prompts_answered=taker["acked"],
            prompts_waiting=taker["ready"] + taker["leased"] + taker["unready"],
            prompts_refused=taker["skipped"] + taker["dead"] - taker["requeued"],
            rows_generated=rollouts["put"],
            rows_trained=books["trained"],
            rows_waiting=books["waiting"],
            rows_dropped=sum(books[kind] for kind in ("dropped", "uniform"))
            + trainer["skipped"]
            + trainer["dead"]
            - trainer["requeued"],
            group_size=group_size,
        )

    def differences(self) -> dict[str, int]:
        """Return by what each of the three equations fails; empty if all hold."""
        found = {
            "prompts": self.prompts_issued
            - (self.prompts_answered + self.prompts_waiting + self.prompts_refused),
            "rows": self.rows_generated - (self.rows_trained + self.rows_waiting + self.rows_dropped),
            "groups": self.rows_generated - self.prompts_answered * self.group_size,
        }
        return {name: number for name, number in found.items() if number}

    def to_facts(self) -> dict[str, int]:
        """Return the counts by name."""
        return asdict(self)
