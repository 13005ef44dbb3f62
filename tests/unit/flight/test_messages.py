"""The protocol's messages: round trips, refusals, and bytes that must decode for ever."""

from __future__ import annotations

import msgspec
import pytest

from flight import messages as m
from flight.errors import BY_CODE, FlightQueueError, InvalidRequestError, SchemaMismatchError
from tests.kit.queues import prompts_spec, rollouts_spec


@pytest.mark.parametrize("spec", [prompts_spec(), rollouts_spec(2, "drop")])
def test_specification_survives_the_wire(spec):
    """A table described is a table created."""
    message = m.decode(m.encode(m.from_spec(spec)), m.CreateTable, what="test")
    assert m.to_spec(message) == spec


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "Input data was truncated"),
        (b"\xff\x00", "JSON is malformed"),
        (b'{"verb":"take"}', "Object missing required field `table`"),
        (b'{"verb":"steal","table":"t"}', "Invalid value 'steal'"),
        (b'{"verb":"read","table":"t","colums":["x"]}', "Object contains unknown field `colums`"),
        (b'{"verb":"read","table":7}', "Expected `str`, got `int`"),
        (b"[" * 100_000, "Expected `object`, got `array`"),
    ],
)
def test_malformed_message_is_refused_by_name(data, fault):
    """What was sent and what is wrong with it."""
    with pytest.raises(
        InvalidRequestError, match=r"ticket: must be a JSON message as in docs/protocol\.md, got: "
    ) as caught:
        m.decode(data, m.GetTicket, what="ticket")
    assert fault in str(caught.value)


def test_message_of_another_protocol_version_is_refused():
    """An old client learns that it is one."""
    with pytest.raises(InvalidRequestError) as caught:
        m.decode(b'{"v":2,"verb":"read","table":"t"}', m.GetTicket, what="ticket")
    assert (
        str(caught.value)
        == "ticket: protocol version v must be 1, got 2; use a client of the server's release"
    )


def test_message_over_the_limit_is_refused(monkeypatch):
    """The size is looked at before the content."""
    monkeypatch.setattr(m, "MAX_REQUEST_BYTES", 10)
    with pytest.raises(InvalidRequestError, match="ticket: must be at most 10 bytes, got 11"):
        m.decode(b" " * 11, m.GetTicket, what="ticket")


def test_old_bytes_still_decode():
    """Version 1 of the protocol, as written by the first client."""
    take = m.decode(b'{"verb":"take","table":"t","consumer":"c","max_rows":4}', m.GetTicket, what="ticket")
    assert take == m.TakeTicket(table="t", consumer="c", max_rows=4)
    put = m.decode(b'{"verb":"put","v":1,"identity":"me","table":"t","writer":"w"}', m.PutCommand, what="put")
    assert put == m.PutCommand(table="t", writer="w", identity="me")
    ack = m.decode(b'{"table":"t","consumer":"c","lease_id":"l","step":3}', m.Ack, what="ack")
    assert ack == m.Ack(table="t", consumer="c", lease_id="l", step=3)


def test_schema_that_is_no_arrow_schema_is_refused():
    """Garbage in a table's definition costs that request only."""
    message = m.CreateTable(table="t", arrow_schema=b"garbage", consumers=())
    with pytest.raises(
        InvalidRequestError, match="create_table t: arrow_schema must be an Arrow IPC schema, got: "
    ):
        m.to_spec(message)


def test_errors_come_back_as_themselves():
    """Every class of the tree has a code of its own and survives the wire."""
    for code, kind in BY_CODE.items():
        message, detail = m.error_detail(kind("what went wrong"))
        back = m.to_error(detail)
        assert type(back) is kind
        assert str(back) == message == "what went wrong"
        assert msgspec.json.decode(detail)["code"] == code
    assert m.to_error(b"not ours") is None
    assert m.to_error(None) is None
    assert type(m.to_error(b'{"code":"from_the_future","message":"x"}')) is FlightQueueError


def test_long_error_fits_into_a_trailer():
    """gRPC trailers hold 8 KB in all."""
    message, detail = m.error_detail(SchemaMismatchError("ü" * 100_000))
    assert len(message) + len(detail) < 8000


def test_request_always_says_its_version(monkeypatch):
    """So that a server of the next version can tell; a message without it is of version 1, whatever else it holds."""
    assert b'"v":1' in m.encode(m.ReadTicket(table="t"))
    monkeypatch.setattr(m, "PROTOCOL_VERSION", 2)
    assert m.decode(m.encode(m.ReadTicket(table="t")), m.GetTicket, what="ticket").v == 2
    for old in (b'{"verb":"read","table":"t"}', b'{"verb":"gone in version 2"}'):
        with pytest.raises(InvalidRequestError, match="protocol version v must be 2, got 1"):
            m.decode(old, m.GetTicket, what="ticket")
