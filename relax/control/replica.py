"""A member's copy of the hub's state and its side of the protocol: pure, without sockets or clocks.

`Replica` applies snapshots and deltas in any order and says when it needs a snapshot: a gap in the seq, a
heartbeat ahead of it (the last delta was lost), or another epoch (the hub was restarted). `MemberSession`
decides what to send and when: `handle(event, now) -> messages`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

from relax.control.messages import (
    PHASE_KEY,
    PHASES,
    Delta,
    Dismissal,
    FromHub,
    FromMember,
    Hello,
    HubHeartbeat,
    Identity,
    MemberHeartbeat,
    Phase,
    Reply,
    SetKey,
    Snapshot,
)
from relax.control.scale import member_phase_key
from relax.control.timings import AttentiveClock, ControlTimings

MAX_PENDING_DELTAS = 4096


def effective_phase(entries: dict[str, Any], role: str, index: int | None = None) -> Phase:
    """Return a member's phase: `stop` anywhere wins, then `phase/<role>/<index>`, `phase/<role>`, `phase`, `run`."""
    general, own = entries.get(PHASE_KEY), entries.get(f"{PHASE_KEY}/{role}")
    alone = None if index is None else entries.get(member_phase_key(role, index))
    if "stop" in (general, own, alone):
        return "stop"
    phase = alone or own or general or "run"
    return cast(Phase, phase) if phase in PHASES else "stop"


class Replica:
    """A copy of the hub's entries at (epoch, seq); epoch is empty before the first snapshot."""

    def __init__(self) -> None:
        self.epoch = ""
        self.seq = 0
        self.entries: dict[str, Any] = {}
        self._newest_epoch = ""
        self._newest_seq = 0
        self._pending: dict[int, Delta] = {}  # deltas of the newest epoch that cannot be applied yet

    @property
    def needs_snapshot(self) -> bool:
        """Whether the hub is known to be elsewhere and no delta at hand leads there."""
        return not self.epoch or self.epoch != self._newest_epoch or self.seq < self._newest_seq

    def observe(self, epoch: str, seq: int) -> None:
        """Note where the hub is, from any of its messages."""
        if epoch != self._newest_epoch:
            self._newest_epoch, self._newest_seq = epoch, seq
            self._pending.clear()
        else:
            self._newest_seq = max(self._newest_seq, seq)

    def apply_snapshot(self, snapshot: Snapshot) -> bool:
        """Take the whole state over, unless the copy is ahead of it; return whether anything changed."""
        self.observe(snapshot.epoch, snapshot.seq)
        if snapshot.epoch == self.epoch and snapshot.seq <= self.seq:
            return False
        self.epoch, self.seq, self.entries = snapshot.epoch, snapshot.seq, dict(snapshot.entries)
        self._apply_pending()
        return True

    def apply_delta(self, delta: Delta) -> bool:
        """Apply the delta now or once those before it came; return whether anything changed."""
        self.observe(delta.epoch, delta.seq)
        if delta.epoch == self.epoch and delta.seq <= self.seq:
            return False
        if len(self._pending) >= MAX_PENDING_DELTAS:
            self._pending.clear()  # a snapshot will cover them
        self._pending[delta.seq] = delta
        return self._apply_pending()

    def _apply_pending(self) -> bool:
        before = self.seq
        while (
            self.epoch == self._newest_epoch and (delta := self._pending.pop(self.seq + 1, None)) is not None
        ):
            self.seq = delta.seq
            if delta.value is None:
                self.entries.pop(delta.key, None)
            else:
                self.entries[delta.key] = delta.value
        if not self.needs_snapshot:
            self._pending.clear()
        return self.seq != before


@dataclass(frozen=True)
class Heard:
    """A message came from the hub; `published` tells the two sockets apart."""

    message: FromHub
    published: bool


@dataclass(frozen=True)
class Tick:
    """Time went by, or the caller asked for something: send what is due."""


@dataclass
class _Request:
    key: str
    value: Any
    next_send_s: float
    reply: Reply | None = None


