"""Plans on the wire: from messages to what the broker understands, and back. No state."""

from __future__ import annotations

from flight import messages as m
from flight.broker import Broker, Wait
from flight.broker.plans import FetchRequest, PlanAnswer
from flight.server.finishing import check_lease
from flight.state.plan import SplitRules
from flight.state.plan_book import PlanOrder


def make_plan(broker: Broker, request: m.PlanRequest, wait: Wait) -> m.PlanAnswer:
    """Plan a step, or return its plan."""
    lease_s = check_lease(request.lease_s)
    answer = broker.plan(
        request.table, to_order(request), lease_s=lease_s, member=request.identity, wait=wait
    )
    return to_message(answer)


def to_order(request: m.PlanRequest) -> PlanOrder:
    """Return what a request orders; a batch has `max_rows` rows unless `min_rows` says that fewer will do."""
    return PlanOrder(
        consumer=request.consumer,
        step=request.step,
        max_rows=request.max_rows,
        min_rows=request.max_rows if request.min_rows is None else request.min_rows,
        policy_version=request.policy_version,
        balance=tuple(dict.fromkeys(request.balance)),
        rules=SplitRules(
            num_ranks=request.num_ranks,
            max_tokens_per_micro_batch=request.max_tokens_per_micro_batch,
            max_rows_per_micro_batch=request.max_rows_per_micro_batch,
            keep_groups=request.keep_groups,
        ),
    )


def to_fetch(ticket: m.FetchTicket) -> FetchRequest:
    """Return what a ticket asks for."""
    return FetchRequest(
        plan_id=ticket.plan_id, rank=ticket.rank, columns=ticket.columns, micro_batch=ticket.micro_batch
    )


def to_message(answer: PlanAnswer) -> m.PlanAnswer:
    """Return the message of an answer."""
    plan = answer.plan
    if plan is None:
        return m.PlanAnswer(status=answer.status, policy_version=answer.policy_version)
    return m.PlanAnswer(
        status=answer.status,
        policy_version=answer.policy_version,
        plan_id=plan.plan_id,
        num_rows=len(plan.rows),
        num_micro_batches=plan.num_micro_batches,
        row_ids=[[[plan.rows[index].row_id for index in each] for each in rank] for rank in plan.split],
        sizes=[sum(plan.sizes[index] for each in rank for index in each) for rank in plan.split],
    )
