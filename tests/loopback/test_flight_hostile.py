"""Nonsense at the Flight boundary: random messages, bit-flipped and truncated streams, lies about lengths.

Hostile Arrow streams are sent by gRPC itself, because Arrow's own client would not form them. After each storm the same
server process answers, its table is as it was, and nothing of its insides was shown.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Iterator

import grpc
import pyarrow as pa
import pyarrow.flight as paflight
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flight.client import QueueClient
from flight.errors import SchemaMismatchError
from flight.schema import Column, ConsumerSpec, TableSpec
from tests.kit.server import queue_server

STORM_S = 1.5
CODES = {
    "schema_mismatch",
    "invalid_request",
    "table_not_found",
    "lease_lost",
    "deadline_exceeded",
    "capacity",
}


@pytest.fixture(scope="module")
def server():
    """The address of a server with one table of one row, and its process."""
    with queue_server() as (address, process):
        with QueueClient(address, identity="setup", deadline_s=10.0) as client:
            client.create_table(
                TableSpec(
                    name="rows",
                    columns=(
                        Column(name="x", type=pa.list_(pa.int64()), meaning="numbers"),
                        Column(name="s", type=pa.string(), meaning="a word", nullable=True),
                    ),
                    consumers=(ConsumerSpec(name="c", columns=("x",)),),
                )
            )
            client.put("rows", GOOD)
        yield address, process


GOOD = pa.table(
    {"uid": ["a", "b", "cc"], "x": pa.array([[1], [2, 3], []], pa.list_(pa.int64())), "s": ["x", None, "zzz"]}
)


@pytest.fixture
def unharmed(server):
    """Check afterwards that the server is the same process, answers, and holds only whole rows."""
    address, process = server
    yield address
    assert process.poll() is None
    with QueueClient(address, identity="check", deadline_s=10.0) as client:
        assert client.list_tables() == ["rows"]
        found = client.read("rows")
        found.validate(full=True)
        assert found.column("uid").to_pylist()[:3] == ["a", "b", "cc"]
        assert client.stats("rows")["consumers"]["c"]["leased"] == 0


# ---- messages ---------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        "v", "verb", "identity", "table", "consumer", "max_rows", "min_rows", "columns", "lease_id", "lease_s",
        "deadline_s", "uids", "filter", "row_ids", "query", "interval_s", "policy_version", "expected_rows",
        "arrow_schema", "consumers", "credit_rows", "heartbeat_s", "reason", "step",
    ]
)  # fmt: skip
BODIES = (
    st.binary(max_size=60)
    | JSON.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(FIELDS, JSON | st.sampled_from(["rows", "c", "take", "read", "put"]), max_size=6).map(
        lambda value: json.dumps({"deadline_s": 0} | value).encode()
    )
)
LISTED = [
    b"[" * 200_000,
    b'{"verb":"read","table":"rows","filter":' + b'{"not":' * 50_000 + b"{}" + b"}" * 50_000 + b"}",
    b'{"verb":"read","table":"rows","max_rows":' + b"9" * 5000 + b"}",
    b'{"verb":"take","table":"rows","consumer":"c","max_rows":1e308}',
    b'{"verb":"take","table":"rows","consumer":"c","max_rows":9223372036854775807,"min_rows":9223372036854775807}',
    b'{"verb":"take","table":"rows","consumer":"c","max_rows":1,"deadline_s":-1}',
    b'{"verb":"watch","interval_s":-1}',
    b'{"verb":"sql","query":"","max_rows":-5}',
    b'{"verb":"read","table":"' + b"a" * 100_000 + b'"}',
    '{"verb":"read","table":"\ud800"}'.encode("utf-8", "surrogatepass"),
]


OPEN = (
    b'{"verb":"subscribe","table":"rows","consumer":"c","max_rows":1,"credit_rows":0}',
    b'{"verb":"put_stream","table":"rows"}',
    b'{"verb":"take_stream","table":"rows","consumer":"c"}',
)
"""Descriptors of streams on which a client may talk."""


def refused(call) -> None:
    """Run a call that may be answered or refused, but only by a code of ours and without a traceback."""
    refusal = None
    try:
        call()
    except paflight.FlightError as error:
        refusal = error
    if refusal is not None:
        assert "Traceback" not in str(refusal)
        assert ".py" not in str(refusal)
        assert not refusal.extra_info or json.loads(refusal.extra_info)["code"] in CODES


def is_open_ended(body: bytes) -> bool:
    """Return whether an answer to this could be a long stream or a change of state."""
    return any(word in body for word in (b"watch", b"sql", b"drop", b"take"))


@settings(max_examples=120, deadline=None)
@given(BODIES)
def test_random_messages_are_answered(server, body):
    """Tickets, actions and descriptors of any bytes."""
    address, process = server
    plain = paflight.connect(address)
    if not is_open_ended(body):
        refused(lambda: list(plain.do_get(paflight.Ticket(body))))
    for action in ("stats", "describe", "ack", "renew", "announce", "alter_table", "create_table", "no such"):
        refused(lambda action=action: list(plain.do_action(paflight.Action(action, body))))
    refused(lambda: plain.get_flight_info(paflight.FlightDescriptor.for_command(body)))
    refused(lambda: exchange(plain, body))
    for command in OPEN[1:]:
        refused(lambda command=command: exchange(plain, command, body))
    plain.close()
    assert process.poll() is None


def exchange(plain: paflight.FlightClient, command: bytes, said: bytes | None = None) -> None:
    """Open a stream, say something, and read what comes until the server or we end it."""
    descriptor = paflight.FlightDescriptor.for_command(command)
    writer, reader = plain.do_exchange(descriptor, paflight.FlightCallOptions(timeout=5.0))
    try:
        if said is not None:
            writer.write_metadata(said)
        writer.done_writing()
        for _ in reader:
            pass
    finally:
        writer.close()


def test_listed_nonsense_is_refused(unharmed):
    """Deep, long, huge, negative, and not even text."""
    plain = paflight.connect(unharmed)
    for body in LISTED:
        with pytest.raises(paflight.FlightServerError) as caught:
            list(plain.do_get(paflight.Ticket(body)))
        assert json.loads(caught.value.extra_info)["code"] in CODES
        refused(lambda body=body: list(plain.do_action(paflight.Action("stats", body))))
        for command in OPEN:
            with pytest.raises(paflight.FlightServerError):
                exchange(plain, command, body)
    plain.close()


@pytest.mark.parametrize(("version", "extra"), [(0, {}), (2, {"a field of": "the future"})])
def test_another_protocol_version_is_refused_by_both_numbers(unharmed, version, extra):
    """Whatever else the message holds."""
    plain = paflight.connect(unharmed)
    body = json.dumps({"v": version, "verb": "read", "table": "rows"} | extra).encode()
    rule = f"protocol version v must be 1, got {version}; use a client of the server's release"
    with pytest.raises(paflight.FlightServerError, match=rule):
        list(plain.do_get(paflight.Ticket(body)))
    with pytest.raises(paflight.FlightServerError, match=rule):
        list(plain.do_action(paflight.Action("stats", json.dumps({"v": version} | extra).encode())))
    with pytest.raises(paflight.FlightServerError, match=rule):
        exchange(plain, json.dumps({"v": version, "verb": "subscribe"} | extra).encode())
    plain.close()


SAID = [
    (b'{"type":"put","seq":1,"deadline_s":0}', "message must have either a batch or shared, got neither"),
    (
        b'{"type":"put","seq":1,"deadline_s":-1,"shared":{"connection":"","slots":[]}}',
        "deadline_s must be from 0",
    ),
    (b'{"type":"take","seq":1,"max_rows":-5}', "max_rows"),
    (b'{"type":"take","seq":1,"max_rows":1,"min_rows":9}', "max_rows"),
    (b'{"type":"take","seq":1,"max_rows":1,"lease_s":1e308}', "lease_s must be over 0 and at most a day"),
    (b'{"type":"take","seq":1,"max_rows":1,"deadline_s":1e308}', "deadline_s must be from 0"),
    (b'{"type":"take","seq":1,"max_rows":1,"ack":{"lease_id":"no"}}', "lease"),
    (b'{"type":"ack","seq":1,"lease_id":"no"}', "lease"),
    (b'{"type":"nack","seq":1,"lease_id":"no","reason":"x"}', "lease"),
    (b'{"type":"renew","seq":1,"lease_id":"no","lease_s":0}', "lease_s must be over 0"),
]


@pytest.mark.parametrize(("said", "why"), SAID, ids=[str(number) for number in range(len(SAID))])
def test_what_cannot_be_done_is_refused_and_the_stream_goes_on(unharmed, said, why):
    """Well-formed messages that ask for nonsense, twice on the same stream."""
    plain = paflight.connect(unharmed)
    command = OPEN[1] if b'"put"' in said else OPEN[2]
    descriptor = paflight.FlightDescriptor.for_command(command)
    writer, reader = plain.do_exchange(descriptor, paflight.FlightCallOptions(timeout=10.0))
    reader.read_chunk()
    for _ in range(2):
        writer.write_metadata(said)
        answer = json.loads(reader.read_chunk().app_metadata.to_pybytes())
        assert (answer["type"], answer["seq"]) == ("refused", 1)
        assert answer["code"] in CODES
        assert why in answer["message"]
    writer.done_writing()
    assert list(reader) == []
    writer.close()
    plain.close()


def test_slots_of_a_connection_that_is_not_there_end_the_stream(unharmed):
    """As unavailable: a client then opens another, and joins the shared memory again."""
    plain = paflight.connect(unharmed)
    said = b'{"type":"put","seq":1,"shared":{"connection":"x","slots":[1]}}'
    with pytest.raises(paflight.FlightServerError) as caught:
        exchange(plain, OPEN[1], said)
    assert json.loads(caught.value.extra_info)["code"] == "unavailable"
    plain.close()


@pytest.mark.parametrize("command", OPEN)
def test_batches_that_do_not_say_what_they_are_end_the_stream(unharmed, command):
    """Or that come where none may."""
    plain = paflight.connect(unharmed)
    for metadata in (None, b'{"type":"put","seq":1}', b"nonsense"):
        descriptor = paflight.FlightDescriptor.for_command(command)
        writer, reader = plain.do_exchange(descriptor, paflight.FlightCallOptions(timeout=10.0))
        batch = GOOD.to_batches()[0]
        is_put = b"put_stream" in command and metadata is not None and metadata.startswith(b"{")
        writer.begin(batch.schema)
        if metadata is None:
            writer.write_batch(batch)
        else:
            writer.write_with_metadata(batch, metadata)
        writer.done_writing()
        if is_put:
            answers = [json.loads(chunk.app_metadata.to_pybytes()) for chunk in reader]
            assert answers[1] == {
                "type": "added", "seq": 1, "num_rows": 3, "num_duplicates": 3, "runs": [[0, 3]],
            }  # fmt: skip
        else:
            with pytest.raises(paflight.FlightServerError) as caught:
                list(reader)
            assert json.loads(caught.value.extra_info)["code"] == "invalid_request"
        refused(writer.close)
    plain.close()


# ---- Arrow streams ----------------------------------------------------------------------------------------------


def varint(number: int) -> bytes:
    """Return a number as protobuf writes it."""
    head, rest = number & 127, number >> 7
    return bytes([head | 128]) + varint(rest) if rest else bytes([head])


def field(number: int, data: bytes) -> bytes:
    """Return a protobuf field of bytes."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def parts(table: pa.Table) -> list[tuple[bytes, bytes]]:
    """Return the messages of an Arrow stream, each as header and body."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    reader = pa.ipc.MessageReader.open_stream(pa.py_buffer(sink.getvalue()))
    found = []
    while True:
        try:
            message = reader.read_next_message()
        except StopIteration:
            return found
        body = message.body
        found.append((message.metadata.to_pybytes(), body.to_pybytes() if body is not None else b""))


class RawPut:
    """DoPut by gRPC alone, or a put stream."""

    def __init__(self, address: str, *, is_stream: bool = False) -> None:
        self._channel = grpc.insecure_channel(address.removeprefix("grpc://"))
        name = "DoExchange" if is_stream else "DoPut"
        self._call = self._channel.stream_stream(f"/arrow.flight.protocol.FlightService/{name}")
        self._is_stream = is_stream

    def send(self, messages: Iterable[tuple[bytes, bytes]], path: str = "rows") -> str:
        """Send headers and bodies; return "" or the text of the refusal."""

        def requests() -> Iterator[bytes]:
            descriptor = field(1, varint(1 << 3) + varint(1) + field(3, path.encode()))
            said = b""
            if self._is_stream:
                descriptor = field(1, varint(1 << 3) + varint(2) + field(2, OPEN[1]))
            for header, body in messages:
                yield descriptor + field(2, header) + said + field(1000, body)
                descriptor = b""
                said = field(3, b'{"type":"put","seq":1,"deadline_s":1}') if self._is_stream else b""

        try:
            for answer in self._call(requests(), timeout=10.0):
                if b'"refused"' in answer:
                    return answer.decode("utf-8", "replace")
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
                raise
            return error.details() or "refused"
        return ""

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()


@pytest.fixture(params=[False, True], ids=["call", "stream"])
def raw(unharmed, request):
    """A raw put to the server, by a call or over an open stream."""
    put = RawPut(unharmed, is_stream=request.param)
    yield put
    put.close()


def test_bit_flips_in_headers_and_bodies_are_refused_or_harmless(raw):
    """A storm of a few seconds: wrong offsets, wrong lengths, wrong types, in any combination."""
    chance = random.Random(0)
    whole = parts(GOOD)
    refusals = accepted = 0
    ends_at = time.monotonic() + STORM_S
    while time.monotonic() < ends_at:
        damaged = [(bytearray(header), bytearray(body)) for header, body in whole]
        for _ in range(chance.choice([1, 1, 2, 8])):
            place = chance.choice([piece for piece in damaged[chance.random() < 0.8] if piece])
            where = chance.randrange(len(place))
            place[where] = chance.choice([place[where] ^ 1 << chance.randrange(8), 0, 0x7F, 0xFF])
        answer = raw.send([(bytes(header), bytes(body)) for header, body in damaged])
        assert "Traceback" not in answer
        assert "the server failed" not in answer
        refusals += bool(answer)
        accepted += not answer
    assert refusals > 20
    assert accepted > 20


def test_truncated_messages_are_refused(raw):
    """Header or body cut anywhere; a stream that ends after its schema puts nothing."""
    (schema, _), (header, body) = parts(GOOD)
    for length in range(0, len(body), 8):
        assert raw.send([(schema, b""), (header, body[:length])])
    for length in range(1, len(header), 8):
        assert raw.send([(schema, b""), (header[:length], body)])
    for length in range(1, len(schema), 8):
        assert raw.send([(schema[:length], b""), (header, body)])
    assert raw.send([(schema, b"")]) == ""


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 3), min_size=4, max_size=4))
def test_wrong_offsets_never_reach_the_table(server, offsets):
    """Lists that run backwards, begin before their values or end behind them."""
    address, process = server
    (schema, _), (header, body) = parts(GOOD)
    right = GOOD["x"].chunk(0).buffers()[1].to_pybytes()[:16]
    wrong = b"".join(offset.to_bytes(4, "little", signed=True) for offset in offsets)
    put = RawPut(address)
    answer = put.send([(schema, b""), (header, body.replace(right, wrong))])
    put.close()
    assert process.poll() is None
    if offsets == sorted(offsets) and offsets[0] >= 0 and offsets[-1] <= 3:
        assert answer == ""
    else:
        assert "batch must be valid Arrow data" in answer


def test_huge_declared_lengths_cost_nothing(raw):
    """A header that promises 2^60 bytes or rows, of which none come."""
    (schema, _), (header, body) = parts(GOOD)
    for marker in (len(body), GOOD.num_rows, 24, 16):
        needle = marker.to_bytes(8, "little")
        for lie in (2**31 - 1, 2**40, 2**60, 2**63 - 1, 2**64 - 8):
            assert "the server failed" not in raw.send(
                [(schema, b""), (header.replace(needle, lie.to_bytes(8, "little")), body)]
            )


def test_thousands_of_unknown_columns_are_refused_briefly(unharmed):
    """The refusal names some of them, and does not take long."""
    names = [f"column_{index}" for index in range(4000)]
    wide = pa.table({"uid": ["w"]} | {name: pa.array([1], pa.int64()) for name in names})
    started = time.monotonic()
    with (
        QueueClient(unharmed, identity="wide", deadline_s=10.0) as client,
        pytest.raises(SchemaMismatchError, match="column 'column_0': expected one of"),
    ):
        client.put("rows", wide)
    assert time.monotonic() - started < 5.0


def test_names_that_are_no_text_are_refused(raw):
    """In a put."""
    (schema, _), rest = parts(GOOD)
    at = schema.find(b"uid\x00")
    answer = raw.send([(schema[:at] + b"\xff\xfe\xfd" + schema[at + 3 :], b""), rest])
    assert "column names must be UTF-8" in answer


def test_bad_batch_of_a_stream_leaves_the_good_ones_before_it(unharmed):
    """Each batch is added whole or not at all; what follows a bad one is not."""
    plain = paflight.connect(unharmed)
    good = pa.record_batch({"uid": ["s1", "s2"], "x": pa.array([[1], [2]], pa.list_(pa.int64()))})
    bad = pa.record_batch({"uid": ["s3", None], "x": pa.array([[1], [2]], pa.list_(pa.int64()))})
    writer, reader = plain.do_put(paflight.FlightDescriptor.for_path("rows"), good.schema)
    writer.write_batch(good)
    assert json.loads(reader.read().to_pybytes())["num_rows"] == 2
    writer.write_batch(bad)
    with pytest.raises(paflight.FlightServerError, match="column 'uid': expected no nulls, got 1 in 2 rows"):
        writer.close()
    plain.close()
    with QueueClient(unharmed, identity="check", deadline_s=10.0) as client:
        assert client.read("rows", uids=["s1", "s2", "s3"])["uid"].to_pylist() == ["s1", "s2"]
