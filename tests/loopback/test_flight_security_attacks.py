"""A server with keys under attack: replay, floods, huge and broken payloads; and new keys while it serves."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pyarrow as pa
import pyarrow.flight as paflight
import pytest

from flight.client import QueueClient
from flight.errors import (
    DeadlineExceededError,
    FlightQueueError,
    InvalidRequestError,
    UnauthenticatedError,
    UnavailableError,
)
from flight.schema import Column, ConsumerSpec, TableSpec
from flight.security.keys import Wanted, make_keys
from tests.kit.recorder import Recorder, replay
from tests.kit.secured import Secured, secured_server

GRANTS = {"admin": {"*": ["admin"]}, "guest": {"rows": ["read"]}, "leaver": {"*": ["consume"]}}
SPEC = TableSpec(
    name="rows",
    columns=(Column(name="text", type=pa.string(), meaning="a word"),),
    consumers=(ConsumerSpec(name="c", columns=("text",)),),
)
NUM_IDLE = 300
NUM_TLS = 60
SILENCE_S = 0.5
CHANGED_S = 20.0


def row(uid: str) -> pa.Table:
    """Return a row."""
    return pa.table({"uid": [uid], "text": [f"words of {uid}"]})


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with a table of one row."""
    with secured_server(tmp_path_factory.mktemp("attacked"), GRANTS) as found:
        with found.client("admin", shared_memory=False) as admin:
            admin.create_table(SPEC)
            admin.put("rows", row("first"))
        yield found


@pytest.fixture
def unharmed(server):
    """Check afterwards that the server is the same process and serves who may be served."""
    yield server
    assert server.process.poll() is None
    with server.client("guest") as guest:
        assert guest.read("rows").column("uid").to_pylist()[0] == "first"


# ---- replay -----------------------------------------------------------------------------------------------------


def test_recorded_bytes_hold_no_secret_and_change_nothing_when_sent_again(unharmed):
    """The keys of a TLS session die with it: the same bytes open no second one."""
    recorded: list[bytes] = []
    token = (unharmed.keys / "admin" / "token").read_bytes().strip()
    with Recorder(unharmed.uri, recorded) as port:
        near = Secured(f"grpc+tls://127.0.0.1:{port}", unharmed.keys, unharmed.process)
        with near.client("admin", shared_memory=False) as admin:
            admin.put("rows", row("recorded"))
    said = b"".join(recorded)
    assert len(said) > 1000
    assert [each for each in (token, b"Bearer", b"rows", b"recorded") if each in said] == []
    with unharmed.client("admin") as admin:
        before = admin.stats("rows")
        answer = replay(unharmed.port, recorded, silence_s=SILENCE_S)
        assert admin.stats("rows") == before
    assert b"rows" not in answer


# ---- floods -----------------------------------------------------------------------------------------------------


def test_idle_connections_do_not_keep_clients_out(unharmed):
    """Hundreds that say nothing, in TCP and after a TLS handshake, while a client puts and takes."""
    context = ssl.create_default_context(cafile=str(unharmed.keys / "guest" / "roots.pem"))
    context.load_cert_chain(unharmed.keys / "guest" / "certificate.pem", unharmed.keys / "guest" / "key.pem")
    context.set_alpn_protocols(["h2"])
    address = ("127.0.0.1", unharmed.port)
    with ExitStack() as stack:
        for _ in range(NUM_IDLE):
            stack.enter_context(socket.create_connection(address, 10.0))
        for _ in range(NUM_TLS):
            plain = stack.enter_context(socket.create_connection(address, 10.0))
            stack.enter_context(context.wrap_socket(plain, server_hostname="127.0.0.1"))
        with unharmed.client("admin") as admin:
            for number in range(20):
                assert admin.put("rows", row(f"flood-{number}")).num_rows == 1
            assert admin.read("rows").num_rows > 20


def test_flood_of_refused_calls_fills_no_log(unharmed):
    """Refusals are counted beyond fifty a second, and others are served meanwhile."""
    home = unharmed.mixed("guest", token=None)

    def knock(_: int) -> int:
        refused = 0
        with unharmed.plain(home, "x" * 43) as client:
            for _ in range(100):
                with suppress(paflight.FlightUnauthenticatedError):
                    list(client.do_action("ping"))
                    continue
                refused += 1
        return refused

    with unharmed.client("guest") as guest, ThreadPoolExecutor(4) as pool:
        knocks = pool.map(knock, range(4))
        while_flooded = [guest.list_tables() for _ in range(20)]
        assert sum(knocks) == 400
    assert while_flooded == [["rows"]] * 20
    events = [json.loads(line) for line in (unharmed.keys / "audit.jsonl").read_text().splitlines()]
    written = [each for each in events if each["event"] == "unauthenticated"]
    seconds = {each["time"][:19] for each in written}
    assert len(written) <= 60 * (len(seconds) + 1)


