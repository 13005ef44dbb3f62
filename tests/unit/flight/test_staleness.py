"""The freshness bound at both ends, and what ties prompts to rollouts. Groups of 2 rows, 4 rows a policy version."""

from __future__ import annotations

import pytest

from flight.errors import InvalidRequestError, TableNotFoundError
from flight.state.ledger import Ledger, TakeRequest
from tests.kit.queues import make_ledger, prompts_spec, put_prompts, put_rollouts, rollouts_spec


def ask(ledger: Ledger, version: int | None, max_rows: int = 100, *, now: float = 0.0, lease_s: float = 60.0):
    """Take prompts as a worker that generates from `version`."""
    request = TakeRequest(consumer="rollout", max_rows=max_rows, policy_version=version, lease_s=lease_s)
    return ledger.take("prompts", request, now)


def train(ledger: Ledger, version: int | None = None, *, max_rows: int = 4, min_rows: int = 4):
    """Take a training batch."""
    request = TakeRequest(consumer="actor", max_rows=max_rows, min_rows=min_rows, policy_version=version)
    return ledger.take("rollouts", request, 0.0)


def uids(taken) -> list[str]:
    """Return the uids of what was taken; none if the taker must wait."""
    return [row.uid for row in taken.lease.rows()] if taken is not None and taken.lease is not None else []


def with_prompts(max_staleness: int, num_prompts: int = 20, **changes) -> Ledger:
    """Return tied tables with prompts p0, p1, ..."""
    ledger = make_ledger(max_staleness, **changes)
    put_prompts(ledger, [f"p{index}" for index in range(num_prompts)])
    return ledger


def generate(ledger: Ledger, taken, version: int) -> None:
    """Put the groups of taken prompts and ack these."""
    for uid in uids(taken):
        put_rollouts(ledger, uid, version)
    ledger.ack("prompts", "rollout", taken.lease.lease_id, None)


def train_and_ack(ledger: Ledger) -> list[str]:
    """Take a batch, train it and ack it; the next version is not announced."""
    taken = train(ledger)
    trained = uids(taken)
    ledger.ack("rollouts", "actor", taken.lease.lease_id, None)
    return trained


@pytest.mark.parametrize(("max_staleness", "num_prompts"), [(0, 2), (1, 4), (4, 10)])
def test_entrance_issues_exactly_the_bound(max_staleness, num_prompts):
    """(K + 1) * 4 rows in groups of 2 may be started, and not one more."""
    ledger = with_prompts(max_staleness)
    assert uids(ask(ledger, 0)) == [f"p{index}" for index in range(num_prompts)]
    assert ask(ledger, 0) is None
    assert ledger.gates["rollouts"].outstanding == (max_staleness + 1) * 4


def test_on_policy_issues_one_batch_a_version():
    """K = 0: nothing new between the first ticket and the announcement, not even after the batch was acked."""
    ledger = with_prompts(0)
    generate(ledger, ask(ledger, 0), 0)
    assert ask(ledger, 0) is None
    assert train_and_ack(ledger) == ["p0/0", "p0/1", "p1/0", "p1/1"]
    assert ask(ledger, 0) is None
    ledger.announce("rollouts", 1)
    assert uids(ask(ledger, 1)) == ["p2", "p3"]


def test_ack_after_the_announcement_is_credited_at_once():
    """A trainer may announce first and ack then: the rows belong to the version that they were taken for."""
    ledger = with_prompts(0)
    generate(ledger, ask(ledger, 0), 0)
    taken = train(ledger)
    ledger.announce("rollouts", 1)
    assert ask(ledger, 1) is None
    ledger.ack("rollouts", "actor", taken.lease.lease_id, None)
    assert uids(ask(ledger, 1)) == ["p2", "p3"]


def test_worker_that_lags_gets_less_and_is_told_so():
    """Work from old weights must be trained sooner, so fewer rows of it fit; what lags beyond K gets none."""
    ledger = with_prompts(1)
    ledger.announce("rollouts", 5)
    assert len(uids(ask(ledger, 4))) == 2
    told = ask(ledger, 4)
    assert (told.status, told.policy_version) == ("outdated", 5)
    assert len(uids(ask(ledger, 5))) == 2
    assert ask(ledger, 3).status == "outdated"
    assert ask(ledger, 5) is None


