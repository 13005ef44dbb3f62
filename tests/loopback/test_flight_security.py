"""Who may do what on a server with keys: tokens, certificates, roles; and what a stranger hears, which is nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pyarrow.flight as paflight
import pytest

from flight.client import QueueClient
from flight.errors import (
    AccessDeniedError,
    FlightQueueError,
    InvalidRequestError,
    OverloadedError,
    UnauthenticatedError,
    UnavailableError,
)
from flight.schema import Column, ConsumerSpec, TableSpec, TicketSpec
from flight.security.keys import Wanted, make_keys
from tests.kit.pixels import pixels
from tests.kit.secured import secured_server

GRANTS = {
    "admin": {"*": ["admin"]},
    "writer": {"prompts": ["produce"]},
    "trainer": {"rollouts": ["consume"]},
    "viewer": {"prompts": ["read"]},
    "owner": {"mine": ["admin"]},
    "late": {"*": ["admin"]},
    "slow": {"*": ["read"]},
    "leaver": {"*": ["produce", "consume", "read"]},
    "nobody": {},
}
WORDS = (Column(name="text", type=pa.string(), meaning="a word"),)
PIXELS = Column(name="x", type=pa.list_(pa.uint8()), meaning="pixels")
ROWS = pa.table({"uid": ["a", "b"], "text": ["secret one", "secret two"]})
REVOKED_S = 10.0
TEXTS = {
    "bearer token": "unauthenticated",
    "must come with a certificate": "access_denied",
    "must have the right": "access_denied",
}
"""What errors without a code say."""


def spec(name: str, **changes) -> TableSpec:
    """Return a table of words that consumer `c` takes."""
    values = {"name": name, "columns": WORDS, "consumers": (ConsumerSpec(name="c", columns=("text",)),)}
    return TableSpec(**values | changes)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with two tables of two rows, and a principal of each kind."""
    past = datetime.now(UTC) - timedelta(seconds=1)
    changes = {"late": {"expires_at": past}, "slow": {"max_calls_per_s": 2.0}}
    with secured_server(tmp_path_factory.mktemp("secured"), GRANTS, **changes) as found:
        with found.client("admin") as admin:
            for name in ("prompts", "rollouts"):
                admin.create_table(spec(name))
                admin.put(name, ROWS)
        yield found


def audit(server) -> list[dict]:
    """Return the events of the audit log."""
    return [json.loads(line) for line in (server.keys / "audit.jsonl").read_text().splitlines()]


def code_of(call: Callable[[], object]) -> str:
    """Return the code of the error of a call by pyarrow's own client."""
    with pytest.raises((paflight.FlightError, pa.ArrowException, OSError)) as caught:
        call()
    detail = getattr(caught.value, "extra_info", b"")
    if detail:
        return json.loads(detail)["code"]
    # GetSchema's errors have no details (pyarrow 26).
    text = str(caught.value)
    assert "Traceback" not in text
    assert ".py" not in text
    return next((code for words, code in TEXTS.items() if words in text), text)


# ---- tokens -----------------------------------------------------------------------------------------------------


def exchange(client: paflight.FlightClient, command: bytes) -> None:
    """Open a stream, close it, and hear what the server has to say of it."""
    writer, reader = client.do_exchange(paflight.FlightDescriptor.for_command(command))
    try:
        writer.done_writing()
        list(reader)
    finally:
        writer.close()


def put(client: paflight.FlightClient, descriptor: paflight.FlightDescriptor) -> None:
    """Put rows as any Flight client does."""
    writer, _ = client.do_put(descriptor, ROWS.schema)
    try:
        writer.write_table(ROWS)
    finally:
        writer.close()


