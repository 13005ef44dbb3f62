"""Acks the rows of an optimizer step, also when their leases were lost on the way: exactly these, or none.

A lease is lost when a step takes longer than it lasts, or when the queue's server was started anew meanwhile. Its rows
then wait for the next taker, which is the actor itself: they are taken again and acked, if they are the ones that were
trained on. If they are not, the step stands on rows that the queue has given away, and the role fails; the run goes
back to its last checkpoint, where both sides agree.
"""

from __future__ import annotations

from collections.abc import Sequence

from flight.client import QueueClient
from flight.errors import LeaseLostError
from relax.errors import ServiceError

RETAKE_DEADLINE_S = 30.0
RETAKE_LEASE_S = 60.0


def settle(queue: QueueClient, lease_ids: Sequence[str], uids: Sequence[str], step: int) -> None:
    """Ack the rows `uids` of `step`, which the leases hold.

    Raises:
        ServiceError: they were lost, and what came in their place are other rows.
    """
    num_acked = num_lost = 0
    for lease_id in lease_ids:
        try:
            num_acked += queue.ack("rollouts", "actor", lease_id=lease_id, step=step)
        except LeaseLostError:
            num_lost += 1
    if num_lost:
        _retake(queue, uids, len(uids) - num_acked, step)


def _retake(queue: QueueClient, uids: Sequence[str], num_rows: int, step: int) -> None:
    lease = queue.take(
        "rollouts",
        "actor",
        max_rows=num_rows,
        min_rows=num_rows,
        columns=[],
        policy_version=step - 1,
        lease_s=RETAKE_LEASE_S,
        deadline_s=RETAKE_DEADLINE_S,
    )
    came = lease.table["uid"].to_pylist()
    if lease.status != "rows" or not set(came) <= set(uids):
        if came:
            queue.nack(
                "rollouts", "actor", lease_id=lease.lease_id, reason="not of the step that was trained"
            )
        raise ServiceError(
            f"actor: the {num_rows} rows of step {step} whose lease was lost must come again to be acked, got "
            f"{len(set(came) & set(uids))} of them"
        )
    queue.ack("rollouts", "actor", lease_id=lease.lease_id, step=step)
