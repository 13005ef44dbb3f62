"""The hub's state as a pure machine: `handle(event, now) -> effects`. It knows no socket, thread or clock.

State is a few keys and the members. Each change of a key is a delta with (epoch, seq): the epoch is drawn
at each start of a hub, the seq counts its changes. Members: joined -> lost (silence) -> joined again
(heard), or left.

Life of a key: set -> checked -> delta to all -> event. A set that changes nothing makes no delta, so that a
repeated request is harmless.
"""

from __future__ import annotations

import uuid
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from relax.control.errors import ControlRefusedError
from relax.control.messages import (
    ANNOUNCING_ROLE,
    PHASE_KEY,
    PHASES,
    POLICY_VERSION_KEY,
    Count,
    Delta,
    Dismissal,
    FromHub,
    FromMember,
    Hello,
    HubHeartbeat,
    Identity,
    Key,
    Leave,
    MemberHeartbeat,
    Reply,
    SetKey,
    Snapshot,
    copy_value,
    same_value,
)
from relax.control.scale import SCALE_PREFIX, scale_objection
from relax.control.timings import AttentiveClock, ControlTimings

MAX_ENTRIES = 1000
MAX_MEMBERS = 10_000
MAX_RETIRED = 10_000
MAX_STATUS_CHARACTERS = 2000

MemberState = Literal["joined", "lost", "left"]
MemberChange = Literal["joined", "lost", "returned", "replaced", "left"]


@dataclass(frozen=True, kw_only=True)
class Member:
    """What the hub knows of one member. `last_heartbeat_s` is on the hub's monotonic clock."""

    role: str
    index: int
    pid: int
    instance: str
    status: str
    state: MemberState
    last_heartbeat_s: float

    @property
    def name(self) -> str:
        return f"{self.role}/{self.index}"


@dataclass(frozen=True)
class MemberChanged:
    """A member came, went, fell silent, was heard again, or was replaced by a new process."""

    change: MemberChange
    member: Member


@dataclass(frozen=True)
class KeyChanged:
    """A key has a new value; `author` is a member's name, or empty for the hub's own process."""

    key: str
    value: Any
    author: str


ControlEvent = MemberChanged | KeyChanged


@dataclass(frozen=True)
class Received:
    """A message came from the peer with that routing id."""

    peer: bytes
    message: FromMember


@dataclass(frozen=True)
class LocalSet:
    """The hub's own process sets a key."""

    key: str
    value: Any


@dataclass(frozen=True)
class Tick:
    """Time went by."""


@dataclass(frozen=True)
class Send:
    """Send to one peer."""

    peer: bytes
    message: FromHub


@dataclass(frozen=True)
class Publish:
    """Send to all."""

    message: FromHub


@dataclass(frozen=True)
class Tell:
    """Give the event to the hub's own process."""

    event: ControlEvent


@dataclass(frozen=True)
class Refuse:
    """The `LocalSet` just handled was refused."""

    reason: str


Effect = Send | Publish | Tell | Refuse


class _Announcement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Count
    path: str
    incarnation: Count = 0

    @property
    def place(self) -> tuple[int, int]:
        return self.incarnation, self.version


@dataclass
class _Record:
    member: Member
    heard_s: float  # attentive time


