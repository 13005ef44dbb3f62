"""Prompts that are given up: nobody waits for their rollouts, and halves of groups do not stay."""

from __future__ import annotations

import pytest

from flight.errors import TableSealedError
from flight.state.ledger import Ledger, TakeRequest
from tests.kit.queues import BATCH, GROUP, make_ledger, put_prompts, put_rollouts

TRAIN = TakeRequest(consumer="actor", max_rows=BATCH, min_rows=BATCH, policy_version=0)


def begin(num_prompts: int, max_attempts: int = 3) -> Ledger:
    """Return tables with prompts, whose rollouts are expected."""
    ledger = make_ledger(3, max_attempts=max_attempts)
    put_prompts(ledger, [f"p{index}" for index in range(num_prompts)])
    ledger.table("rollouts").seal(num_prompts * GROUP)
    return ledger


def ask(ledger: Ledger, num_prompts: int = 1, now: float = 0.0):
    """Lease prompts."""
    request = TakeRequest(consumer="rollout", max_rows=num_prompts, policy_version=0, lease_s=5.0)
    return ledger.take("prompts", request, now).lease


@pytest.mark.parametrize("how", ["skipped", "dead", "acked short", "truncated"])
def test_expected_rows_shrink_with_prompts_that_are_given_up(how):
    """The trainer gets what came, with less than its batch, and then the end."""
    ledger = begin(2, max_attempts=1)
    put_rollouts(ledger, ask(ledger).rows()[0].uid, 0)
    assert ledger.take("rollouts", TRAIN, 0.0) is None
    lost = ask(ledger)
    assert ledger.take("rollouts", TRAIN, 0.0) is None
    if how == "acked short":
        put_rollouts(ledger, "p1", 0, [0])
        ledger.ack("prompts", "rollout", lost.lease_id, None)
    elif how == "truncated":
        ledger.truncate("prompts")
    else:
        ledger.nack("prompts", "rollout", lost.lease_id, None, reason="broken", requeue=how == "dead")
    taken = ledger.take("rollouts", TRAIN, 0.0)
    assert [row.uid for row in taken.lease.rows()] == ["p0/0", "p0/1"]
    ledger.ack("rollouts", "actor", taken.lease.lease_id, None)
    assert ledger.take("rollouts", TRAIN, 0.0).status == "sealed"
    with pytest.raises(TableSealedError, match="new rows must come before the end"):
        ledger.table("rollouts").room_needed(["p1/0", "p1/1"], ["p1", "p1"])


def test_requeued_prompt_opens_the_end_again():
    """Its rows are expected as before, its uids may come, and then the end is reached by them."""
    ledger = begin(1, max_attempts=1)
    put_rollouts(ledger, "p0", 0, [])
    lease = ask(ledger)
    put_rollouts(ledger, "p0", 0, [0])
    ledger.nack("prompts", "rollout", lease.lease_id, None, reason="broken", requeue=True)
    rollouts = ledger.table("rollouts")
    assert (len(rollouts.rows), rollouts.is_closed, rollouts.end.num_never) == (0, True, GROUP)
    assert ledger.requeue("prompts", "rollout", ["p0"]) == 1
    assert (rollouts.is_closed, rollouts.end.num_never) == (False, 0)
    lease = ask(ledger)
    assert rollouts.room_needed(["p0/0", "p0/1"], ["p0", "p0"]) == GROUP
    assert len(put_rollouts(ledger, "p0", 0).arrived) == GROUP
    ledger.ack("prompts", "rollout", lease.lease_id, None)
    assert (rollouts.is_closed, rollouts.end.num_never) == (True, 0)


