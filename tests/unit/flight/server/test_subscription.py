"""A subscription's session without a socket: a broker, a clock moved by hand, and a list of what was sent."""

from __future__ import annotations

import msgspec
import pyarrow as pa
import pytest

from flight import stream_messages as sm
from flight.broker import Broker, Wait
from flight.errors import DeadlineExceededError, InvalidRequestError
from flight.messages import encode
from flight.schema import Column, ConsumerSpec, TableSpec
from flight.server.subscription import Session
from tests.kit.clock import FakeClock
from tests.kit.queues import prompts_spec, rollouts_spec

NOW = Wait(deadline=0.0)


class Stream:
    """One session and what it sent; `step` is what its pushing thread does, with time standing still."""

    def __init__(self, *specs: TableSpec, **request) -> None:
        self.clock = FakeClock()
        self.broker = Broker(clock=self.clock)
        for spec in specs:
            self.broker.create_table(spec, exist_ok=False)
        values = {
            "table": specs[0].name,
            "consumer": specs[0].consumers[0].name,
            "max_rows": 4,
            "credit_rows": 8,
            "heartbeat_s": 1.0,
            "identity": "me",
        }
        self.sent: list[tuple[object, pa.RecordBatch | None]] = []
        wanted = sm.Subscribe(**values | request)
        self.session = Session(
            self.broker,
            wanted,
            delivery=self.broker.delivery(wanted.table, wanted.consumer, None),
            send=self._send,
            is_cancelled=lambda: False,
        )

    def _send(self, data: bytes, batch: pa.RecordBatch | None) -> None:
        self.sent.append((msgspec.json.decode(data, type=sm.FromServer), batch))

    def hear(self, message) -> None:
        """The subscriber says something."""
        self.session.hear(encode(message))

    def step(self) -> list[object]:
        """Do one step and return what was said in it."""
        before = len(self.sent)
        self.session.step()
        return [message for message, _ in self.sent[before:]]

    def leased(self) -> int:
        """Return the rows that the first consumer holds."""
        name = next(iter(self.broker.list_tables()))
        return next(iter(self.broker.stats(name)[name]["consumers"].values()))["leased"]


def rows_spec(**changes) -> TableSpec:
    """Return a table of numbers with one fifo consumer."""
    column = Column(name="x", type=pa.int64(), meaning="a number")
    return TableSpec(
        **{"name": "rows", "columns": (column,), "consumers": (ConsumerSpec(name="c", columns=("x",)),)}
        | changes
    )


def put(stream: Stream, num_rows: int, start: int = 0) -> None:
    """Put numbered rows."""
    uids = [str(index) for index in range(start, start + num_rows)]
    batch = pa.record_batch({"uid": uids, "x": pa.array(range(num_rows), pa.int64())})
    stream.broker.put("rows", batch, "", NOW)


def test_rows_are_pushed_as_far_as_the_credit_reaches():
    """Eight rows of credit, leases of four: twelve rows wait for an ack and its grant."""
    stream = Stream(rows_spec())
    put(stream, 12)
    first, second = stream.step() + stream.step()
    assert (first.num_rows, second.num_rows, first.max_attempt) == (4, 4, 1)
    stream.hear(sm.AckRows(seq=7, lease_id=first.lease_id, step=3))
    assert stream.sent[-1][0] == sm.Done(seq=7, num_rows=4)
    assert stream.leased() == 4
    stream.hear(sm.Grant(rows=3))
    assert [message.num_rows for message in stream.step()] == [3]


def test_what_is_wrong_with_an_ack_is_answered_and_the_stream_goes_on():
    """A lease that is not there, or not any more."""
    stream = Stream(rows_spec(), lease_s=5.0)
    put(stream, 2)
    [rows] = stream.step()
    stream.hear(sm.AckRows(seq=1, lease_id="nonsense"))
    assert (stream.sent[-1][0].seq, stream.sent[-1][0].code) == (1, "lease_lost")
    stream.clock.advance(2.9)
    stream.hear(sm.Heartbeat(renew=[rows.lease_id, "nonsense"]))
    stream.clock.advance(2.9)
    stream.hear(sm.RenewLease(seq=2, lease_id=rows.lease_id, lease_s=1.0))
    assert stream.leased() == 2
    stream.clock.advance(1.1)
    stream.hear(sm.NackRows(seq=3, lease_id=rows.lease_id, reason="late"))
    assert stream.sent[-1][0].code == "lease_lost"


def test_a_silent_subscriber_loses_its_leases():
    """It is told a heartbeat now and then, and after three of them without a word it is dead."""
    stream = Stream(rows_spec(), credit_rows=4)
    put(stream, 4)
    stream.step()
    stream.clock.advance(1.0)
    stream.hear(sm.Heartbeat())
    stream.clock.advance(3.1)
    with pytest.raises(DeadlineExceededError, match="must say something every 3 s, got nothing"):
        stream.session.step()
    stream.session.end()
    assert stream.leased() == 0


def test_the_end_of_the_stream_gives_back_what_was_not_finished():
    """Whatever was acked stays acked."""
    stream = Stream(rows_spec())
    put(stream, 8)
    [first] = stream.step()
    stream.step()
    stream.hear(sm.AckRows(seq=1, lease_id=first.lease_id))
    stream.session.end()
    stats = stream.broker.stats("rows")["rows"]["consumers"]["c"]
    assert (stats["leased"], stats["ready"], stats["acked"]) == (0, 4, 4)


def test_sealed_is_said_once_and_acks_are_taken_before():
    """Not before the last ack, because a nack would bring rows back."""
    stream = Stream(rows_spec(), heartbeat_s=0.1)
    put(stream, 1)
    stream.broker.seal("rows", None)
    [rows] = stream.step()
    stream.hear(sm.AckRows(seq=1, lease_id=rows.lease_id))
    assert stream.step() == [sm.Sealed()]
    assert stream.step() == []


def test_an_outdated_subscriber_adopts_and_gets_rows():
    """It is told the version, and nothing is pushed until it has said that it has adopted it."""
    stream = Stream(prompts_spec(), rollouts_spec(), policy_version=0, heartbeat_s=0.1)
    stream.broker.put(
        "prompts", pa.record_batch({"uid": ["a", "b", "c"], "text": ["a", "b", "c"]}), "preprocess", NOW
    )
    [rows] = stream.step()
    assert rows.num_rows == 2
    stream.hear(sm.AckRows(seq=1, lease_id=rows.lease_id))
    stream.broker.announce("rollouts", 1)
    assert stream.step() == [sm.Outdated(policy_version=1)]
    assert stream.step() == []
    stream.hear(sm.Adopt(policy_version=1))
    assert [message.num_rows for message in stream.step()] == [1]


def test_groups_are_pushed_whole():
    """A credit of five rows is two groups of two; a credit of one is none."""
    stream = Stream(rollouts_spec(), consumer="actor", max_rows=5, credit_rows=5)
    for group in "ab":
        batch = pa.record_batch(
            {
                "uid": [f"{group}0", f"{group}1"],
                "group_id": [group, group],
                "policy_version_start": pa.array([0, 0], pa.int64()),
                "completion_token_ids": pa.array([[1], [2]], pa.list_(pa.int32())),
            }
        )
        stream.broker.put("rollouts", batch, "rollout", NOW)
    [rows] = stream.step()
    assert rows.num_rows == 4
    with pytest.raises(InvalidRequestError, match="max_rows and credit_rows must be at least 2"):
        Stream(rollouts_spec(), consumer="actor", max_rows=5, credit_rows=1)
