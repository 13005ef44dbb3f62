"""Clients that outlive a server that is away, broken streams, and members that are gone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pytest

from flight.client import QueueClient
from flight.errors import LeaseLostError, UnavailableError
from flight.schema import Column, ConsumerSpec, TableSpec
from tests.kit.relay import Relay
from tests.kit.server import queue_server


def rows_spec() -> TableSpec:
    return TableSpec(
        name="rows",
        columns=(Column(name="x", type=pa.int64(), meaning="a number"),),
        consumers=(ConsumerSpec(name="c", columns=("x",)),),
    )


def rows(count: int, first: int = 0) -> pa.Table:
    numbers = range(first, first + count)
    return pa.table({"uid": list(map(str, numbers)), "x": list(numbers)})


@contextmanager
def killed_server() -> Iterator[str]:
    """The address of a server that was killed; the next one may take it."""
    with queue_server() as (address, process):
        process.kill()
        process.wait()
        yield address


@contextmanager
def server_at(address: str) -> Iterator[QueueClient]:
    """A new server at an address, with the table of this module."""
    with queue_server("--port", address.rpartition(":")[2]), QueueClient(address, identity="owner") as own:
        own.create_table(rows_spec())
        own.put("rows", rows(1))
        yield own


def test_patient_calls_wait_for_the_next_server():
    """A take, a put over a stream and a take over a stream, all asked for while nobody listens."""
    came: dict[str, object] = {}

    def take(client: QueueClient) -> None:
        came["take"] = client.take("rows", "c", max_rows=1, deadline_s=20.0).table["x"].to_pylist()

    def put(client: QueueClient) -> None:
        with client.open_put("rows") as stream:
            came["put"] = stream.put(rows(1, first=5)).num_rows

    def take_on_stream(client: QueueClient) -> None:
        with client.open_take("rows", "c") as stream:
            came["stream"] = stream.take(max_rows=1, deadline_s=20.0).table.num_rows

    with killed_server() as address, QueueClient(address, identity="patient", patience_s=60.0) as client:
        threads = [
            threading.Thread(target=each, args=(client,), daemon=True) for each in (take, put, take_on_stream)
        ]
        for thread in threads:
            thread.start()
        with (
            QueueClient(address, identity="impatient", patience_s=0.0) as other,
            pytest.raises(UnavailableError),
        ):
            other.ping()
        with server_at(address) as own:
            own.put("rows", rows(1, first=9))
            for thread in threads:
                thread.join(60.0)
    assert set(came) == {"take", "put", "stream"}, came
    assert (came["put"], came["stream"]) == (1, 1)


def test_subscription_goes_on_over_another_stream_when_its_own_breaks():
    """What was not acked comes again; an ack of the lease that broke with its stream is refused."""
    with (
        queue_server() as (address, _),
        QueueClient(address, identity="owner") as own,
        Relay(address) as relay,
    ):
        own.create_table(rows_spec())
        own.put("rows", rows(3))
        with (
            QueueClient(relay.address, identity="cut", patience_s=20.0, shared_memory=False) as client,
            client.subscribe("rows", "c", max_rows=1, credit_rows=1, idle_deadline_s=20.0) as pushed,
        ):
            next(pushed).ack()
            held = next(pushed)
            assert relay.break_all() > 0
            again = next(pushed)
            assert (again.table["x"].to_pylist(), again.max_attempt) == ([1], 2)
            with pytest.raises(LeaseLostError):
                held.ack()
            again.ack()
            next(pushed).ack()
            assert pushed.num_resumed == 1
        assert own.stats("rows")["consumers"]["c"]["acked"] == 3


def test_what_a_member_held_goes_back_when_it_is_known_to_be_gone(client, uri):
    """All its leases, at once, counted as a delivery; those of others stay."""
    client.create_table(rows_spec())
    client.put("rows", rows(5))
    with QueueClient(uri, identity="gone") as gone:
        gone.take("rows", "c", max_rows=2, lease_s=600.0)
        gone.take("rows", "c", max_rows=1, lease_s=600.0)
    kept = client.take("rows", "c", max_rows=1, lease_s=600.0)
    assert client.void("gone") == 3
    assert client.void("gone") == 0
    again = client.take("rows", "c", max_rows=9, min_rows=4)
    assert again.table["x"].to_pylist() == [0, 1, 2, 4]
    assert again.table["attempt"].to_pylist() == [2, 2, 2, 1]
    assert client.ack("rows", "c", lease_id=kept.lease_id) == 1
