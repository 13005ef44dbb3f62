"""A server with keys and its storage servers: they know each other, and clients, by the same keys."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack

import msgspec
import pyarrow as pa
import pyarrow.flight as paflight
import pytest

from flight import messages as m
from flight.security.keys import Wanted, make_keys
from flight.storage.messages import (
    RegisterCommand,
    StorageBeat,
    StorageJoin,
    StorageLeave,
    ValuesTicket,
)
from tests.kit.secured import Secured, secured_server
from tests.kit.server import storage_server
from tests.kit.storage import check, names, rows, spec, until

GRANTS = {
    "admin": {"*": ["admin"]},
    "producer": {"rows": ["produce"]},
    "consumer": {"rows": ["consume"]},
    "other": {"others": ["produce", "read", "consume"]},
    "storage": {"*": ["store"]},
}
UIDS = names("a", 16)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A coordinator, a storage server that has joined it and holds 16 rows, and two tables."""
    with ExitStack() as stack:
        server = stack.enter_context(secured_server(tmp_path_factory.mktemp("storage"), GRANTS))
        location, process = stack.enter_context(
            storage_server(server.uri, "--keys", str(server.keys), "--port", "0")
        )
        with server.client("admin") as admin:
            for name in ("rows", "others"):
                admin.create_table(spec(name))
            with server.client("producer") as producer:
                producer.put("rows", rows(*UIDS))
            [owner] = admin.storage_servers()
            assert (owner["location"], owner["num_rows"]) == (location, len(UIDS))
        yield server, Secured(location, server.keys, process)


def token_of(server: Secured, name: str) -> str:
    """Return a principal's token."""
    return (server.keys / name / "token").read_text().strip()


def schema() -> bytes:
    """Return the schema of the values that are asked for."""
    return pa.schema([("x", pa.list_(pa.uint8()))]).serialize().to_pybytes()


def values_of(storage: Secured, name: str, table: str) -> pa.Table:
    """Ask a storage server for its rows by their numbers, as a principal, past our client."""
    ticket = ValuesTicket(arrow_schema=schema(), runs=[(0, 16)], row_ids=[(0, 16)], table=table)
    with storage.plain(storage.keys / name, token_of(storage, name)) as client:
        return client.do_get(paflight.Ticket(m.encode(ticket))).to_reader().read_all()


def code_of(call) -> str:
    """Return the code with which a call by pyarrow's own client is refused."""
    with pytest.raises((paflight.FlightError, pa.ArrowException, OSError)) as caught:
        call()
    return msgspec.json.decode(getattr(caught.value, "extra_info", b"")).get("code", "")


def test_rows_go_to_and_come_from_a_storage_server_with_keys(home):
    """Producers put to it, consumers take from it, and the coordinator fetches for those who do not."""
    server, _ = home
    with server.client("consumer") as consumer, server.client("admin") as admin:
        lease = consumer.take("rows", "c", max_rows=16)
        assert lease.table.column("uid").to_pylist() == UIDS
        check(lease.table)
        check(admin.read("rows"))
        assert admin.sql("select sum(len(x)) as n from rows").to_pylist() == [{"n": 1_600_000}]


def test_flight_info_leads_any_client_of_the_table_to_the_values(home):
    """Its endpoints say whose rows they are, so the role on that table is enough."""
    server, storage = home
    with server.plain(server.keys / "consumer", token_of(server, "consumer")) as client:
        info = client.get_flight_info(paflight.FlightDescriptor.for_path("rows"))
    [endpoint] = [each for each in info.endpoints if each.locations]
    with storage.plain(storage.keys / "consumer", token_of(storage, "consumer")) as client:
        check(client.do_get(endpoint.ticket).to_reader().read_all())


def test_values_of_another_table_are_not_found_by_guessing_their_numbers(home):
    """Naming the table takes a role on it, naming another finds nothing, naming none takes a role on all."""
    _, storage = home
    assert values_of(storage, "consumer", "rows").num_rows == 16
    assert values_of(storage, "other", "others").num_rows == 0
    for name, table in (("other", "rows"), ("other", ""), ("consumer", ""), ("producer", "rows")):
        assert code_of(lambda name=name, table=table: values_of(storage, name, table)) == "access_denied"
    assert values_of(storage, "storage", "").num_rows == 16


def test_put_to_a_storage_server_takes_the_role_on_the_table(home):
    """It would be registered by the storage server, which may do so for every table."""
    _, storage = home
    command = m.PutCommand(table="rows", writer="", identity="x")
    table = rows("z")

    def put(name: str) -> None:
        with storage.plain(storage.keys / name, token_of(storage, name)) as client:
            descriptor = paflight.FlightDescriptor.for_command(m.encode(command))
            writer, reader = client.do_put(descriptor, table.schema)
            try:
                writer.write_table(table)
                writer.done_writing()
                reader.read()
            finally:
                writer.close()

    assert code_of(lambda: put("consumer")) == "access_denied"
    assert code_of(lambda: put("other")) == "access_denied"