def test_entrance_counts_tickets_by_lease_end():
    """Ack, nack and expiry of a prompt each return what was not put; a skipped prompt returns its ticket too."""
    ledger = with_prompts(0)
    gate = ledger.gates["rollouts"]
    taken = ask(ledger, 0, lease_s=5.0)
    assert gate.in_flight.total() == 4
    ledger.expire(5.0)
    assert gate.outstanding == 0
    taken = ask(ledger, 0, 1)
    assert uids(taken) == ["p0"]
    ledger.nack("prompts", "rollout", taken.lease.lease_id, None, reason="busy", requeue=True)
    taken = ask(ledger, 0, 1)
    ledger.nack("prompts", "rollout", taken.lease.lease_id, None, reason="too long", requeue=False)
    assert gate.outstanding == 0
    assert uids(ask(ledger, 0)) == ["p1", "p2"]


def test_group_that_is_half_put_is_retracted_with_its_ticket():
    """A worker died between two puts: its rows leave, the prompt comes again and its uids count as new."""
    ledger = with_prompts(0)
    ask(ledger, 0, lease_s=5.0)
    put_rollouts(ledger, "p0", 0, [0])
    assert ledger.gates["rollouts"].outstanding == 4
    ledger.expire(5.0)
    assert ledger.gates["rollouts"].outstanding == 0
    taken = ask(ledger, 0)
    assert put_rollouts(ledger, "p0", 0).num_duplicates == 0
    put_rollouts(ledger, "p1", 0)
    ledger.ack("prompts", "rollout", taken.lease.lease_id, None)
    assert train_and_ack(ledger) == ["p0/0", "p0/1", "p1/0", "p1/1"]


def test_late_rows_of_an_expired_lease_are_not_charged_twice():
    """A worker puts after its lease expired; the next ticket for the prompt charges only what is missing."""
    ledger = with_prompts(0)
    ask(ledger, 0, 1, lease_s=5.0)
    ledger.expire(5.0)
    put_rollouts(ledger, "p0", 0)
    gate = ledger.gates["rollouts"]
    assert (gate.outstanding, gate.counts["unticketed"]) == (2, 2)
    assert uids(ask(ledger, 0)) == ["p0", "p1"]
    assert gate.outstanding == 4


def test_rows_without_ticket_count_against_the_bound():
    """A plain script may put groups; the entrance makes room for them."""
    ledger = with_prompts(0)
    put_rollouts(ledger, "script", 0)
    assert uids(ask(ledger, 0)) == ["p0"]


def test_exit_never_hands_out_a_row_that_is_too_old():
    """With K = 1 a row of version 3 is trained for 4 and dropped for 5; its prompt is let go, its ticket returned."""
    ledger = with_prompts(1, policy="drop")
    ledger.announce("rollouts", 3)
    generate(ledger, ask(ledger, 3, 4), 3)
    ledger.announce("rollouts", 4)
    assert train_and_ack(ledger) == ["p0/0", "p0/1", "p1/0", "p1/1"]
    ledger.announce("rollouts", 5)
    gate = ledger.gates["rollouts"]
    assert train(ledger) is None
    assert gate.dropped_age == {2: 4}
    assert gate.trained_age == {1: 4}
    assert gate.outstanding == 0
    assert [row.uid for row in ledger.table("prompts").rows.values() if row.given_up] == []
    assert ledger.table("prompts").find("p2") is None


def test_exit_measures_against_the_askers_version_if_it_is_newer():
    """A trainer that has finished a version which is not announced yet trains for the next one."""
    ledger = with_prompts(0)
    generate(ledger, ask(ledger, 0), 0)
    assert train(ledger, version=1) is None
    assert ledger.gates["rollouts"].counts["dropped"] == 4


def test_pace_waits_for_a_straggler_that_is_due():
    """K = 1: the batch that advances to version 2 must hold what was started at version 0."""
    ledger = with_prompts(1)
    slow, first = ask(ledger, 0, 2), ask(ledger, 0, 2)
    generate(ledger, first, 0)
    assert train_and_ack(ledger) == ["p2/0", "p2/1", "p3/0", "p3/1"]
    ledger.announce("rollouts", 1)
    generate(ledger, ask(ledger, 1, 2), 1)
    assert train(ledger) is None
    generate(ledger, slow, 0)
    assert train_and_ack(ledger) == ["p0/0", "p0/1", "p1/0", "p1/1"]


