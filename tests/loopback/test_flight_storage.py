"""Values with storage servers, each a real process: the same bytes come back, whoever asks for them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.flight as paflight
import pytest

from flight.client import QueueClient
from flight.errors import InvalidRequestError, SchemaMismatchError
from flight.schema import Column, ConsumerSpec, MixSpec, TableSpec
from tests.kit.columns import columns, digest
from tests.kit.server import REPOSITORY, queue_server, storage_server
from tests.kit.storage import DEADLINE_S, LISTS, ROW_BYTES, check, names, rows, rows_at, spec, until, values

COLUMNS = {name: array for name, array in columns().items() if name != "string_view"}


@pytest.fixture(scope="module")
def home() -> Iterator[tuple[str, list[str]]]:
    """The address of a coordinator, and those of two storage servers that nobody kills."""
    with ExitStack() as stack:
        uri, _ = stack.enter_context(queue_server())
        yield uri, [stack.enter_context(storage_server(uri))[0] for _ in range(2)]


@pytest.fixture
def client(home) -> Iterator[QueueClient]:
    """A client that uses sockets only."""
    with QueueClient(home[0], identity="test", deadline_s=DEADLINE_S, shared_memory=False) as connected:
        for name in connected.list_tables():
            connected.drop_table(name)
        yield connected


@pytest.mark.parametrize("shared", [False, True], ids=["socket", "shared memory"])
def test_rows_lie_with_storage_servers_and_arrive_with_the_same_bytes(home, client, shared):
    """Every type, in turn at two owners; taken, read, filtered, and asked for in SQL."""
    columns = tuple(
        Column(name=name, type=array.type, meaning="a value", nullable=True)
        for name, array in COLUMNS.items()
    )
    client.create_table(
        TableSpec(name="types", columns=columns, consumers=(ConsumerSpec(name="c", columns=tuple(COLUMNS)),))
    )
    table = pa.table(COLUMNS)
    expected = {name: digest(pa.chunked_array([array, array])) for name, array in COLUMNS.items()}
    with QueueClient(home[0], identity="user", deadline_s=DEADLINE_S, shared_memory=shared) as user:
        for tag in ("a", "b"):
            uids = pa.array([f"{tag}-{row}" for row in range(table.num_rows)])
            user.put("types", pa.concat_tables([table.append_column("uid", uids)]))
            assert user.storage_servers()
            # A client that has asked nothing yet and puts less than a megabyte goes to the coordinator.
            user.put("types", pa.table({"uid": [f"small-{tag}"], "int": pa.array([1], pa.int64())}))
        found = user.read("types", filter={"column": "uid", "op": "in", "value": [*_uids("a"), *_uids("b")]})
        assert {name: digest(found[name]) for name in COLUMNS} == expected
        lease = user.take("types", "c", max_rows=2 * table.num_rows + 2)
        lease.table.validate(full=True)
        assert lease.table.column_names == ["row_id", "uid", "group_id", "attempt", *COLUMNS]
        rest = lease.table.filter(pc.invert(pc.starts_with(lease.table["uid"], "small")))
        assert {name: digest(rest[name]) for name in COLUMNS} == expected
        some = user.read("types", columns=["binary"], filter={"column": "binary", "op": "is_null"})
        assert some["uid"].to_pylist() == [
            uid
            for uid, value in zip(
                lease.table["uid"].to_pylist(), lease.table["binary"].to_pylist(), strict=True
            )
            if value is None
        ]
    assert sum(rows_at(client).values()) == 2 * table.num_rows
    assert client.stats("types")["remote_bytes"] > 1_000_000


def _uids(tag: str) -> list[str]:
    return [f"{tag}-{row}" for row in range(len(COLUMNS["int"]))]


def test_producers_write_to_storage_servers_in_turn_and_what_is_finished_is_freed(client):
    """The coordinator keeps keys and numbers; an ack frees the values."""
    client.create_table(spec())
    for tag in "abcd":
        client.put("rows", rows(*names(tag, 12)))
    assert sorted(rows_at(client).values()) == [24, 24]
    stats = client.stats("rows")
    assert stats["bytes"] < 5_000
    assert stats["remote_bytes"] == pytest.approx(48 * ROW_BYTES, rel=0.01)
    lease = client.take("rows", "c", max_rows=48)
    assert lease.table["uid"].to_pylist() == [uid for tag in "abcd" for uid in names(tag, 12)]
    check(lease.table)
    assert client.ack("rows", "c", lease_id=lease.lease_id) == 48
    assert client.stats("rows")["remote_bytes"] == 0
    until(lambda: [each["used_bytes"] for each in client.storage_servers()] == [0, 0])


def test_parts_of_a_row_lie_with_different_owners(client):
    """Each writer's part goes where its put went; a row is put together from all of them, what has not come is null."""
    client.create_table(spec())
    uids = names("a", 12)
    client.put("rows", rows(*uids))
    client.put("rows", rows("small"))
    later = pa.table({"uid": uids[3:9], "y": values(*uids[3:9])})
    client.put("rows", later, writer="judge")
    client.put("rows", pa.table({"uid": uids[:2], "y": values(*uids[:2])}), writer="judge")
    found = client.read("rows")
    assert found["uid"].to_pylist() == [*uids, "small"]
    check(found)
    has_more = [uid in (*uids[3:9], *uids[:2]) for uid in found["uid"].to_pylist()]
    assert found["y"].is_valid().to_pylist() == has_more
    check(found.filter(pa.array(has_more)), "y")
    assert client.put("rows", later, writer="judge").num_duplicates == 6
    until(lambda: sum(each["num_rows"] for each in client.storage_servers()) == 12 + 1 + 6 + 2)