@pytest.mark.parametrize("token", ["missing", "wrong"])
def test_storage_server_tells_a_stranger_nothing(home, token):
    """Neither values, nor how many there are, nor its actions."""
    _, storage = home
    with storage.plain(storage.keys / "consumer", {"missing": None, "wrong": "x" * 43}[token]) as client:
        ticket = ValuesTicket(arrow_schema=schema(), runs=[(0, 16)], row_ids=[(0, 16)])
        calls = (
            lambda: client.do_get(paflight.Ticket(m.encode(ticket))).read_chunk(),
            lambda: list(client.do_action("ping")),
            lambda: list(client.do_action("shared_memory")),
        )
        assert [code_of(call) for call in calls] == ["unauthenticated"] * 3
        with pytest.raises(
            (paflight.FlightError, pa.ArrowException), match=r"bearer token must (come|be known)"
        ):
            client.list_actions()


def test_shared_memory_of_a_storage_server_is_for_those_who_may_read_all(home):
    """As that of the coordinator."""
    _, storage = home
    offers = {}
    for name in ("admin", "consumer"):
        with storage.plain(storage.keys / name, token_of(storage, name)) as client:
            [offer] = client.do_action("shared_memory")
            offers[name] = json.loads(offer.body.to_pybytes())
    assert offers["consumer"] is None
    assert len(offers["admin"]["ticket"]) == 32


@pytest.mark.parametrize(
    ("action", "request_"),
    [
        ("storage_join", StorageJoin(location="grpc+tls://127.0.0.1:1")),
        ("storage_beat", StorageBeat(owner=1, used_bytes=0)),
        ("storage_leave", StorageLeave(owner=1)),
    ],
)
@pytest.mark.parametrize("name", ["producer", "consumer", "other"])
def test_only_storage_servers_may_say_that_they_are_one(home, action, request_, name):
    """Anybody else could have rows sent to them, or have them all lost."""
    server, _ = home
    with server.plain(server.keys / name, token_of(server, name)) as client:
        assert code_of(lambda: list(client.do_action(paflight.Action(action, m.encode(request_))))) == (
            "access_denied"
        )


def test_only_storage_servers_may_register_rows(home):
    """A producer could otherwise point at values of another table."""
    server, _ = home
    command = RegisterCommand(table="rows", owner=1, identity="x")
    with server.plain(server.keys / "producer", token_of(server, "producer")) as client:

        def register() -> None:
            descriptor = paflight.FlightDescriptor.for_command(m.encode(command))
            writer, reader = client.do_put(descriptor, rows("q").schema)
            try:
                writer.done_writing()
                reader.read()
            finally:
                writer.close()

        assert code_of(register) == "access_denied"


def test_storage_server_in_the_clear_cannot_join(home):
    """Its clients would have to send their tokens there."""
    server, storage = home
    with server.plain(server.keys / "storage", token_of(server, "storage")) as client:
        location = storage.uri.replace("grpc+tls", "grpc")
        action = paflight.Action("storage_join", m.encode(StorageJoin(location=location)))
        with pytest.raises(paflight.FlightServerError, match="a token is never sent in the clear"):
            list(client.do_action(action))


def test_storage_server_without_the_keys_of_its_coordinator_does_not_start(home, tmp_path, capfd):
    """With none it is not let in; with those of another authority neither trusts the other."""
    server, _ = home
    make_keys(tmp_path / "foreign", [Wanted(name="storage", grants={"*": ["store"]})], hosts=["127.0.0.1"])
    (tmp_path / "no-storage").mkdir(mode=0o700)
    shutil.copytree(server.keys / "server", tmp_path / "no-storage" / "server")
    shutil.copy(server.keys / "access.json", tmp_path / "no-storage")
    for words, message in (
        ([], "a server must answer at"),
        (["--keys", str(tmp_path / "foreign")], "a server must answer at"),
        (["--keys", str(tmp_path / "no-storage")], "keys must be there of a principal 'storage'"),
    ):
        with pytest.raises(RuntimeError, match="first line"), storage_server(server.uri, *words):
            pass
        assert message in capfd.readouterr().err


def test_storage_server_beyond_loopback_needs_keys(home, capfd):
    """As every server; there is a way out."""
    server, _ = home
    with pytest.raises(RuntimeError, match="first line"), storage_server(server.uri, "--host", "0.0.0.0"):
        pass
    assert "host must be a loopback address without --keys, got '0.0.0.0'" in capfd.readouterr().err


def test_revoked_client_reads_no_more_values(home):
    """The access file is the coordinator's: taking a token out of it closes both doors."""
    server, storage = home
    assert values_of(storage, "consumer", "rows").num_rows == 16
    before = (server.keys / "access.json").read_bytes()
    server.edit("consumer", grants=None)
    try:
        until(lambda: _is_refused(storage))
    finally:
        draft = server.keys / "access.back"
        draft.touch(0o600)
        draft.write_bytes(before)
        draft.replace(server.keys / "access.json")
    with server.client("admin") as admin:
        assert admin.read("rows").num_rows == 16


def _is_refused(storage: Secured) -> bool:
    try:
        values_of(storage, "consumer", "rows")
    except (paflight.FlightError, pa.ArrowException) as error:
        return "bearer token must be known" in str(error)
    return False