def test_rows_that_come_after_all_are_not_counted_twice():
    """A slow worker puts the group of a prompt that another one skipped: the end is where it was."""
    ledger = begin(2)
    ask(ledger)
    ledger.expire(5.0)
    again = ask(ledger, now=5.0)
    ledger.nack("prompts", "rollout", again.lease_id, None, reason="broken", requeue=False)
    rollouts = ledger.table("rollouts")
    assert rollouts.end.num_never == GROUP
    assert len(put_rollouts(ledger, "p0", 0).arrived) == GROUP
    assert (rollouts.end.num_never, rollouts.is_closed) == (0, False)
    put_rollouts(ledger, ask(ledger, now=6.0).rows()[0].uid, 0)
    assert rollouts.is_closed


@pytest.mark.parametrize("is_finished", [False, True])
def test_half_a_group_without_a_ticket_does_not_hold_room(is_finished):
    """A worker whose lease has expired puts one row and dies: nothing stays, and the next worker is not disturbed."""
    ledger = begin(1)
    lease = ask(ledger)
    if is_finished:
        ledger.nack("prompts", "rollout", lease.lease_id, None, reason="broken", requeue=False)
        ledger.table("rollouts").end.expect_again("p0")
    else:
        ledger.expire(5.0)
    put_rollouts(ledger, "p0", 0, [0])
    rollouts = ledger.table("rollouts")
    assert (len(rollouts.rows), rollouts.num_reserved) == (0, 0)
    assert ledger.gates["rollouts"].outstanding == 0
    if not is_finished:
        ask(ledger, now=6.0)
        assert len(put_rollouts(ledger, "p0", 0).arrived) == GROUP


def test_trainer_does_not_wait_at_the_end_for_what_cannot_come():
    """Half a group that nobody will complete is not worth waiting for, however old it is."""
    ledger = make_ledger(1)
    put_rollouts(ledger, "lost", 0, [0])
    for group in ("a", "b", "c"):
        put_rollouts(ledger, group, 1)
    ledger.announce("rollouts", 1)
    request = TakeRequest(consumer="actor", max_rows=2 * BATCH, min_rows=BATCH, policy_version=1)
    for _ in range(3):
        taken = ledger.take("rollouts", request, 0.0)
        if taken is not None:
            ledger.ack("rollouts", "actor", taken.lease.lease_id, None)
        put_rollouts(ledger, f"more{_}", 1)
    ledger.table("rollouts").seal()
    statuses = []
    while (taken := ledger.take("rollouts", request, 0.0)) is not None and taken.status == "rows":
        statuses.append(len(taken.lease.rows()))
        ledger.ack("rollouts", "actor", taken.lease.lease_id, None)
    assert taken is not None
    assert taken.status == "sealed"


def test_requeued_rollouts_count_against_the_bound_again():
    """Dead rows do not; requeued ones do until they are trained."""
    ledger = make_ledger(0, max_attempts=1)
    put_rollouts(ledger, "g", 0)
    request = TakeRequest(consumer="actor", max_rows=BATCH, policy_version=0)
    lease = ledger.take("rollouts", request, 0.0).lease
    ledger.nack("rollouts", "actor", lease.lease_id, None, reason="out of memory", requeue=True)
    gate = ledger.gates["rollouts"]
    assert (gate.outstanding, gate.counts["dead"]) == (0, GROUP)
    assert ledger.requeue("rollouts", "actor", None) == GROUP
    assert gate.outstanding == GROUP
    lease = ledger.take("rollouts", request, 0.0).lease
    ledger.ack("rollouts", "actor", lease.lease_id, None)
    assert (gate.num_waiting, gate.trained.total()) == (0, GROUP)


def test_truncating_rollouts_lets_the_entrance_breathe():
    """What waited does not count any more; prompts that were kept for it are let go."""
    ledger = begin(2)
    lease = ask(ledger, 2)
    for row in lease.rows():
        put_rollouts(ledger, row.uid, 0)
    ledger.ack("prompts", "rollout", lease.lease_id, None)
    assert ledger.gates["rollouts"].outstanding == 2 * GROUP
    assert ledger.truncate("rollouts") == 2 * GROUP
    assert ledger.gates["rollouts"].outstanding == 0
    assert not ledger.table("prompts").rows