def test_a_put_of_many_batches_is_acknowledged_once(client):
    """Each storage server says in one word what it has of it; the rows keep their order."""
    client.create_table(spec())
    uids = names("a", 240)
    done = client.put("rows", rows(*uids))
    assert done.row_ids == tuple(range(240))
    assert sum(rows_at(client).values()) == 240
    assert min(rows_at(client).values()) > 50
    found = client.read("rows")
    assert found["uid"].to_pylist() == uids
    check(found)
    assert client.put("rows", rows(*names("a", 50))).num_duplicates == 50


def test_open_streams_go_through_the_coordinator(client):
    """Rows put on a stream stay with it; rows taken on one are whole, wherever they lie."""
    client.create_table(spec())
    client.put("rows", rows(*names("a", 12)))
    with client.open_put("rows") as stream:
        assert stream.put(rows(*names("b", 12))).row_ids == tuple(range(12, 24))
    client.put("rows", rows(*names("c", 12)))
    assert sum(rows_at(client).values()) == 24
    lease, uids = None, []
    with client.open_take("rows", "c") as stream:
        for _ in range(3):
            lease = stream.take(max_rows=12, ack=lease)
            check(lease.table)
            uids += lease.table["uid"].to_pylist()
        stream.ack(lease)
    assert uids == [*names("a", 12), *names("b", 12), *names("c", 12)]
    until(lambda: [each["used_bytes"] for each in client.storage_servers()] == [0, 0])


def test_a_take_finishes_the_rows_before_wherever_they_lie(client):
    """In one call; the owners free them."""
    client.create_table(spec())
    client.put("rows", rows(*names("a", 12)))
    first = client.take("rows", "c", max_rows=8)
    second = client.take("rows", "c", max_rows=8, ack=first)
    check(second.table)
    assert (second.table.num_rows, client.stats("rows")["rows"]) == (4, 4)
    until(lambda: sum(each["num_rows"] for each in client.storage_servers()) == 4)


def test_a_plan_is_fetched_by_rank_from_several_owners(client):
    """Balanced by the sizes of values that the coordinator has not."""
    client.create_table(spec(consumers=(ConsumerSpec(name="c", columns=("x",)),)))
    for tag in "abc":
        client.put("rows", rows(*names(tag, 12)))
    order = {"step": 0, "num_ranks": 2, "max_rows": 36}
    plan = client.plan("rows", "c", **order, balance=["x"], max_tokens_per_micro_batch=4 * ROW_BYTES)
    assert (plan.sizes, plan.num_micro_batches) == ([18 * ROW_BYTES] * 2, 5)
    for rank in range(2):
        part = client.fetch("rows", plan.plan_id, rank, columns=["x"])
        assert part["row_id"].to_pylist() == [row for batch in plan.row_ids[rank] for row in batch]
        check(part)
        check(client.fetch("rows", plan.plan_id, rank, micro_batch=1))
    assert client.ack("rows", "c", lease_id=plan.plan_id, step=0) == 36


def test_who_knows_nothing_of_storage_servers_gets_whole_rows(client, home):
    """A subscription, SQL, and a plain take: the coordinator fetches for them."""
    pytest.importorskip("duckdb")
    client.create_table(spec())
    client.put("rows", rows(*names("a", 12)))
    client.put("rows", rows(*names("b", 12)))
    assert client.sql("select sum(len(x)) as bytes from rows").to_pylist() == [{"bytes": 24 * ROW_BYTES}]
    with client.subscribe("rows", "c", max_rows=12) as subscription:
        lease = subscription.next_lease()
        check(lease.table)
        assert lease.ack() == 12
    with paflight.FlightClient(home[0]) as plain:
        ticket = paflight.Ticket(b'{"verb": "take", "table": "rows", "consumer": "c", "max_rows": 99}')
        reader = plain.do_get(ticket, paflight.FlightCallOptions(timeout=DEADLINE_S))
        taken = pa.Table.from_batches([chunk.data for chunk in reader], reader.schema)
    assert taken["uid"].to_pylist() == names("b", 12)
    check(taken)