# ---- payloads ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(5000),
        bytes(range(256)) * 400,
        b"\x16\x03\x01\xff\xff" + b"\xff" * 65_000,
    ],
    ids=["http", "http2", "bytes", "handshake"],
)
def test_bytes_that_are_no_tls_get_no_answer_of_ours(unharmed, data):
    """At most an alert of TLS."""
    answer = replay(unharmed.port, [data], silence_s=SILENCE_S)
    assert len(answer) < 64
    assert b"rows" not in answer


def test_huge_and_odd_tokens_are_refused(unharmed):
    """As headers they are bounded by gRPC; none is a word of a format or a path."""
    home = unharmed.keys / "guest"
    for token in (
        "x" * 1_000_000,
        "{0.__class__}",
        "%s%n",
        "../admin/token",
        "'; drop table rows --",
        "\u00ff",
    ):
        with (
            unharmed.plain(home, token) as client,
            pytest.raises((paflight.FlightError, pa.ArrowException, OSError, UnicodeError)),
        ):
            list(client.do_action("ping", paflight.FlightCallOptions(timeout=10.0)))


BIG = b'{"table":"' + b"a" * (17 << 20) + b'"}'


def test_oversized_message_is_refused_before_and_after_authentication(unharmed):
    """Before it for want of a token, after it for its size."""
    home = unharmed.keys / "guest"
    action = paflight.Action("describe", BIG)
    with unharmed.plain(home, "x" * 43) as client, pytest.raises(paflight.FlightUnauthenticatedError):
        list(client.do_action(action))
    token = (home / "token").read_text().strip()
    with unharmed.plain(home, token) as client:
        with pytest.raises(
            paflight.FlightServerError, match=f"must be at most 16777216 bytes, got {len(BIG)}"
        ):
            list(client.do_action(action))
        with pytest.raises(paflight.FlightServerError, match="must be at most 16777216 bytes"):
            client.do_get(paflight.Ticket(BIG))


@pytest.mark.parametrize(
    "name", ["../secrets", "/etc/passwd", "a\x00b", "{0}", "%s", "$(id)", "`id`", "*", ""]
)
def test_table_name_reaches_no_path_and_no_shell(unharmed, name):
    """It is looked up in a dictionary, or refused where a table is made."""
    with unharmed.client("admin") as admin:
        for call in (admin.describe, admin.truncate_table, admin.stats):
            with pytest.raises(FlightQueueError):
                call(name)
        with pytest.raises((FlightQueueError, ValueError)):
            admin.create_table(TableSpec(name=name, columns=SPEC.columns, consumers=SPEC.consumers))
        assert admin.list_tables() == ["rows"]


def test_pickled_object_in_data_stays_bytes(unharmed):
    """What would run a command if it were unpickled comes back as it was put."""
    bomb = b"cposix\nsystem\n(S'touch /tmp/relax-was-here'\ntR."
    with unharmed.client("admin") as admin:
        admin.create_table(
            TableSpec(
                name="bytes",
                columns=(Column(name="data", type=pa.binary(), meaning="anything"),),
                consumers=SPEC.consumers[:0],
            )
        )
        admin.put("bytes", pa.table({"uid": ["a"], "data": [bomb]}))
        assert admin.read("bytes").column("data").to_pylist() == [bomb]
        for query in (
            f"select '{bomb.hex()}'",
            "select * from read_text('/etc/passwd')",
            "copy rows to '/tmp/x'",
        ):
            with suppress(InvalidRequestError):
                assert "root:" not in str(admin.sql(query).to_pylist())
        admin.drop_table("bytes")


# ---- while streams are open -------------------------------------------------------------------------------------