PATH = paflight.FlightDescriptor.for_path("prompts")
FACES: dict[str, Callable[[paflight.FlightClient], object]] = {
    "list_flights": lambda client: list(client.list_flights()),
    "get_flight_info": lambda client: client.get_flight_info(PATH),
    "get_schema": lambda client: client.get_schema(PATH),
    "list_actions": lambda client: client.list_actions(),
    "do_action": lambda client: list(client.do_action("ping")),
    "do_get": lambda client: client.do_get(paflight.Ticket(b'{"verb":"read","table":"prompts"}')).read_all(),
    "do_put": lambda client: put(client, PATH),
    "do_exchange": lambda client: exchange(
        client, b'{"verb":"take_stream","table":"prompts","consumer":"c"}'
    ),
}


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("token", ["missing", "wrong", "empty", "expired"])
def test_call_without_a_good_token_is_refused(server, token, face):
    """Whichever call it is, and before anything of it is looked at."""
    expired = (server.keys / "late" / "token").read_text().strip()
    shown = {"missing": None, "wrong": "x" * 43, "empty": "", "expired": expired}[token]
    with server.plain(server.keys / "late", shown) as client:
        assert code_of(lambda: FACES[face](client)) == "unauthenticated"


def test_handshake_and_other_schemes_open_no_door(server):
    """Names and passwords are not known here."""
    with server.plain(server.keys / "admin", None) as client:
        with pytest.raises((paflight.FlightError, pa.ArrowException)):
            client.authenticate_basic_token("admin", "admin")
        header = (b"authorization", b"Basic " + b"YWRtaW46YWRtaW4=")
        options = paflight.FlightCallOptions(headers=[header])
        assert code_of(lambda: list(client.do_action("ping", options))) == "unauthenticated"


def test_two_tokens_are_none(server):
    """They could mean two callers."""
    token = (server.keys / "admin" / "token").read_text().strip()
    options = paflight.FlightCallOptions(headers=[(b"authorization", f"Bearer {token}".encode())])
    with server.plain(server.keys / "admin", "x" * 43) as client:
        assert code_of(lambda: list(client.do_action("ping", options))) == "unauthenticated"


def test_our_client_raises_its_own_error_and_does_not_repeat_the_token(server):
    """An error may be logged."""
    home = server.mixed("admin", token=server.keys / "late")
    with server.client("admin", home) as client, pytest.raises(UnauthenticatedError) as caught:
        client.ping()
    assert (home / "token").read_text().strip() not in str(caught.value)


def test_client_sends_no_token_in_the_clear(server):
    """Not even once."""
    with pytest.raises(
        InvalidRequestError, match=r"uri must begin with grpc\+tls:// where there are credentials"
    ):
        QueueClient("grpc://127.0.0.1:1", identity="x", credentials=server.keys / "admin")


# ---- certificates -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def foreign(server):
    """Keys of another authority for the same names."""
    make_keys(server.keys.parent / "foreign", [Wanted(name="admin", grants={})], hosts=["127.0.0.1"])
    return server.keys.parent / "foreign"


def test_certificate_of_another_authority_is_refused(server, foreign):
    """Though the token is good."""
    home = server.mixed("admin", certificate=foreign / "admin", key=foreign / "admin")
    with server.client("admin", home) as client, pytest.raises(UnavailableError, match="of one authority"):
        client.ping()


def test_caller_without_a_certificate_is_refused(server):
    """Under mutual TLS the handshake fails."""
    home = server.mixed("admin", certificate=None, key=None)
    with server.client("admin", home) as client, pytest.raises(UnavailableError):
        client.ping()


def test_server_of_another_authority_gets_no_token(server, foreign):
    """The client looks at the server's certificate first."""
    with server.client("admin", foreign / "admin") as client, pytest.raises(UnavailableError):
        client.ping()


def test_token_with_the_certificate_of_another_principal_is_refused(server):
    """A token that was found is worth nothing without its owner's key."""
    home = server.mixed("viewer", token=server.keys / "admin")
    with server.client("admin", home) as client:
        for call in (client.ping, client.list_tables, lambda: client.read("prompts")):
            with pytest.raises(AccessDeniedError, match="must come with a certificate of its own name"):
                call()
    with server.plain(home, (home / "token").read_text().strip()) as plain:
        for name, face in FACES.items():
            assert code_of(lambda face=face: face(plain)) == "access_denied", name