def test_a_plain_flight_client_reads_every_endpoint(client, home):
    """One endpoint an owner with its location; rows that are in no one place come from the coordinator."""
    client.create_table(spec())
    for tag in "ab":
        client.put("rows", rows(*names(tag, 12)))
    client.put("rows", pa.table({"uid": names("a", 3), "y": values(*names("a", 3))}), writer="judge")
    with ExitStack() as stack:
        plain = stack.enter_context(paflight.FlightClient(home[0]))
        info = plain.get_flight_info(paflight.FlightDescriptor.for_path("rows"))
        assert (info.total_records, len(info.endpoints)) == (24, 3)
        found, places = [], []
        for endpoint in info.endpoints:
            location = endpoint.locations[0].uri.decode() if endpoint.locations else home[0]
            places.append(location)
            server = stack.enter_context(paflight.FlightClient(location))
            reader = server.do_get(endpoint.ticket, paflight.FlightCallOptions(timeout=DEADLINE_S))
            found.append(pa.Table.from_batches([chunk.data for chunk in reader], reader.schema))
            assert found[-1].schema.equals(info.schema.remove_metadata())
    assert set(places) == {home[0], *home[1]}
    whole = pa.concat_tables(found).sort_by("row_id")
    assert whole["uid"].to_pylist() == [*names("a", 12), *names("b", 12)]
    assert whole["group_id"].to_pylist() == whole["uid"].to_pylist()
    check(whole)
    assert whole["y"].null_count == 21


def test_a_table_that_is_altered_follows_its_owners(client):
    """Storage servers hear of new columns by the first batch that has them; what a consumer mixes by stays here."""
    client.create_table(spec())
    client.put("rows", rows(*names("a", 12)))
    source = Column(name="source", type=pa.string(), meaning="where from", nullable=True)
    mixed = ConsumerSpec(
        name="m", columns=("source", "x"), mix=MixSpec(column="source", weights={"web": 1.0})
    )
    more = Column(name="z", type=LISTS, meaning="new", nullable=True)
    client.alter_table("rows", columns=[source, more], consumers=[mixed])
    after = rows(*names("b", 12)).append_column("source", pa.array(["web"] * 12))
    client.put("rows", after.append_column("z", values(*names("b", 12))))
    lease = client.take("rows", "m", max_rows=24, columns=["source", "x", "z"])
    assert Counter(lease.table["source"].to_pylist()) == {"web": 12, None: 12}
    check(lease.table)
    check(lease.table.filter(lease.table["z"].is_valid()), "z")
    assert sum(rows_at(client).values()) == 24


def test_what_does_not_fit_is_refused_by_the_storage_server_and_leaves_nothing(client):
    """A wrong type, a null where none may be, and a uid twice, which only the coordinator finds."""
    client.create_table(spec())
    client.put("rows", rows(*names("a", 12)))
    with pytest.raises(SchemaMismatchError, match="column 'x': expected list<item: uint8>, got"):
        client.put(
            "rows", pa.table({"uid": ["b"], "n": pa.array([1]), "x": values("b").cast(pa.list_(pa.int16()))})
        )
    nulls = pa.concat_arrays([values("b", "c"), pa.nulls(1, LISTS)])
    with pytest.raises(SchemaMismatchError, match="column 'x': expected no nulls, got 1 in 3 rows"):
        client.put("rows", pa.table({"uid": ["b", "c", "d"], "n": pa.array([1, 2, 3]), "x": nulls}))
    with pytest.raises(InvalidRequestError, match="uid must be unique inside a batch, got 'b' twice"):
        client.put("rows", rows("b", "b"))
    assert sum(rows_at(client).values()) == 12
    until(lambda: sum(each["used_bytes"] for each in client.storage_servers()) < 13 * ROW_BYTES)


def test_command_line_lists_storage_servers(home, client):
    """`stats` without a table, for people and for programs; `ls` is as ever."""
    client.create_table(spec())
    client.put("rows", rows(*names("a", 12)))
    flight = [sys.executable, "-m", "flight"]

    def run(*words: str) -> str:
        command = [*flight, *words, "--uri", home[0]]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout

    found = json.loads(run("stats", "--json"))
    assert {each["location"]: each["num_rows"] for each in found["@storage"]} == rows_at(client)
    assert set(found) == {"rows", "@storage"}
    text = run("stats")
    assert all(location in text for location in home[1])
    assert "storage" not in run("ls")


def test_a_location_that_the_coordinator_does_not_reach_is_refused(home):
    """Rather than rows that nobody can read."""
    command = [sys.executable, "-m", "flight", "serve", "--storage", home[0], "--port", "0"]
    done = subprocess.run(
        [*command, "--location", "grpc://127.0.0.1:1"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "location must be an address at which the coordinator reaches the storage server" in done.stderr
