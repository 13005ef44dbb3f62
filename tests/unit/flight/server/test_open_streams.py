"""Sessions of open streams without a socket: a broker, a clock moved by hand, messages in and out."""

from __future__ import annotations

import pyarrow as pa
import pytest

from flight import messages as m
from flight import stream_messages as sm
from flight.broker import Broker, Wait
from flight.errors import InvalidRequestError, UnavailableError
from flight.schema import Column, ConsumerSpec, TableSpec
from flight.server.open_streams import PutStreamSession, TakeStreamSession, to_runs
from tests.kit.clock import FakeClock

SPEC = TableSpec(
    name="rows",
    columns=(Column(name="x", type=pa.int64(), meaning="a number"),),
    consumers=(ConsumerSpec(name="c", columns=("x",)),),
    capacity_rows=4,
)


@pytest.fixture
def clock() -> FakeClock:
    """Time by hand."""
    return FakeClock()


@pytest.fixture
def broker(clock) -> Broker:
    """A broker with one table for four rows."""
    broker = Broker(clock=clock)
    broker.create_table(SPEC, exist_ok=False)
    return broker


@pytest.fixture
def puts(broker) -> PutStreamSession:
    """A stream of puts whose waits are over at once."""
    return PutStreamSession(broker, None, sm.PutStream(table="rows"), lambda _: Wait(deadline=0.0))


@pytest.fixture
def takes(broker) -> TakeStreamSession:
    """A stream of takes whose waits are over at once."""
    request = sm.TakeStream(table="rows", consumer="c", identity="me")
    return TakeStreamSession(broker, None, request, lambda _: Wait(deadline=0.0))


def batch(*numbers: int) -> pa.RecordBatch:
    """Return numbered rows."""
    return pa.RecordBatch.from_pydict({"uid": [str(number) for number in numbers], "x": list(numbers)})


@pytest.mark.parametrize(
    ("row_ids", "runs"),
    [
        ([], []),
        ([7], [(7, 1)]),
        ([3, 4, 5], [(3, 3)]),
        ([3, 4, 9, 5, 6], [(3, 2), (9, 1), (5, 2)]),
        ([2, 2, 1], [(2, 1), (2, 1), (1, 1)]),
    ],
)
def test_runs_say_row_numbers_in_order(row_ids, runs):
    """Consecutive ones together, whatever the order."""
    assert to_runs(row_ids) == runs
    assert [first + step for first, count in runs for step in range(count)] == row_ids


def test_put_is_answered_and_a_repeat_counts_as_a_duplicate(puts):
    """Each with its number."""
    assert puts.answer(sm.PutRows(seq=4), batch(1, 2)) == sm.Added(seq=4, num_rows=2, runs=[(0, 2)])
    again = sm.Added(seq=5, num_rows=2, num_duplicates=1, runs=[(1, 2)])
    assert puts.answer(sm.PutRows(seq=5), batch(2, 3)) == again


def test_put_that_cannot_be_is_refused(puts):
    """No room, neither batch nor slots, slots without shared memory."""
    puts.answer(sm.PutRows(seq=1), batch(1, 2, 3, 4))
    full = puts.answer(sm.PutRows(seq=2), batch(5))
    assert (full.seq, full.code) == (2, "deadline_exceeded")
    assert puts.answer(sm.PutRows(seq=3), None) == sm.Refused(
        seq=3,
        code="invalid_request",
        message="put into rows: message must have either a batch or shared, got neither",
    )
    slots = sm.SharedSlots(connection="x", slots=[1])
    assert puts.answer(sm.PutRows(seq=4, shared=slots), batch(5)).message.endswith("got both")
    assert puts.answer(sm.PutRows(seq=5, shared=slots), None).message == (
        "put stream: the server must have shared memory, got one without"
    )


def test_take_finishes_what_came_before_it(puts, takes, broker):
    """Ack first, then take; without rows there is no batch."""
    puts.answer(sm.PutRows(seq=1), batch(1, 2))
    [(first, rows)] = takes.answer(sm.TakeRows(seq=1, max_rows=1))
    assert (first.status, first.num_rows, rows.column("x").to_pylist()) == ("rows", 1, [1])
    ack = m.Finished(lease_id=first.lease_id, step=3)
    [(second, rows)] = takes.answer(sm.TakeRows(seq=2, max_rows=1, ack=ack))
    assert (second.seq, rows.column("x").to_pylist()) == (2, [2])
    ack = m.Finished(lease_id=second.lease_id)
    assert takes.answer(sm.TakeRows(seq=3, max_rows=1, ack=ack)) == [
        (sm.Taken(seq=3, status="empty", policy_version=second.policy_version), None)
    ]
    found = broker.stats("rows")["rows"]
    assert (found["rows"], found["consumers"]["c"]["last_step"]) == (0, 3)


def test_take_whose_ack_is_refused_takes_nothing(puts, takes, broker, clock):
    """The lease had expired."""
    puts.answer(sm.PutRows(seq=1), batch(1, 2))
    [(first, _)] = takes.answer(sm.TakeRows(seq=1, max_rows=1, lease_s=5.0))
    clock.advance(6.0)
    ack = m.Finished(lease_id=first.lease_id)
    [(refused, rows)] = takes.answer(sm.TakeRows(seq=2, max_rows=1, ack=ack))
    assert (refused.seq, refused.code, rows) == (2, "lease_lost", None)
    assert broker.stats("rows")["rows"]["consumers"]["c"]["leased"] == 0


def test_acks_nacks_and_renewals_are_answered_by_number(puts, takes):
    """As on a subscription."""
    puts.answer(sm.PutRows(seq=1), batch(1, 2, 3))
    [(lease, _)] = takes.answer(sm.TakeRows(seq=1, max_rows=3))
    renew = sm.RenewLease(seq=2, lease_id=lease.lease_id, lease_s=9.0)
    ack = sm.AckRows(seq=3, lease_id=lease.lease_id, uids=["1"])
    nack = sm.NackRows(seq=4, lease_id=lease.lease_id, reason="no")
    answers = [takes.answer(message) for message in (renew, ack, nack)]
    assert answers == [
        [(sm.Done(seq=2), None)],
        [(sm.Done(seq=3, num_rows=1), None)],
        [(sm.Done(seq=4, num_rows=2), None)],
    ]


def test_streams_end_when_the_server_stops(puts, takes, broker):
    """So that their clients look for its successor."""
    broker.close()
    with pytest.raises(UnavailableError):
        puts.answer(sm.PutRows(seq=1), batch(1))
    with pytest.raises(UnavailableError):
        takes.answer(sm.TakeRows(seq=1, max_rows=1))


def test_take_stream_of_unknown_columns_is_refused(broker):
    """When it is opened."""
    with pytest.raises(InvalidRequestError, match="'y'"):
        TakeStreamSession(
            broker,
            None,
            sm.TakeStream(table="rows", consumer="c", columns=["y"]),
            lambda _: Wait(deadline=0.0),
        )