class HubState:
    """Keys and members of one epoch.

    `entries` are the keys to begin with, for example the policy version of a resumed run.
    """

    def __init__(self, timings: ControlTimings, entries: Mapping[str, Any] | None = None) -> None:
        self.epoch = uuid.uuid4().hex
        self.seq = 0
        self.entries: dict[str, Any] = {}
        self.counters: Counter[str] = Counter()
        self._timings = timings
        self._clock = AttentiveClock(2 * timings.heartbeat_s)
        self._records: dict[str, _Record] = {}
        self._retired: OrderedDict[str, None] = OrderedDict()
        self._next_heartbeat_s = float("-inf")
        for key, value in (entries or {}).items():
            reason = self._objection(key, value, ANNOUNCING_ROLE)
            if reason:
                raise ControlRefusedError(reason)
            self.entries[key] = copy_value(key, value)

    def members(self) -> dict[str, Member]:
        """Return every member that was ever seen, by name (`role/index`)."""
        return {name: record.member for name, record in self._records.items()}

    def handle(self, event: Received | LocalSet | Tick, now: float) -> list[Effect]:
        """Apply one event at monotonic time `now` and return what has to be sent and told, in order."""
        attentive_s = self._clock.advance(now)
        match event:
            case Received(peer, message):
                return self._receive(peer, message, now, attentive_s)
            case LocalSet(key, value):
                reason, effects = self._set(key, value, role="", author="")
                return [Refuse(reason)] if reason else effects
            case Tick():
                return self._tick(now, attentive_s)

    def _tick(self, now: float, attentive_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for record in self._records.values():
            silent_s = attentive_s - record.heard_s
            if record.member.state == "joined" and silent_s > self._timings.member_timeout_s:
                record.member = replace(record.member, state="lost")
                effects.append(Tell(MemberChanged("lost", record.member)))
        if now >= self._next_heartbeat_s:
            self._next_heartbeat_s = now + self._timings.heartbeat_s
            effects.append(self._heartbeat())
        return effects

    def _heartbeat(self) -> Publish:
        return Publish(HubHeartbeat(epoch=self.epoch, seq=self.seq))

    def _receive(self, peer: bytes, message: FromMember, now: float, attentive_s: float) -> list[Effect]:
        sender = message.sender
        if sender.instance in self._retired:
            self.counters["messages_of_replaced_members"] += 1
            reason = f"{sender.name} (pid {sender.pid}): another process has joined under this name"
            return [Send(peer, Dismissal(epoch=self.epoch, seq=self.seq, reason=reason))]
        known = self._records.get(sender.name)
        if known is None and len(self._records) >= MAX_MEMBERS:
            self.counters["refused_members"] += 1
            return []
        if known is not None and known.member.instance == sender.instance and known.member.state == "left":
            return []  # a heartbeat that was still under way when the member left
        status = message.status if isinstance(message, Hello | MemberHeartbeat) else None
        effects = self._hear(sender, status, now, attentive_s)
        match message:
            case Hello():
                entries = dict(self.entries)
                effects += [
                    Send(peer, Snapshot(epoch=self.epoch, seq=self.seq, entries=entries)),
                    self._heartbeat(),  # shows a newcomer that its subscription is in force
                ]
            case SetKey():
                reason, changes = self._set(message.key, message.value, role=sender.role, author=sender.name)
                reply = Reply(epoch=self.epoch, seq=self.seq, request=message.request, refusal=reason)
                effects += [*changes, Send(peer, reply)]
            case Leave():
                record = self._records[sender.name]
                record.member = replace(record.member, state="left")
                effects.append(Tell(MemberChanged("left", record.member)))
        return effects

    def _hear(self, sender: Identity, status: str | None, now: float, attentive_s: float) -> list[Effect]:
        """Register or refresh the sender."""
        known = self._records.get(sender.name)
        change: MemberChange | None = None
        if known is None:
            change = "joined"
        elif known.member.instance != sender.instance:
            change = "joined" if known.member.state == "left" else "replaced"
            self._retire(known.member.instance)
        elif known.member.state == "lost":
            change = "returned"
        if status is None:
            status = known.member.status if known is not None and change != "replaced" else ""
        member = Member(
            role=sender.role,
            index=sender.index,
            pid=sender.pid,
            instance=sender.instance,
            status=status[:MAX_STATUS_CHARACTERS],
            state="joined",
            last_heartbeat_s=now,
        )
        self._records[sender.name] = _Record(member, attentive_s)
        return [Tell(MemberChanged(change, member))] if change else []

    def _retire(self, instance: str) -> None:
        self._retired[instance] = None
        while len(self._retired) > MAX_RETIRED:
            self._retired.popitem(last=False)

    def _set(self, key: str, value: Any, *, role: str, author: str) -> tuple[str, list[Effect]]:
        """Return the reason of refusal (empty if accepted) and the effects."""
        reason = self._objection(key, value, role)
        if reason:
            self.counters["refused_sets"] += 1
            return reason, []
        if same_value(self.entries.get(key), value):
            return "", []
        value = copy_value(key, value)
        self.seq += 1
        if value is None:
            del self.entries[key]
        else:
            self.entries[key] = value
        delta = Delta(epoch=self.epoch, seq=self.seq, key=key, value=value)
        return "", [Publish(delta), Tell(KeyChanged(key, value, author))]

    def _objection(self, key: str, value: Any, role: str) -> str:
        """Return why `role` may not set `key` to `value`, or an empty string."""
        try:
            msgspec.convert(key, Key, strict=True)
            copy_value(key, value)
        except msgspec.ValidationError as error:
            return f"control key: the key must be a string of 1 to 200 characters, got {key!r} ({error})"
        except ControlRefusedError as error:
            return str(error)
        if key == POLICY_VERSION_KEY:
            return self._announcement_objection(value, role)
        if (key == PHASE_KEY or key.startswith(f"{PHASE_KEY}/")) and value not in (*PHASES, None):
            return f"control key {key!r}: the phase must be one of {', '.join(PHASES)}, got {value!r}"
        if key.startswith(SCALE_PREFIX) and (reason := scale_objection(key, value)):
            return reason
        if key not in self.entries and len(self.entries) >= MAX_ENTRIES:
            return (
                f"control key {key!r}: there must be at most {MAX_ENTRIES} keys; set one to None to remove it"
            )
        return ""

    def _announcement_objection(self, value: Any, role: str) -> str:
        if role != ANNOUNCING_ROLE:
            speaker = f"the role {role!r}" if role else "the hub's own process"
            return (
                f"control key {POLICY_VERSION_KEY!r}: the role must be {ANNOUNCING_ROLE!r}, got {speaker}; "
                "a resumed run gives the hub its version as one of the initial entries"
            )
        try:
            new = msgspec.convert(value, _Announcement, strict=True)
        except msgspec.ValidationError as error:
            return f"control key {POLICY_VERSION_KEY!r}: must be {{version, path}}, got {value!r} ({error})"
        known = self.entries.get(POLICY_VERSION_KEY)
        old = None if known is None else msgspec.convert(known, _Announcement)
        if old is None or new.place > old.place or new == old:
            return ""
        if new.place == old.place:
            return (
                f"control key {POLICY_VERSION_KEY!r}: version {new.version} must keep its path "
                f"{old.path!r}, got {new.path!r}; publish under a new version"
            )
        if new.incarnation < old.incarnation:
            return (
                f"control key {POLICY_VERSION_KEY!r}: the incarnation must be {old.incarnation}, got "
                f"{new.incarnation}; the run has gone back to a checkpoint meanwhile"
            )
        return (
            f"control key {POLICY_VERSION_KEY!r}: the version must be above {old.version}, "
            f"got {new.version}; versions never go back within an incarnation"
        )