class MemberSession:
    """One member's conversation with the hub, from joining to leaving.

    `changes` counts everything a waiting caller could care about: entries, silence, replies, dismissal.
    """

    def __init__(self, identity: Identity, timings: ControlTimings, now: float) -> None:
        self.identity = identity
        self.replica = Replica()
        self.counters: Counter[str] = Counter()
        self.status = ""
        self.dismissal = ""
        self.hub_silent = False
        self.changes = 0
        self._timings = timings
        self._clock = AttentiveClock(2 * timings.heartbeat_s)
        self._heard_s = self._clock.advance(now)
        self._subscribed = False
        self._requests: dict[int, _Request] = {}
        self._num_requests = 0
        self._next_heartbeat_s = now + timings.heartbeat_s
        self._next_hello_s = now
        self._hello_interval_s = timings.retry_s

    @property
    def joined(self) -> bool:
        """Whether the copy is whole and the subscription in force, so that no delta can be missed unseen."""
        return self._subscribed and not self.replica.needs_snapshot

    @property
    def phase(self) -> Phase:
        """The phase of this member; `stop` when the hub is silent or another process took the place."""
        if self.hub_silent or self.dismissal:
            return "stop"
        return effective_phase(self.replica.entries, self.identity.role, self.identity.index)

    def ask(self, key: str, value: Any, now: float) -> int:
        """Queue a change of a key for the next tick and return the number of the request."""
        self._num_requests += 1
        self._requests[self._num_requests] = _Request(key, value, next_send_s=now)
        return self._num_requests

    def outcome(self, request: int) -> Reply | None:
        """Return the hub's reply once it came and, if it accepted, this member's copy shows the change."""
        reply = self._requests[request].reply
        if reply is None or reply.refusal:
            return reply
        behind = self.replica.epoch == reply.epoch and self.replica.seq < reply.seq
        return None if behind else reply

    def forget(self, request: int) -> None:
        """Drop a request, answered or not."""
        self._requests.pop(request, None)

    def due_s(self) -> float:
        """Return the monotonic time of the next message to send."""
        times = [self._next_heartbeat_s]
        if not self.joined and not self.dismissal:
            times.append(self._next_hello_s)
        times += [request.next_send_s for request in self._requests.values() if request.reply is None]
        return min(times)

    def handle(self, event: Heard | Tick, now: float) -> list[FromMember]:
        """Apply one event at monotonic time `now` and return the messages to send to the hub."""
        attentive_s = self._clock.advance(now)
        if isinstance(event, Heard):
            self._heard_s = attentive_s
            self._hear(event, now)
        self._note_silence(attentive_s - self._heard_s > self._timings.hub_timeout_s)
        return [*self._hello_if_due(now), *self._requests_due(now), *self._heartbeat_if_due(now)]

    def _hear(self, event: Heard, now: float) -> None:
        was_joined = self.joined
        message = event.message
        self._subscribed |= event.published
        match message:
            case Snapshot():
                self.counters["snapshots"] += 1
                self.changes += self.replica.apply_snapshot(message)
            case Delta():
                self.changes += self.replica.apply_delta(message)
            case HubHeartbeat():
                self.replica.observe(message.epoch, message.seq)
            case Reply():  # may overtake the delta that it speaks of, so its position proves no gap
                if request := self._requests.get(message.request):
                    request.reply = message
                self.changes += 1
            case Dismissal():
                self.dismissal = message.reason
                self.changes += 1
        if was_joined and not self.joined:
            self.counters["gaps"] += 1
            self._next_hello_s, self._hello_interval_s = now, self._timings.retry_s
        self.changes += self.joined != was_joined

    def _note_silence(self, silent: bool) -> None:
        self.changes += silent != self.hub_silent
        self.hub_silent = silent

    def _hello_if_due(self, now: float) -> list[FromMember]:
        if self.joined or self.dismissal or now < self._next_hello_s:
            return []
        self._next_hello_s = now + self._hello_interval_s
        self._hello_interval_s = min(2 * self._hello_interval_s, self._timings.heartbeat_s)
        return [Hello(sender=self.identity, status=self.status)]

    def _requests_due(self, now: float) -> list[FromMember]:
        messages: list[FromMember] = []
        for number, request in self._requests.items():
            if request.reply is None and now >= request.next_send_s:
                request.next_send_s = now + self._timings.heartbeat_s
                messages.append(
                    SetKey(sender=self.identity, request=number, key=request.key, value=request.value)
                )
        return messages

    def _heartbeat_if_due(self, now: float) -> list[FromMember]:
        if now < self._next_heartbeat_s:
            return []
        self._next_heartbeat_s = now + self._timings.heartbeat_s
        if self.dismissal:
            return []  # a hub that restarts must not take this process for the member again
        replica = self.replica
        return [
            MemberHeartbeat(sender=self.identity, status=self.status, epoch=replica.epoch, seq=replica.seq)
        ]