def test_revoked_subscriber_and_waiting_taker_get_no_more_rows(unharmed):
    """What was pushed and not acked goes to others."""
    with (
        unharmed.client("leaver") as client,
        unharmed.client("admin") as admin,
        ThreadPoolExecutor(1) as pool,
    ):
        admin.create_table(TableSpec(name="left", columns=SPEC.columns, consumers=SPEC.consumers))
        waiting = pool.submit(client.take, "left", "c", max_rows=1000, min_rows=1000, deadline_s=60.0)
        subscription = client.subscribe("left", "c", max_rows=1, heartbeat_s=0.3)
        unharmed.edit("leaver", grants=None)
        with pytest.raises(FlightQueueError):
            _until(lambda: client.ping())
        with pytest.raises((DeadlineExceededError, UnauthenticatedError)):
            waiting.result(CHANGED_S)
        admin.put("left", row("kept"))
        with pytest.raises(FlightQueueError):
            list(subscription)
        with suppress(FlightQueueError):
            subscription.close()
        lease = admin.take("left", "c", max_rows=1, deadline_s=CHANGED_S)
        assert lease.table.column("uid").to_pylist() == ["kept"]
        admin.drop_table("left")


def _until(call: Callable[[], object]) -> None:
    """Call until it fails, or for long enough that it should have."""
    end = time.monotonic() + CHANGED_S
    while time.monotonic() < end:
        call()


# ---- new keys ---------------------------------------------------------------------------------------------------


@pytest.fixture
def renewed(tmp_path):
    """A server of one's own, and other keys for it."""
    with secured_server(tmp_path, GRANTS) as found:
        make_keys(
            tmp_path / "new",
            [Wanted(name=name, grants=tables) for name, tables in GRANTS.items()],
            hosts=["127.0.0.1"],
        )
        yield found, tmp_path / "new"


def test_new_certificates_are_used_while_an_open_stream_goes_on(renewed):
    """A new authority even: who came before stays, who comes now needs its certificates; the tokens stay."""
    server, new = renewed
    now = server.mixed("guest", certificate=new / "guest", key=new / "guest", roots=new / "guest")
    with server.client("admin") as admin:
        admin.create_table(SPEC)
        with admin.open_put("rows") as puts:
            puts.put(row("before"))
            # The certificate without its key is what a look in between sees, and is not used.
            shutil.copy(new / "server" / "certificate.pem", server.keys / "server" / "certificate.pem")
            server.process.send_signal(signal.SIGHUP)
            _for(1.5, lambda: puts.put(row("during")))
            with server.client("guest", deadline_s=5.0) as old:
                assert old.list_tables() == ["rows"]
            for name in ("key.pem", "roots.pem"):
                shutil.copy(new / "server" / name, server.keys / "server" / name)
            with server.client("guest", now) as client:
                _until_answered(client)
                puts.put(row("after"))
                assert client.read("rows").column("uid").to_pylist() == ["before", "during", "after"]
            with server.client("guest", deadline_s=5.0) as late, pytest.raises(UnavailableError):
                late.list_tables()
            puts.put(row("still"))
    assert server.process.poll() is None


def _for(seconds: float, call: Callable[[], object]) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        call()


def _until_answered(client: QueueClient) -> None:
    end = time.monotonic() + CHANGED_S
    while True:
        try:
            client.ping()
        except UnavailableError:
            assert time.monotonic() < end, "nobody listens with the new certificate"
        else:
            return


def test_sighup_listens_anew_and_puts_that_run_meanwhile_arrive(renewed):
    """Each connection ends at a call's end and is made again."""
    server, _ = renewed
    with server.client("admin", shared_memory=False) as admin:
        admin.create_table(SPEC)
        is_over = threading.Event()

        def put_on() -> int:
            number = 0
            while not is_over.is_set():
                admin.put("rows", row(f"{number}"))
                number += 1
            return number

        with ThreadPoolExecutor(1) as pool:
            putting = pool.submit(put_on)
            for _ in range(2):
                server.process.send_signal(signal.SIGHUP)
                _for(1.3, admin.ping)
            is_over.set()
            num_put = putting.result(CHANGED_S)
        assert admin.stats("rows")["put"] == num_put


def test_server_without_mutual_tls_asks_for_the_token_alone(tmp_path):
    """For networks where certificates cannot be handed out."""
    with secured_server(tmp_path, GRANTS, "--no-mutual-tls") as server:
        home = server.mixed("guest", certificate=None, key=None)
        with server.client("guest", home) as client:
            assert client.list_tables() == []
        other = server.mixed("guest", token=None)
        with server.client("guest", other) as client, pytest.raises(UnauthenticatedError):
            client.list_tables()
        with (
            QueueClient(server.uri, identity="x", deadline_s=5.0) as client,
            pytest.raises(UnavailableError),
        ):
            client.list_tables()