def test_caller_in_plain_text_is_refused(server):
    """The port speaks TLS only."""
    with (
        QueueClient(f"grpc://127.0.0.1:{server.port}", identity="x", deadline_s=5.0) as client,
        pytest.raises(UnavailableError),
    ):
        client.ping()


# ---- roles ------------------------------------------------------------------------------------------------------

VERBS: dict[str, tuple[str, Callable[[QueueClient, str], object]]] = {
    "describe": ("look", lambda c, t: c.describe(t)),
    "stats": ("read", lambda c, t: c.stats(t)),
    "read": ("read", lambda c, t: c.read(t)),
    "dead": ("read", lambda c, t: c.read(t, state="dead")),
    "watch": ("read", lambda c, t: next(iter(c.watch_ticks(interval_s=1.0, tables=[t])))),
    "put": ("produce", lambda c, t: c.put(t, ROWS)),
    "open_put": ("produce", lambda c, t: _through(c.open_put(t), lambda puts: puts.put(ROWS))),
    "missing": ("produce", lambda c, t: c.missing(t, ["z"])),
    "seal": ("produce", lambda c, t: c.seal(t, expected_rows=2)),
    "take": ("consume", lambda c, t: c.take(t, "c", max_rows=1, deadline_s=0.0)),
    "open_take": (
        "consume",
        lambda c, t: _through(c.open_take(t, "c"), lambda takes: takes.take(max_rows=1, deadline_s=0.0)),
    ),
    "subscribe": ("consume", lambda c, t: _through(c.subscribe(t, "c", max_rows=1), lambda _: None)),
    "ack": ("consume", lambda c, t: c.ack(t, "c", lease_id="none")),
    "nack": ("consume", lambda c, t: c.nack(t, "c", lease_id="none", reason="x")),
    "renew": ("consume", lambda c, t: c.renew(t, "c", "none", 1.0)),
    "plan": ("consume", lambda c, t: c.plan(t, "c", step=0, num_ranks=1, max_rows=1, deadline_s=0.0)),
    "fetch": ("consume", lambda c, t: c.fetch(t, "none", 0)),
    "announce": ("consume", lambda c, t: c.announce(t, 1)),
    "create": ("admin", lambda c, t: c.create_table(spec(t))),
    "alter": ("admin", lambda c, t: c.alter_table(t)),
    "truncate": ("admin", lambda c, t: c.truncate_table(t)),
    "requeue": ("admin", lambda c, t: c.requeue(t, "c")),
    "set_max_staleness": ("admin", lambda c, t: c.set_max_staleness(t, 1)),
    "drop": ("admin", lambda c, t: c.drop_table(t)),
}
"""What a client can do to a table, and the right that it needs."""
MAY = {
    "writer": {"prompts": {"look", "produce"}},
    "trainer": {"rollouts": {"look", "consume"}},
    "viewer": {"prompts": {"look", "read"}},
    "owner": {},
    "nobody": {},
}


def _through(stream, use):
    with stream:
        return use(stream)


@pytest.mark.parametrize("name", MAY)
@pytest.mark.parametrize("verb", VERBS)
def test_principal_does_what_its_roles_say_and_no_more(server, name, verb):
    """Each verb on each table; what is refused says the same of a table that is not there."""
    right, call = VERBS[verb]
    with server.client(name) as client:
        for table in ("prompts", "rollouts", "absent"):
            try:
                call(client, table)
                refusal = None
            except FlightQueueError as error:
                refusal = error
            if right in MAY[name].get(table, ()):
                assert not isinstance(refusal, AccessDeniedError), table
            else:
                assert isinstance(refusal, AccessDeniedError), table
                assert str(refusal) == (
                    f"{name}: must have the right to {right} on table {table!r}, got none; "
                    "whoever runs the server grants it"
                )


