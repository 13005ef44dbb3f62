"""The client's verbs of planned training batches: one plan a step, the same for all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import pyarrow as pa

from flight import messages as m
from flight.client.calls import ClientCalls


@dataclass(frozen=True, slots=True)
class Plan:
    """What `plan` returned.

    status: "rows"; "empty", the deadline passed; "sealed", no row will ever come; "finished", the step was acked.
    plan_id: also the id of its lease, for `ack`, `nack` and `renew`; empty without rows.
    row_ids: rank by rank, micro-batch by micro-batch; no micro-batch is empty, ranks with few rows may have fewer.
    num_micro_batches: how many every rank runs; those that a rank has no rows for are empty.
    sizes: sum of the sizes of the rows of each rank.
    """

    plan_id: str
    status: m.PlanStatus
    policy_version: int
    num_rows: int
    num_micro_batches: int
    row_ids: list[list[list[int]]]
    sizes: list[int]


class PlansClient(ClientCalls):
    """Asking for a step's plan, and for a rank's part of it. Both may be repeated."""

    def plan(
        self,
        table: str,
        consumer: str,
        *,
        step: int,
        num_ranks: int,
        max_rows: int,
        min_rows: int | None = None,
        policy_version: int | None = None,
        balance: Sequence[str] = (),
        max_tokens_per_micro_batch: int | None = None,
        max_rows_per_micro_batch: int | None = None,
        keep_groups: bool = False,
        lease_s: float = 60.0,
        deadline_s: float | None = None,
    ) -> Plan:
        """Return the plan of a training step, making it of newly leased rows if nobody has asked for the step yet.

        All ranks must pass the same values, but for `lease_s` and `deadline_s`: the first one's lease counts.
        `min_rows` defaults to `max_rows`. Lengths of lists, strings and binaries, and values of integers, in the
        columns `balance` add up to the size of a row; `max_tokens_per_micro_batch` bounds their sum. `keep_groups`
        gives all rows of a group to one rank. A plan ends by ack, nack or expiry of the lease `plan_id`; after a nack
        or an expiry the step is planned anew.
        """
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        request = m.PlanRequest(
            table=table,
            consumer=consumer,
            step=step,
            num_ranks=num_ranks,
            max_rows=max_rows,
            min_rows=min_rows,
            policy_version=policy_version,
            balance=list(balance),
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            max_rows_per_micro_batch=max_rows_per_micro_batch,
            keep_groups=keep_groups,
            lease_s=lease_s,
            deadline_s=deadline_s,
            identity=self.identity,
        )
        answer = msgspec.convert(self._act("plan", request, deadline_s=deadline_s), m.PlanAnswer)
        return Plan(
            plan_id=answer.plan_id,
            status=answer.status,
            policy_version=answer.policy_version,
            num_rows=answer.num_rows,
            num_micro_batches=answer.num_micro_batches,
            row_ids=answer.row_ids,
            sizes=answer.sizes,
        )

    def fetch(
        self,
        table: str,
        plan_id: str,
        rank: int,
        *,
        columns: Sequence[str] | None = None,
        micro_batch: int | None = None,
    ) -> pa.Table:
        """Return a rank's rows of a live plan, or those of one micro-batch, in the plan's order.

        Only the columns asked for move, the consumer's by default; `micro_batch` says where each row belongs.
        """
        ticket = m.FetchTicket(
            table=table,
            plan_id=plan_id,
            rank=rank,
            columns=None if columns is None else list(columns),
            micro_batch=micro_batch,
            identity=self.identity,
            endpoints=True,
        )
        return self._get(f"fetch from {table}", ticket, self.deadline_s, retry=True)
