"""Planned training batches: one rank's request plans a step, all ranks fetch their parts of it, any number of times."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from flight.broker.core import Wait
from flight.broker.taking import BrokerTaking
from flight.errors import InvalidRequestError, LeaseLostError
from flight.state.leases import Lease
from flight.state.ledger import TakeRequest, TakeStatus
from flight.state.plan_book import Plan, PlanOrder
from flight.state.sizes import can_be_sized, sizes_of

PlanStatus = TakeStatus | Literal["finished"]

MICRO_BATCH = pa.field(
    "micro_batch",
    pa.int32(),
    metadata={"meaning": "which micro-batch of the rank the row is in, from 0", "nullable": "false"},
)


@dataclass(frozen=True, kw_only=True)
class PlanAnswer:
    """`plan` is there if status is "rows" or "finished"; a finished one has no rows any more."""

    status: PlanStatus
    policy_version: int
    plan: Plan | None = None


@dataclass(frozen=True, kw_only=True)
class FetchRequest:
    """A rank's part of a plan, or one micro-batch of it; `columns` default to the consumer's."""

    plan_id: str
    rank: int
    columns: Sequence[str] | None = None
    micro_batch: int | None = None


class BrokerPlans(BrokerTaking):
    """The verbs of plans. A plan ends as its lease does: by ack, nack or expiry."""

    def plan(self, name: str, order: PlanOrder, *, lease_s: float, member: str, wait: Wait) -> PlanAnswer:
        """Return the plan of a step, made of newly leased rows unless another rank has asked for it before.

        Raises:
            InvalidRequestError: the order can never be fulfilled, or the step was planned by another order.
        """
        where = f"plan from {name} by {order.consumer}"
        order.check(where)
        request = TakeRequest(
            consumer=order.consumer,
            max_rows=order.max_rows,
            min_rows=order.min_rows,
            policy_version=order.policy_version,
            lease_s=lease_s,
            member=member,
        )
        with self._locked():
            self._check_balance(where, name, order)
            while True:
                # Looked up after every wait: another rank may have planned the step meanwhile.
                plan = self._ledger.table(name).plans.find(order)
                taken = None
                if plan is None:
                    taken = self._ledger.take(name, request, self.clock())
                    if taken is not None and taken.lease is not None:
                        sizes = self._sizes(name, order.balance, taken.lease)
                        plan = self._ledger.plan(name, order, taken.lease, sizes)
                self._after(name, has_changed=taken is not None)
                version = self._ledger.policy_version(name)
                if plan is not None:
                    status: PlanStatus = "finished" if plan.status == "finished" else "rows"
                    # A copy: the plan may end as soon as the lock is free, and then lets its rows go.
                    return PlanAnswer(status=status, policy_version=version, plan=copy(plan))
                if taken is not None:
                    return PlanAnswer(status=taken.status, policy_version=version)
                if not self._wait(name, wait):
                    return PlanAnswer(status="empty", policy_version=version)

    def fetch(self, name: str, request: FetchRequest, *, is_direct: bool = False) -> pa.Table:
        """Return a rank's rows with their micro-batches; the same rows whenever it is asked while the plan lives.

        Raises:
            LeaseLostError: the plan has ended, or rows of this part have been acked and are gone.
            InvalidRequestError: the plan has no such rank or micro-batch, or the table no such column.
        """
        with self._locked():
            table = self._ledger.table(name)
            plan = table.plans.live(request.plan_id)
            part = plan.part(request.rank, request.micro_batch)
            chosen = table.spec.columns_for(plan.order.consumer, request.columns)
            rows = [plan.rows[index] for _, index in part]
            attempts = [plan.attempts[index] for _, index in part]
            num_gone = sum(table.rows.get(row.row_id) is not row for row in rows)
            if num_gone:
                raise LeaseLostError(
                    f"plan {request.plan_id}: all rows of rank {request.rank} must be in the table, got {num_gone} "
                    "that are finished already; ack a plan when its step is done"
                )
            leased = self._locate_leased(name, chosen, plan.order.consumer, plan.lease, (rows, attempts))
        found = leased.table([(MICRO_BATCH, pa.array([number for number, _ in part], pa.int32()))])
        answer = self._whole(name, found, is_direct=is_direct)
        if answer.num_rows < found.num_rows:
            raise LeaseLostError(
                f"plan {request.plan_id}: all rows of rank {request.rank} must be there, got "
                f"{found.num_rows - answer.num_rows} that were lost with a storage server; ask for the plan again"
            )
        return answer

    def _check_balance(self, where: str, name: str, order: PlanOrder) -> None:
        table = self._ledger.table(name)
        cursor = table.cursor(order.consumer)
        for column in table.spec.checked_columns(order.balance):
            if table.parts_of([column]) & ~cursor.needs:
                raise InvalidRequestError(
                    f"{where}: balance must name columns that are there when a row is ready for the consumer, "
                    f"got {column!r}, which another writer puts later"
                )
            arrow_type = table.spec.columns_by_name[column].type
            if not can_be_sized(arrow_type):
                raise InvalidRequestError(
                    f"{where}: balance must name columns of lists, strings, binaries or integers, "
                    f"got {column!r} of type {arrow_type}"
                )

    def _sizes(self, name: str, balance: Sequence[str], lease: Lease) -> list[int]:
        rows = lease.rows()
        if not balance:
            return [1] * len(rows)
        places = self._locate(name, balance, rows)
        by_column = [sizes_of(places[column], column) for column in balance]
        return [max(0, sum(sizes)) for sizes in zip(*by_column, strict=True)]