def test_principal_without_a_role_sees_no_table(server):
    """Not by listing, not by statistics, not by SQL, not by their number."""
    with server.client("nobody") as client:
        assert client.list_tables() == []
        assert client.stats() == {}
        assert next(iter(client.watch_ticks(interval_s=1.0))) == []
        answers = set()
        for table in ("prompts", "absent"):
            with pytest.raises(InvalidRequestError) as caught:
                client.sql(f"select * from {table}")
            answers.add(str(caught.value).replace(table, "TABLE"))
        assert len(answers) == 1
        assert "prompts" not in answers.pop()
    with server.plain(
        server.keys / "nobody", (server.keys / "nobody" / "token").read_text().strip()
    ) as plain:
        assert list(plain.list_flights()) == []
        [pong] = plain.do_action("ping")
        assert json.loads(pong.body.to_pybytes())["tables"] == 0
        for face in (plain.get_schema, plain.get_flight_info):
            for table in ("prompts", "absent"):
                descriptor = paflight.FlightDescriptor.for_path(table)
                assert code_of(lambda face=face, descriptor=descriptor: face(descriptor)) == "access_denied"


def test_principal_sees_the_tables_of_its_roles_alone(server):
    """Names with any role, rows and numbers with the role to read."""
    with server.client("viewer") as viewer, server.client("writer") as writer:
        assert viewer.list_tables() == writer.list_tables() == ["prompts"]
        assert list(viewer.stats()) == ["prompts"]
        assert writer.stats() == {}
        assert viewer.sql("select count(*) as n from prompts").to_pylist() == [{"n": 2}]
        with pytest.raises(InvalidRequestError, match=r"table must be one of \['prompts'\], got 'rollouts'"):
            viewer.sql("select * from prompts, rollouts")


@pytest.mark.parametrize(
    "changes",
    [
        {"columns": (Column(name="text", type=pa.string(), meaning="a word", references="rollouts"),)},
        {"tickets": TicketSpec(table="rollouts", rows_per_ticket=1)},
    ],
)
def test_new_table_tells_nothing_of_hidden_ones(server, changes):
    """It may not refer to them."""
    with server.client("owner") as owner:
        with pytest.raises(AccessDeniedError, match="right to look on table 'rollouts'"):
            owner.create_table(spec("mine", **changes))
        owner.create_table(spec("mine"))
        owner.drop_table("mine")


def test_shared_memory_is_for_those_who_may_read_all(server):
    """Others get their rows over the stream."""
    with server.client("admin") as admin, server.client("leaver") as other:
        admin.create_table(
            spec("pixels", columns=(PIXELS,), consumers=(ConsumerSpec(name="c", columns=("x",)),))
        )
        other.put("pixels", pixels(4))
        assert other.read("pixels").num_rows == 4
        assert admin.read("pixels").num_rows == 4
        [offer] = (json.loads(each.body.to_pybytes()) for each in _offers(server, "leaver"))
        assert offer is None
        [offer] = (json.loads(each.body.to_pybytes()) for each in _offers(server, "admin"))
        assert len(offer["ticket"]) == 32
        admin.drop_table("pixels")


def _offers(server, name: str) -> list[paflight.Result]:
    with server.plain(server.keys / name, (server.keys / name / "token").read_text().strip()) as plain:
        return list(plain.do_action("shared_memory"))


def test_identity_belongs_to_its_principal(server):
    """Nobody can say that they are another."""
    with server.client("leaver") as client, server.client("admin") as admin:
        admin.create_table(spec("held"))
        admin.put("held", ROWS)
        client.identity = "admin"
        client.take("held", "c", max_rows=1, deadline_s=0.0)
        held = admin.stats("held")["consumers"]["c"]["leased_by"]
        admin.drop_table("held")
    assert held == {"leaver/admin": 1}


