"""The control protocol: frames, values and addresses."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax.control.errors import ControlRefusedError, MalformedFrameError
from relax.control.messages import (
    MAX_VALUE_BYTES,
    Delta,
    Dismissal,
    Hello,
    HubAddress,
    HubHeartbeat,
    Identity,
    Leave,
    MemberHeartbeat,
    Reply,
    SetKey,
    Snapshot,
    copy_value,
    decode_from_hub,
    decode_from_member,
    encode,
    same_value,
)

WHO = Identity(role="rollout", index=1, pid=42, instance="0" * 32)


@pytest.mark.parametrize(
    "message",
    [
        Hello(sender=WHO, status="loading"),
        MemberHeartbeat(sender=WHO, status="", epoch="e", seq=3),
        SetKey(sender=WHO, request=7, key="evaluate", value={"request": 1, "policy_version": 4}),
        Leave(sender=WHO),
    ],
)
def test_member_message_survives_the_wire(message):
    """Every member message decodes to itself."""
    assert decode_from_member(encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        Snapshot(epoch="e", seq=2, entries={"phase": "run", "n": None}),
        Delta(epoch="e", seq=3, key="phase/actor", value=["a", 1, 2.5, {"b": False}]),
        HubHeartbeat(epoch="e", seq=3),
        Reply(epoch="e", seq=3, request=1, refusal="no"),
        Dismissal(epoch="e", seq=3, reason="another"),
    ],
)
def test_hub_message_survives_the_wire(message):
    """Every hub message decodes to itself."""
    assert decode_from_hub(encode(message)) == message


@given(st.binary(max_size=200))
def test_decode_refuses_noise_with_one_error(frame):
    """Whatever the bytes, the only error is a malformed frame."""
    for decode in (decode_from_member, decode_from_hub):
        try:
            decode(frame)
        except MalformedFrameError:
            continue
        pytest.fail("noise was taken for a message")


@given(st.integers(min_value=0), st.integers(min_value=0, max_value=255), st.data())
def test_decode_survives_a_changed_byte(position, byte, data):
    """A frame with one wrong byte or a cut end is a message or a malformed frame, never another error."""
    frame = bytearray(encode(SetKey(sender=WHO, request=7, key="k", value={"a": [1, "x"]})))
    frame[position % len(frame)] = byte
    cut = data.draw(st.integers(min_value=0, max_value=len(frame)))
    for candidate in (bytes(frame), bytes(frame[:cut])):
        with contextlib.suppress(MalformedFrameError):
            decode_from_member(candidate)


@pytest.mark.parametrize(
    "changed",
    [
        {"protocol": 2},
        {"type": "delta"},
        {"sender": {"role": "rollout\n", "index": 0, "pid": 1, "instance": "0" * 32}},
        {"sender": {"role": "Rollout", "index": 0, "pid": 1, "instance": "0" * 32}},
        {"sender": {"role": "rollout", "index": -1, "pid": 1, "instance": "0" * 32}},
        {"value": msgspec.msgpack.Ext(5, b"x")},
        {"key": ""},
        {"key": "k" * 201},
        {"request": -1},
    ],
)
def test_decode_refuses_wrong_fields(changed):
    """Another protocol number, another side's message and impossible fields are malformed."""
    fields = msgspec.to_builtins(SetKey(sender=WHO, request=1, key="k", value=1)) | changed
    with pytest.raises(MalformedFrameError):
        decode_from_member(msgspec.msgpack.encode(fields))


def test_decode_refuses_deep_nesting():
    """A frame nested beyond the stack is malformed, not a crash."""
    with pytest.raises(MalformedFrameError):
        decode_from_hub(b"\x91" * 100_000)


def test_decode_names_the_protocol_in_the_error():
    """A frame of another release says what to do."""
    frame = msgspec.msgpack.encode(msgspec.to_builtins(Leave(sender=WHO)) | {"protocol": 9})
    with pytest.raises(MalformedFrameError) as raised:
        decode_from_member(frame)
    assert str(raised.value) == "control frame: protocol must be 1, got 9; run one release everywhere"


def test_decode_ignores_fields_of_a_later_release():
    """An added field does not break an older reader."""
    fields = msgspec.to_builtins(Leave(sender=WHO)) | {"later": 1}
    assert decode_from_member(msgspec.msgpack.encode(fields)) == Leave(sender=WHO)


def test_copy_value_shares_nothing_and_makes_lists_of_tuples():
    """The copy is what a receiver sees."""
    value = {"a": (1, 2), "b": [{}]}
    copy = copy_value("k", value)
    value["b"].append(1)
    assert copy == {"a": [1, 2], "b": [{}]}


@pytest.mark.parametrize(
    "value", [object(), 1 << 80, "x" * (MAX_VALUE_BYTES + 1), b"\x00" * (MAX_VALUE_BYTES + 1)]
)
def test_copy_value_refuses_what_cannot_travel(value):
    """Objects, integers beyond 64 bits and large values are refused with the key's name."""
    with pytest.raises(ControlRefusedError, match="control key 'k': value must be"):
        copy_value("k", value)


def test_same_value_tells_true_from_one():
    """Equality is that of the bytes."""
    assert same_value({"a": 1}, {"a": 1})
    assert not same_value(True, 1)


def test_identity_refuses_an_impossible_role():
    """A role that the hub would not decode is refused by the member."""
    with pytest.raises(ControlRefusedError, match="role must be a lower-case name"):
        Identity.checked("Bad Role", 0, 1, "0" * 32)


def test_address_reads_its_own_text():
    """The URI carries both ports."""
    address = HubAddress("127.0.0.1", 4001, 4002)
    assert str(address) == "control://127.0.0.1:4001,4002"
    assert HubAddress.parse(str(address)) == address
    assert (address.router, address.publisher) == ("tcp://127.0.0.1:4001", "tcp://127.0.0.1:4002")


@pytest.mark.parametrize(
    "uri", ["", "tcp://127.0.0.1:1", "control://h:1", "control://h:0,1", "control://h:1,70000"]
)
def test_address_refuses_other_text(uri):
    """The error shows the shape and what came."""
    with pytest.raises(ControlRefusedError) as raised:
        HubAddress.parse(uri)
    expected = f"control hub: URI must be control://HOST:PORT,PORT, got {uri!r}; see ControlHub.uri"
    assert str(raised.value) == expected