def test_pace_looks_more_than_one_version_ahead():
    """K = 2: two batches of stragglers due in version 2 cannot both be trained then, so version 1 waits for one."""
    ledger = with_prompts(2)
    first, slow = ask(ledger, 0, 2), ask(ledger, 0, 4)
    generate(ledger, first, 0)
    train_and_ack(ledger)
    ledger.announce("rollouts", 1)
    generate(ledger, ask(ledger, 1, 2), 1)
    assert train(ledger) is None
    put_rollouts(ledger, "p2", 0)
    put_rollouts(ledger, "p3", 0)
    assert train_and_ack(ledger) == ["p2/0", "p2/1", "p3/0", "p3/1"]
    ledger.announce("rollouts", 2)
    assert train(ledger) is None
    generate(ledger, slow, 0)
    assert train_and_ack(ledger) == ["p4/0", "p4/1", "p5/0", "p5/1"]


def test_pace_does_not_wait_for_a_straggler_that_has_time():
    """K = 4: a slow group started at version 0 need not hold back version 1."""
    ledger = with_prompts(4)
    ask(ledger, 0, 1)
    generate(ledger, ask(ledger, 0, 4), 0)
    assert len(train_and_ack(ledger)) == 4


def test_pace_goes_on_when_the_straggler_has_died():
    """An expired prompt lease frees the trainer; the prompt is generated anew."""
    ledger = with_prompts(1)
    ask(ledger, 0, 2, lease_s=5.0)
    generate(ledger, ask(ledger, 0, 2), 0)
    train_and_ack(ledger)
    ledger.announce("rollouts", 1)
    generate(ledger, ask(ledger, 1, 2), 1)
    assert train(ledger) is None
    ledger.expire(5.0)
    assert train_and_ack(ledger) == ["p4/0", "p4/1", "p5/0", "p5/1"]
    assert uids(ask(ledger, 1, 2)) == ["p0", "p1"]


def test_drop_does_not_wait_and_counts_the_straggler():
    """The same stragglers under "drop": the trainer goes on, they are dropped when they come too late."""
    ledger = with_prompts(1, policy="drop")
    slow, first = ask(ledger, 0, 2), ask(ledger, 0, 2)
    generate(ledger, first, 0)
    train_and_ack(ledger)
    ledger.announce("rollouts", 1)
    generate(ledger, ask(ledger, 1, 2), 1)
    assert train_and_ack(ledger) == ["p4/0", "p4/1", "p5/0", "p5/1"]
    ledger.announce("rollouts", 2)
    generate(ledger, slow, 0)
    assert train(ledger) is None
    assert ledger.gates["rollouts"].dropped_age == {2: 4}


def test_batch_taken_in_parts_may_leave_due_rows_for_its_other_parts():
    """Two takes of half a batch train the same version: the first may leave what the second will take."""
    ledger = with_prompts(0)
    taken = ask(ledger, 0)
    put_rollouts(ledger, "p0", 0)
    first = train(ledger, max_rows=2, min_rows=2)
    assert uids(first) == ["p0/0", "p0/1"]
    put_rollouts(ledger, "p1", 0)
    ledger.ack("prompts", "rollout", taken.lease.lease_id, None)
    assert uids(train(ledger, max_rows=2, min_rows=2)) == ["p1/0", "p1/1"]


def test_bound_changes_while_in_use():
    """A larger K lets more in; a smaller one drops what it makes too old."""
    ledger = with_prompts(0)
    taken = ask(ledger, 0)
    assert len(uids(taken)) == 2
    ledger.set_max_staleness("rollouts", 2)
    assert len(uids(ask(ledger, 0))) == 4
    generate(ledger, taken, 0)
    ledger.announce("rollouts", 2)
    assert ledger.gates["rollouts"].counts["dropped"] == 0
    ledger.set_max_staleness("rollouts", 1)
    assert ledger.gates["rollouts"].counts["dropped"] == 4


def test_bound_must_fit_the_capacity():
    """A bound that the table cannot hold could lock up and is refused, when created and when changed."""
    ledger = with_prompts(0)
    with pytest.raises(InvalidRequestError) as caught:
        ledger.set_max_staleness("rollouts", 16)
    assert str(caught.value) == (
        "table 'rollouts': max_staleness must be at most 15, so that capacity_rows 64 holds "
        "(max_staleness + 1) * rows_per_version, got 16"
    )
    with pytest.raises(InvalidRequestError, match="max_staleness must be at most 15"):
        rollouts_spec(16)