def test_calls_beyond_the_rate_are_refused(server):
    """Messages on an open stream count, too; others are not held up."""
    with server.client("slow") as slow, server.client("admin") as admin:
        outcomes = []
        for _ in range(6):
            try:
                slow.ping()
                outcomes.append("pong")
            except OverloadedError as error:
                outcomes.append(str(error))
            admin.ping()
    assert outcomes[0] == "pong"
    assert "slow: calls a second must be at most 2, got one more; call later" in outcomes


# ---- while it goes on -------------------------------------------------------------------------------------------


def test_token_taken_out_of_the_access_file_ends_calls_and_open_streams(server):
    """Within a second and without a restart; what was put before stays."""
    with server.client("leaver") as client, server.client("admin") as admin:
        admin.create_table(spec("leaving"))
        puts = client.open_put("leaving")
        takes = client.open_take("leaving", "c")
        assert puts.put(pa.table({"uid": ["kept"], "text": ["kept"]})).num_rows == 1
        server.edit("leaver", grants=None)
        refused = {
            "put stream": _until_refused(lambda n: puts.put(pa.table({"uid": [f"{n}"], "text": ["late"]}))),
            "take stream": _until_refused(lambda _: takes.take(max_rows=1, deadline_s=0.0)),
            "call": _until_refused(lambda _: client.ping()),
        }
        assert "kept" in admin.read("leaving").column("uid").to_pylist()
        admin.drop_table("leaving")
        for stream in (puts, takes):
            with suppress(FlightQueueError):
                stream.close()
    assert {name: type(error) for name, error in refused.items()} == dict.fromkeys(
        refused, UnauthenticatedError
    )


def _until_refused(call: Callable[[int], object]) -> FlightQueueError:
    end = time.monotonic() + REVOKED_S
    number = 0
    while time.monotonic() < end:
        try:
            call(number := number + 1)
        except FlightQueueError as error:
            return error
    raise AssertionError(f"still let in after {REVOKED_S} s and {number} calls")


def test_audit_log_tells_who_did_what_and_who_was_refused(server):
    """Who came, what was changed, what was denied with its reason, and never a token."""
    with server.client("viewer") as viewer, pytest.raises(AccessDeniedError):
        viewer.drop_table("prompts")
    with server.client("admin") as admin:
        admin.create_table(spec("noted"))
        admin.drop_table("noted")
    with server.plain(server.keys / "admin", "x" * 43) as client:
        code_of(lambda: list(client.do_action("ping")))
    events = audit(server)
    [created] = [
        each for each in events if each.get("tables") == ["noted"] and each["call"] == "create_table"
    ]
    assert (created["event"], created["principal"]) == ("allowed", "admin")
    assert created["peer"].startswith("ipv4:127.0.0.1:")
    denied = [each for each in events if each["event"] == "denied" and each.get("call") == "drop_table"][-1]
    assert (denied["principal"], denied["tables"]) == ("viewer", ["prompts"])
    assert denied["reason"].startswith("viewer: must have the right to admin on table 'prompts'")
    refused = [each for each in events if each["event"] == "unauthenticated"]
    assert refused[-1]["call"] == "do_action"
    text = (server.keys / "audit.jsonl").read_text()
    tokens = [path.read_text().strip() for path in server.keys.glob("*/token")]
    assert [token for token in [*tokens, "x" * 43] if token in text] == []


def test_void_gives_back_only_what_is_ones_own(tmp_path):
    """A member's leases go by its principal's own claim, or an admin's, for anybody."""
    grants = {"boss": {"*": ["admin"]}, "one": {"prompts": ["consume"]}, "two": {"prompts": ["consume"]}}
    with secured_server(tmp_path, grants) as found, found.client("boss") as boss:
        boss.create_table(spec("prompts"))
        boss.put("prompts", ROWS)
        with found.client("one") as one, found.client("two") as two:
            assert one.take("prompts", "c", max_rows=1).table.num_rows == 1
            assert two.void("one") == 0
            assert one.void("one") == 1
            assert two.take("prompts", "c", max_rows=1).table.num_rows == 1
        assert boss.void("two") == 1
