"""The protocol of the control plane: these classes are all that is ever sent. No sockets here.

A frame is one message in msgpack: a map with the tag `type` and the number `protocol`. Fields that a later
minor change adds are ignored by older readers; a change that they must not ignore raises `PROTOCOL`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec

from relax.control.errors import ControlRefusedError, MalformedFrameError

PROTOCOL = 1
MAX_FRAME_BYTES = 1 << 20
MAX_VALUE_BYTES = 1 << 16
MAX_KEY_CHARACTERS = 200

Phase = Literal["run", "pause", "drain", "stop"]
PHASES: tuple[str, ...] = get_args(Phase)
PHASE_KEY = "phase"
POLICY_VERSION_KEY = "policy_version"
ANNOUNCING_ROLE = "actor"

RoleName = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_]{0,62}\Z")]
Count = Annotated[int, msgspec.Meta(ge=0)]
Key = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_KEY_CHARACTERS)]


@dataclass(frozen=True)
class PolicyVersion:
    """The newest published weights: their number, the snapshot directory, and which attempt at the steps made them."""

    version: int
    path: Path
    incarnation: int = 0


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who a member is. `instance` differs at each start and tells a restarted service from its past."""

    role: RoleName
    index: Count
    pid: Count
    instance: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]

    @property
    def name(self) -> str:
        """The member's key in the hub: role and index."""
        return f"{self.role}/{self.index}"

    @classmethod
    def checked(cls, role: str, index: int, pid: int, instance: str) -> Identity:
        """Return an identity whose fields would pass the other side's check.

        Raises:
            ControlRefusedError: the role is not a lower-case name, or a number is negative.
        """
        fields = {"role": role, "index": index, "pid": pid, "instance": instance}
        try:
            return msgspec.convert(fields, cls, strict=True)
        except msgspec.ValidationError as error:
            raise ControlRefusedError(
                f"control member: role must be a lower-case name and index a number from 0, "
                f"got {role!r} and {index!r} ({error})"
            ) from error


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Root of all messages."""

    protocol: int = PROTOCOL


class MemberMessage(Message, frozen=True, kw_only=True):
    """Root of what members send. Each says who speaks: any of them makes a member known to a new hub."""

    sender: Identity


class Hello(MemberMessage, frozen=True, kw_only=True, tag="hello"):
    """Join, or ask for the whole state again."""

    status: str = ""


class MemberHeartbeat(MemberMessage, frozen=True, kw_only=True, tag="member_heartbeat"):
    """Alive, with the position of the member's copy."""

    status: str
    epoch: str
    seq: Count


class SetKey(MemberMessage, frozen=True, kw_only=True, tag="set"):
    """Change one key; safe to repeat. A null value removes the key."""

    request: Count
    key: Key
    value: Any


class Leave(MemberMessage, frozen=True, kw_only=True, tag="leave"):
    """The member ends by its own will."""


class HubMessage(Message, frozen=True, kw_only=True):
    """Root of what the hub sends: every message carries the position of the hub's state."""

    epoch: str
    seq: Count


class Snapshot(HubMessage, frozen=True, kw_only=True, tag="snapshot"):
    """The whole state, to one member."""

    entries: dict[str, Any]


class Delta(HubMessage, frozen=True, kw_only=True, tag="delta"):
    """Change number `seq` of the epoch, to all."""

    key: str
    value: Any


class HubHeartbeat(HubMessage, frozen=True, kw_only=True, tag="hub_heartbeat"):
    """Alive, to all; tells a member that it missed the last delta."""


class Reply(HubMessage, frozen=True, kw_only=True, tag="reply"):
    """The outcome of a `SetKey`; `refusal` is empty when it was accepted."""

    request: Count
    refusal: str = ""


class Dismissal(HubMessage, frozen=True, kw_only=True, tag="dismissal"):
    """Another process has taken the member's place: this one must stop."""

    reason: str


FromMember = Hello | MemberHeartbeat | SetKey | Leave
FromHub = Snapshot | Delta | HubHeartbeat | Reply | Dismissal


def _refuse_extension(code: int, data: memoryview) -> Any:
    raise ValueError(f"extension type {code} ({len(data)} bytes) is not part of the protocol")


_encoder = msgspec.msgpack.Encoder()
_member_decoder = msgspec.msgpack.Decoder(FromMember, ext_hook=_refuse_extension)
_hub_decoder = msgspec.msgpack.Decoder(FromHub, ext_hook=_refuse_extension)
_value_decoder = msgspec.msgpack.Decoder(ext_hook=_refuse_extension)


def encode(message: Message) -> bytes:
    """Return the frame of a message."""
    return _encoder.encode(message)


def decode_from_member(frame: bytes) -> FromMember:
    """Return the message that a member sent.

    Raises:
        MalformedFrameError: the bytes are no such message, too long, or of another protocol number.
    """
    return _decode(frame, _member_decoder)


def decode_from_hub(frame: bytes) -> FromHub:
    """Return the message that the hub sent.

    Raises:
        MalformedFrameError: the bytes are no such message, or of another protocol number.
    """
    return _decode(frame, _hub_decoder)


def _decode(frame: bytes, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
    try:
        message = decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise MalformedFrameError(
            f"control frame: {len(frame)} bytes must be one message, got: {error}"
        ) from error
    if message.protocol != PROTOCOL:
        raise MalformedFrameError(
            f"control frame: protocol must be {PROTOCOL}, got {message.protocol}; run one release everywhere"
        )
    return message


def same_value(left: Any, right: Any) -> bool:
    """Return whether two values travel as the same bytes (so that `True` is not `1`)."""
    return _encoder.encode(left) == _encoder.encode(right)


def copy_value(key: str, value: Any) -> Any:
    """Return the value as every receiver will see it: lists, dicts, strings, numbers, shared with nobody.

    Raises:
        ControlRefusedError: the value is of another kind, or larger than `MAX_VALUE_BYTES` when encoded.
    """
    try:
        encoded = _encoder.encode(value)
        copy = _value_decoder.decode(encoded)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ControlRefusedError(
            f"control key {key!r}: value must be made of null, bool, int, float, str, list and dict, "
            f"got {type(value).__name__} ({error})"
        ) from error
    if len(encoded) > MAX_VALUE_BYTES:
        raise ControlRefusedError(
            f"control key {key!r}: value must be at most {MAX_VALUE_BYTES} bytes, got {len(encoded)}; "
            "rows and files travel through the queue or the file system"
        )
    return copy


_URI = re.compile(r"control://(?P<host>[A-Za-z0-9.-]+):(?P<router>\d{1,5}),(?P<publisher>\d{1,5})")


@dataclass(frozen=True)
class HubAddress:
    """Where a hub listens: one port for requests, one for what it publishes."""

    host: str
    router_port: int
    publisher_port: int

    def __str__(self) -> str:
        return f"control://{self.host}:{self.router_port},{self.publisher_port}"

    @property
    def router(self) -> str:
        return f"tcp://{self.host}:{self.router_port}"

    @property
    def publisher(self) -> str:
        return f"tcp://{self.host}:{self.publisher_port}"

    @classmethod
    def parse(cls, uri: str) -> HubAddress:
        """Read `control://HOST:PORT,PORT`.

        Raises:
            ControlRefusedError: the text is no such address.
        """
        match = _URI.fullmatch(uri)
        if match is None or not all(0 < int(match[name]) < 65536 for name in ("router", "publisher")):
            raise ControlRefusedError(
                f"control hub: URI must be control://HOST:PORT,PORT, got {uri!r}; see ControlHub.uri"
            )
        return cls(match["host"], int(match["router"]), int(match["publisher"]))