def test_version_never_goes_back():
    """A lower announcement is refused, a repeated one is harmless."""
    ledger = with_prompts(0)
    ledger.announce("rollouts", 2)
    ledger.announce("rollouts", 2)
    with pytest.raises(InvalidRequestError, match="policy_version must be at least the announced 2, got 1"):
        ledger.announce("rollouts", 1)
    with pytest.raises(
        InvalidRequestError, match="table 'prompts': it must have a staleness bound, got none"
    ):
        ledger.announce("prompts", 3)


def test_take_that_can_never_be_granted_is_refused():
    """min_rows beyond what the bound ever lets in would wait for ever."""
    ledger = with_prompts(0)
    with pytest.raises(
        InvalidRequestError, match="min_rows must be at most 2, what max_staleness 0 lets into rollouts"
    ):
        ledger.take("prompts", TakeRequest(consumer="rollout", max_rows=9, min_rows=3), 0.0)
    lonely = Ledger()
    lonely.create(prompts_spec())
    with pytest.raises(
        TableNotFoundError, match="tickets are for must exist, got 'rollouts'; create it first"
    ):
        ask(lonely, 0)


def test_dead_prompt_takes_its_half_group_along():
    """A prompt tried too often leaves no rows behind that the trainer would wait for."""
    ledger = with_prompts(0, num_prompts=1)
    for attempt in range(3):
        ask(ledger, 0, now=attempt * 10.0, lease_s=5.0)
        put_rollouts(ledger, "p0", 0, [0])
        ledger.expire(attempt * 10.0 + 5.0)
    assert list(ledger.table("prompts").buried) == [0]
    assert not ledger.table("rollouts").rows
    assert ledger.gates["rollouts"].outstanding == 0


def test_dropping_a_table_returns_its_tickets():
    """Tickets end with the prompts table."""
    ledger = with_prompts(0)
    ask(ledger, 0)
    ledger.drop("prompts")
    assert ledger.gates["rollouts"].outstanding == 0


def test_work_that_is_gone_on_with_counts_from_the_version_that_it_was_begun_from():
    """K = 1: what was begun under version 0 and given back is due with version 1, whoever goes on with it."""
    ledger = with_prompts(1)
    taken = ask(ledger, 0)
    assert uids(taken) == ["p0", "p1", "p2", "p3"]
    lease_id = taken.lease.lease_id
    for uid in ("p0", "p1"):
        put_rollouts(ledger, uid, 0)
    ledger.ack("prompts", "rollout", lease_id, ["p0", "p1"])
    assert train_and_ack(ledger) == ["p0/0", "p0/1", "p1/0", "p1/1"]
    ledger.announce("rollouts", 1)
    ledger.nack("prompts", "rollout", lease_id, ["p2", "p3"], reason="update", requeue=True, policy_version=0)
    again = ask(ledger, 1)
    assert uids(again) == ["p2", "p3", "p4", "p5"]
    gate = ledger.gates["rollouts"]
    assert gate.in_flight == {0: 4, 1: 4}
    for uid in ("p4", "p5"):
        put_rollouts(ledger, uid, 1)
    assert train(ledger) is None
    for uid in ("p2", "p3"):
        put_rollouts(ledger, uid, 0)
    ledger.ack("prompts", "rollout", again.lease.lease_id, None)
    assert train_and_ack(ledger) == ["p2/0", "p2/1", "p3/0", "p3/1"]
    assert gate.capture().begun == {}


def test_work_that_was_begun_outlives_the_server():
    """The books know it after a restore."""
    ledger = with_prompts(1)
    taken = ask(ledger, 0, 1)
    ledger.nack(
        "prompts", "rollout", taken.lease.lease_id, ["p0"], reason="update", requeue=True, policy_version=0
    )
    ledger.announce("rollouts", 1)
    gate = ledger.gates["rollouts"]
    gate.restore(gate.capture())
    ask(ledger, 1, 1)
    assert gate.in_flight == {0: 2}


@pytest.mark.parametrize(("uids_given", "requeue"), [(None, True), (["p0"], False)])
def test_version_of_work_is_refused_where_nothing_is_gone_on_with(uids_given, requeue):
    """Rows that are skipped, or not named."""
    ledger = with_prompts(1)
    lease_id = ask(ledger, 0, 1).lease.lease_id
    with pytest.raises(InvalidRequestError, match="policy_version must be of rows with tickets"):
        ledger.nack("prompts", "rollout", lease_id, uids_given, reason="", requeue=requeue, policy_version=0)
