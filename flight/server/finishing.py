"""Acks, nacks and renewals: as actions, on an open stream, or riding with a take. No state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flight import messages as m
from flight import stream_messages as sm
from flight.broker import Broker
from flight.errors import InvalidRequestError

MAX_LEASE_S = 86_400.0


def finishing_actions(broker: Broker) -> dict[str, Callable[[Any], Any]]:
    """Return what each action does, by name."""
    return {
        "ack": lambda r: broker.ack(r.table, r.consumer, r.lease_id, r.uids, r.step),
        "nack": lambda r: broker.nack(
            r.table,
            r.consumer,
            r.lease_id,
            r.uids,
            reason=r.reason,
            requeue=r.requeue,
            policy_version=r.policy_version,
        ),
        "renew": lambda r: broker.renew(r.table, r.consumer, r.lease_id, check_lease(r.lease_s)),
    }


def finish(
    broker: Broker, table: str, consumer: str, message: sm.AckRows | sm.NackRows | sm.RenewLease | m.Finished
) -> int:
    """Do what a message says of a lease; return how many rows it finished or gave back.

    Raises:
        FlightQueueError: the lease is lost, or the message asks for what cannot be.
    """
    if isinstance(message, sm.RenewLease):
        broker.renew(table, consumer, message.lease_id, check_lease(message.lease_s))
        return 0
    if isinstance(message, sm.NackRows):
        return broker.nack(
            table, consumer, message.lease_id, message.uids, reason=message.reason, requeue=message.requeue
        )
    return broker.ack(table, consumer, message.lease_id, message.uids, message.step)


def check_lease(lease_s: float) -> float:
    """Return `lease_s` if a lease may last so long.

    Raises:
        InvalidRequestError: it may not.
    """
    if not 0 < lease_s <= MAX_LEASE_S:
        raise InvalidRequestError(f"request: lease_s must be over 0 and at most a day, got {lease_s}")
    return lease_s
