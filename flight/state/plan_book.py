"""Training batches that were planned: who asks for a step again gets the same split. Pure data.

It is not the split itself (`flight.state.plan`) nor the lease (`flight.state.cursor`): a plan *is* a lease, of the
same id, with a split of its rows. It lives and ends with it.

    live --ack of the last row--> finished: the step is done, nobody gets it a second time
      +----nack, expiry---------> void: the next who asks for the step gets a new plan, with another id
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

import msgspec

from flight.errors import InvalidRequestError, LeaseLostError
from flight.state.leases import Lease, Row
from flight.state.plan import Split, SplitRules, num_micro_batches, split_rows
from flight.state.snapshots import PlanSnapshot

PLANS_KEPT = 256
"""Plans remembered a consumer, live ones always; asking for a step that is forgotten plans it anew."""

MAX_RANKS = 16_384


@dataclass(frozen=True, kw_only=True)
class PlanOrder:
    """What all ranks that ask for one step must agree on. Rows and policy version mean what they mean in a take.

    balance: columns whose lengths (lists, strings, binaries) or values (integers) add up to the size of a row;
        without any each row counts as 1.
    """

    consumer: str
    step: int
    max_rows: int
    min_rows: int
    policy_version: int | None
    balance: tuple[str, ...]
    rules: SplitRules

    def check(self, where: str) -> None:
        """Raise unless the order can be fulfilled whatever rows come.

        Raises:
            InvalidRequestError: a number is out of its range.
        """
        rules = self.rules
        for what, value, least in (
            ("step", self.step, 0),
            ("num_ranks", rules.num_ranks, 1),
            ("max_tokens_per_micro_batch", rules.max_tokens_per_micro_batch, 1),
            ("max_rows_per_micro_batch", rules.max_rows_per_micro_batch, 1),
        ):
            if value is not None and value < least:
                raise InvalidRequestError(f"{where}: {what} must be at least {least}, got {value}")
        if rules.num_ranks > MAX_RANKS:
            raise InvalidRequestError(
                f"{where}: num_ranks must be at most {MAX_RANKS}, got {rules.num_ranks}"
            )
        if rules.max_tokens_per_micro_batch is not None and not self.balance:
            raise InvalidRequestError(
                f"{where}: balance must name the columns that hold the tokens if max_tokens_per_micro_batch is set, "
                "got none"
            )


@dataclass(slots=True, eq=False)
class Plan:
    """One planned batch. `rows`, `attempts` and `sizes` are in the lease's order; `split` holds indices of them."""

    order: PlanOrder
    lease: Lease
    rows: list[Row]
    attempts: list[int]
    sizes: list[int]
    split: Split
    status: Literal["live", "finished", "void"] = "live"
    num_micro_batches: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_micro_batches = num_micro_batches(self.split)

    @property
    def plan_id(self) -> str:
        """Return the name of the plan and of its lease."""
        return self.lease.lease_id

    def part(self, rank: int, micro_batch: int | None) -> list[tuple[int, int]]:
        """Return (micro-batch, index of a row) for a rank: all of them, or those of one micro-batch.

        Raises:
            InvalidRequestError: the plan has no such rank or micro-batch.
        """
        where = f"plan {self.plan_id}"
        if not 0 <= rank < len(self.split):
            raise InvalidRequestError(f"{where}: rank must be from 0 to {len(self.split) - 1}, got {rank}")
        if micro_batch is not None and not 0 <= micro_batch < self.num_micro_batches:
            raise InvalidRequestError(
                f"{where}: micro_batch must be from 0 to {self.num_micro_batches - 1}, got {micro_batch}"
            )
        return [
            (number, index)
            for number, indices in enumerate(self.split[rank])
            for index in indices
            if micro_batch in (None, number)
        ]


class PlanBook:
    """The plans of one table by consumer and step. Each operation costs O(rows of the plan)."""

    def __init__(self) -> None:
        self._by_step: dict[str, OrderedDict[int, Plan]] = {}
        self._by_id: dict[str, Plan] = {}

    def find(self, order: PlanOrder) -> Plan | None:
        """Return the live or finished plan of a step, None if it is to be made (anew).

        Raises:
            InvalidRequestError: there is one that was ordered otherwise.
        """
        plan = self._by_step.get(order.consumer, OrderedDict()).get(order.step)
        if plan is None or plan.status == "void":
            return None
        differs = [
            part.name for part in fields(order) if getattr(order, part.name) != getattr(plan.order, part.name)
        ]
        if differs:
            raise InvalidRequestError(
                f"plan of step {order.step} by {order.consumer}: it must be asked for as by the first rank, "
                f"got other values of {differs}; all ranks of a step must agree"
            )
        return plan

    def add(self, order: PlanOrder, lease: Lease, sizes: Sequence[int]) -> Plan:
        """Split the rows of a lease and remember that as the plan of the step."""
        rows = lease.rows()
        split = split_rows(sizes, [row.group_id for row in rows], order.rules)
        plan = Plan(order, lease, rows, lease.attempts(), list(sizes), split)
        steps = self._by_step.setdefault(order.consumer, OrderedDict())
        steps[order.step] = plan
        steps.move_to_end(order.step)
        self._by_id[plan.plan_id] = plan
        for step in [step for step, each in steps.items() if each.status != "live"][
            : len(steps) - PLANS_KEPT
        ]:
            del steps[step]
        return plan

    def live(self, plan_id: str) -> Plan:
        """Return a live plan.

        Raises:
            LeaseLostError: it has ended, or there never was one of that name.
        """
        plan = self._by_id.get(plan_id)
        if plan is None:
            raise LeaseLostError(
                f"plan: plan_id must be a live plan, got {plan_id!r}, which is unknown or has ended; "
                "ask for the plan of the step again"
            )
        return plan

    def capture(self) -> list[PlanSnapshot]:
        """Return the plans that a rank may still ask for, oldest first."""
        return [
            PlanSnapshot(
                order=msgspec.to_builtins(plan.order),
                plan_id=plan.plan_id,
                status="live" if plan.status == "live" else "finished",
                num_micro_batches=plan.num_micro_batches,
            )
            for steps in self._by_step.values()
            for plan in steps.values()
            if plan.status != "void"
        ]

    def restore(self, snapshots: Sequence[PlanSnapshot], leases: Mapping[str, Lease]) -> None:
        """Take back what `capture` returned; `leases` are the live ones of the table. Splits are not known any more."""
        for each in snapshots:
            lease = leases.get(each.plan_id) or Lease(each.plan_id, "", 0, 0.0)
            order = msgspec.convert(each.order, PlanOrder)
            plan = Plan(order, lease, [], [], [], [[[]] * each.num_micro_batches], each.status)
            self._by_step.setdefault(order.consumer, OrderedDict())[order.step] = plan
            if each.status == "live":
                self._by_id[plan.plan_id] = plan
            else:
                plan.split = []

    def end(self, lease_id: str, kind: str, *, is_whole: bool) -> None:
        """Note what befell rows of a lease, with `is_whole` the last ones: acked, or lost to the batch."""
        if kind != "acked":
            self._end(lease_id, "void")
        elif is_whole:
            self._end(lease_id, "finished")

    def void(self, lease_id: str) -> None:
        """Note that rows of a lease were given back or lost: what is left of the plan is not a whole batch."""
        self._end(lease_id, "void")

    def _end(self, lease_id: str, status: Literal["finished", "void"]) -> None:
        plan = self._by_id.pop(lease_id, None)
        if plan is not None:
            plan.status = status
            plan.rows, plan.attempts, plan.sizes, plan.split = [], [], [], []
