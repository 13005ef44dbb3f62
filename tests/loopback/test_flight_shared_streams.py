"""Open streams over shared memory: large rows lie in the arena, whichever way they are put, taken or pushed."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from flight.client import QueueClient
from flight.errors import UnavailableError
from flight.messages import SharedRef
from flight.shared.guest import Guest
from flight.shared.host import SharedMemoryHost
from flight.shared.wire import BLOCK_GRANTS
from tests.kit.columns import columns, digest
from tests.kit.server import REPOSITORY, queue_server
from tests.loopback.test_flight_shared_memory import DEADLINE_S, PIXELS, pixels, spec_of, state, until

COLUMNS = {name: array for name, array in columns().items() if name != "string_view"}


@pytest.fixture(scope="module")
def uri():
    """A server with 32 MiB of shared memory."""
    with queue_server("--shared-memory-bytes", str(32 << 20)) as (address, _):
        yield address


@pytest.fixture
def client(uri):
    """A client of that server, without tables or slots."""
    with QueueClient(uri, identity="test", deadline_s=DEADLINE_S) as connected:
        for name in connected.list_tables():
            connected.drop_table(name)
        until(lambda: state(connected).used_bytes == 0)
        yield connected


def test_rows_over_open_streams_lie_in_the_arena_and_are_not_copied(client):
    """A put writes one slot; takes and pushes look at the same bytes; all is freed with the last view."""
    client.create_table(PIXELS)
    rows = pixels(8)
    with client.open_put("rows") as puts, client.open_take("rows", "c") as takes:
        assert puts.put(rows).row_ids == tuple(range(8))
        put = state(client)
        assert (put.num_slots, put.used_bytes > rows.nbytes) == (1, True)
        lease = takes.take(max_rows=4)
        with client.subscribe("rows", "c", max_rows=2, credit_rows=4) as pushed:
            first, second = next(pushed), next(pushed)
            assert state(client).used_bytes < put.used_bytes + 50_000
            found = [lease.table, first.table, second.table]
            assert [digest(each["x"]) for each in found] == [
                digest(rows["x"].slice(start, count)) for start, count in ((0, 4), (4, 2), (6, 2))
            ]
            assert first.ack() + second.ack() + takes.ack(lease) == 8
    assert client.stats("rows")["rows"] == 0
    view = second.table["x"].chunk(0).flatten().to_numpy()
    del lease, first, second, found
    assert state(client).num_slots == 2  # That of the put, and the small columns of the last lease.
    assert int(view[0]) == int(rows["x"][6].values.to_numpy()[0])
    del view
    until(lambda: state(client).used_bytes == 0)


def test_every_type_is_pushed_and_taken_with_the_same_bytes(client, uri):
    """Wide tables, so that all types go through the arena, and a client without it."""
    schema = {name: array.type for name, array in COLUMNS.items()}
    spec = spec_of("types", **schema, large=PIXELS.columns[0].type)
    num_rows = len(next(iter(COLUMNS.values())))
    large = pixels(num_rows)
    for name, array in COLUMNS.items():
        large = large.append_column(name, array)
    large = large.rename_columns(["uid", "large", *COLUMNS])
    expected = {name: digest(large[name]) for name in spec.columns_by_name}
    for shared_memory in (True, False):
        client.create_table(spec)
        with QueueClient(
            uri, identity="reader", deadline_s=DEADLINE_S, shared_memory=shared_memory
        ) as reader:
            with reader.open_put("types") as puts, reader.open_take("types", "c") as takes:
                puts.put(large)
                lease = takes.take(max_rows=num_rows)
                lease.table.validate(full=True)
                assert {name: digest(lease.table[name]) for name in expected} == expected
                takes.nack(lease, "again")
            with reader.subscribe("types", "c", max_rows=num_rows, min_rows=num_rows) as pushed:
                assert {name: digest(next(pushed).table[name]) for name in ("large",)} == {
                    "large": expected["large"]
                }
        client.drop_table("types")


def test_full_arena_falls_back_to_the_stream(client):
    """More than fits is on its way; every row arrives."""
    client.create_table(PIXELS)
    with client.open_put("rows") as puts:
        pending = [puts.put_nowait(pixels(30, seed=seed)) for seed in range(6)]
        assert [each.result().num_rows for each in pending] == [30] * 6
    with client.open_take("rows", "c") as takes:
        for seed in range(6):
            taken = takes.take(max_rows=30, min_rows=30)
            assert digest(taken.table["x"]) == digest(pixels(30, seed=seed)["x"])
            takes.ack(taken)
            del taken


def test_what_was_pushed_and_never_seen_is_freed_with_the_subscription(client):
    """Leases that wait here, or are on their way, when the block ends."""
    client.create_table(PIXELS)
    client.put("rows", pixels(20))
    with client.subscribe("rows", "c", max_rows=2, credit_rows=20) as pushed:
        lease = next(pushed)
        until(lambda: client.stats("rows")["consumers"]["c"]["leased"] == 20)
    del lease
    client.truncate_table("rows")
    until(lambda: state(client).used_bytes == 0)


HOLDER = """
import sys, time
from flight.client import QueueClient
client = QueueClient(sys.argv[1], identity="victim")
pushed = client.subscribe("rows", "c", max_rows=2, credit_rows=8, lease_s=600.0)
takes = client.open_take("rows", "c")
held = [next(pushed), takes.take(max_rows=2)]
puts = client.open_put("rows")
print(sum(lease.table.num_rows for lease in held), flush=True)
time.sleep(600)
"""


def test_what_a_killed_client_held_over_its_streams_is_freed(client, uri):
    """At once, as its socket closes; its pushed leases go back."""
    client.create_table(PIXELS)
    client.put("rows", pixels(20))
    victim = subprocess.Popen(
        [sys.executable, "-c", HOLDER, uri], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    try:
        assert victim.stdout.readline() == "4\n"
        victim.send_signal(signal.SIGKILL)
        until(lambda: client.stats("rows")["consumers"]["c"]["leased"] == 2)
    finally:
        victim.kill()
        victim.communicate()
    client.truncate_table("rows")
    until(lambda: state(client).used_bytes == 0)


def test_put_on_its_way_when_the_server_ends_is_told(client):
    """Nothing hangs, and the slots are freed."""
    with queue_server() as (address, process), QueueClient(address, identity="p", deadline_s=1.0) as own:
        own.create_table(PIXELS)
        puts = own.open_put("rows")
        puts.put(pixels(1))
        process.kill()
        process.wait(10)
        with pytest.raises(UnavailableError):
            puts.put(pixels(1, seed=2))
        puts.close()


def test_answers_of_sql_come_through_the_arena(client):
    """Copied once, instead of through the socket."""
    pytest.importorskip("duckdb")
    client.create_table(PIXELS)
    client.put("rows", pixels(4))
    before = state(client).used_bytes
    answer = client.sql("select uid, x from rows order by uid")
    assert state(client).used_bytes > before
    assert digest(answer["x"].cast(PIXELS.columns[0].type)) == digest(pixels(4)["x"])


def test_grants_of_a_block_that_has_ended_never_come_to_be(tmp_path):
    """The server pushes on while the client has gone."""
    host = SharedMemoryHost(8 << 20, root=tmp_path / "shared")
    guest = Guest(host.offer())
    first = guest.new_block()
    assert first == BLOCK_GRANTS
    table = pixels(1).select(["x"])
    wanted = [SharedRef(connection=guest.connection, grant=first + number) for number in range(3)]
    assert host.place(table, wanted[0]) is not None
    assert host.place(table, wanted[0]) is None
    guest.free(first, until=first + BLOCK_GRANTS)
    until(lambda: host.offer().used_bytes == 0)
    assert [host.place(table, each) for each in wanted] == [None] * 3
    other = SharedRef(connection=guest.connection, grant=guest.new_block())
    assert host.place(table, other) is not None
    host.close()
