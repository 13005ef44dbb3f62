"""A service's connection to the hub: a thread with a DEALER and a SUB around a pure `MemberSession`.

Life cycle: joined, with the whole state, once constructed -> `close()`, which the hub reports as left. The
thread keeps the copy current and the heartbeats going whatever the service does; it never raises into the
service: when the hub is silent for too long, or another process has taken this member's place, the phase is
`stop`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from relax.control.curve import CurveKeys
from relax.control.errors import ControlDeadlineError, ControlError, ControlRefusedError, MalformedFrameError
from relax.control.messages import (
    POLICY_VERSION_KEY,
    FromMember,
    HubAddress,
    Identity,
    Leave,
    Phase,
    PolicyVersion,
    Reply,
    copy_value,
    decode_from_hub,
    encode,
)
from relax.control.replica import Heard, MemberSession, Tick
from relax.control.timings import ControlTimings

HIGH_WATER_MARK_FRAMES = 1000
LINGER_MS = 500
RECONNECT_MS = 50
RECONNECT_MAX_MS = 1000
MAX_FRAMES_A_TURN = 1000
JOIN_DEADLINE_S = 5.0

_log = logging.getLogger(__name__)


class ControlMember:
    """One service's view of the control state.

    Args:
        uri: address that the hub gives, `control://HOST:PORT,PORT`.
        role: the service's role, lower case.
        index: its number within the role; a second process of the same role and index replaces the first.
        timings: heartbeat interval and limits of silence, the hub's.
        connect_deadline_s: how long the constructor may block until the state is here.
        keys: directory of this member's CURVE keys, for a hub that has some.

    Raises:
        ControlRefusedError: the URI or the role is malformed, or there are no keys where they should be.
        ControlDeadlineError: no hub answered at the URI; one that does not know the keys is silent too.
    """

    def __init__(
        self,
        uri: str,
        role: str,
        index: int,
        *,
        timings: ControlTimings | None = None,
        connect_deadline_s: float = 10.0,
        keys: Path | None = None,
    ) -> None:
        self._keys = None if keys is None else CurveKeys.load(keys)
        self._address = HubAddress.parse(uri)
        self._timings = timings or ControlTimings()
        identity = Identity.checked(role, index, os.getpid(), uuid.uuid4().hex)
        self._session = MemberSession(identity, self._timings, time.monotonic())
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._failure: Exception | None = None
        self._closing = False
        self._context = zmq.Context()
        self._dealer = self._connect(zmq.DEALER, self._address.router)
        self._subscriber = self._connect(zmq.SUB, self._address.publisher)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=f"control-{identity.name}", daemon=True)
        self._thread.start()
        if not self.wait_for(self._is_joined, connect_deadline_s):
            self.close()
            raise ControlDeadlineError(
                f"ControlMember {identity.name}: the control hub at {uri} must answer within "
                f"{connect_deadline_s} s, got silence; check that the driver runs and that the URI is its own"
            )

    @property
    def name(self) -> str:
        """The member's name in the hub: role and index."""
        return self._session.identity.name

    @property
    def phase(self) -> Phase:
        """What this service should do: `stop` anywhere wins, then its own phase, its role's, `phase`, `run`.

        It is also `stop` while the hub is silent for longer than `hub_timeout_s`, and for good once another
        process has taken this member's place (`dismissal` says so) or the background thread has failed.
        """
        with self._lock:
            return "stop" if self._failure is not None else self._session.phase

    @property
    def dismissal(self) -> str:
        """Why the hub told this member to stop for good; empty otherwise."""
        with self._lock:
            return self._session.dismissal

    @property
    def policy_version(self) -> PolicyVersion | None:
        """The newest announced weights, or `None` before the first announcement."""
        value = self.get(POLICY_VERSION_KEY)
        if value is None:
            return None
        return PolicyVersion(value["version"], Path(value["path"]), value.get("incarnation", 0))

    def get(self, key: str, default: Any = None) -> Any:
        """Return this member's copy of a key's value, or `default` when it is not set."""
        with self._lock:
            value = self._session.replica.entries.get(key)
        return default if value is None else copy_value(key, value)

    def set(self, key: str, value: Any, *, deadline_s: float | None = None) -> None:
        """Change a key for all and return once this member's own copy shows it; `None` removes it.

        Repeats are harmless. Without a deadline it waits as long as the hub may be silent.

        Raises:
            ControlRefusedError: the hub's rules do not allow the value, or this member was dismissed.
            ControlDeadlineError: the hub did not answer; the change may or may not have happened.
            ControlError: the member is closed or its thread has failed.
        """
        value = copy_value(key, value)
        deadline_s = self._timings.hub_timeout_s if deadline_s is None else deadline_s
        with self._lock:
            self._check_running()
            request = self._session.ask(key, value, time.monotonic())
            self._wake()
        try:
            done = self.wait_for(lambda: self._is_answered(request), deadline_s)
            with self._lock:
                reply = self._session.outcome(request)
                dismissal = self._session.dismissal
        finally:
            with self._lock:
                self._session.forget(request)
        self._raise_refusal(key, reply, dismissal)
        if not done or reply is None:
            self._check_running()
            raise ControlDeadlineError(
                f"ControlMember {self.name}: the hub at {self._address} must answer within {deadline_s} s "
                f"when {key!r} is set, got silence; setting it again is harmless"
            )

    def announce_policy_version(
        self, version: int, path: Path | str, *, incarnation: int = 0, deadline_s: float | None = None
    ) -> None:
        """Tell all that the weights of `version` lie in directory `path`; return once the hub has it.

        Versions only rise, but for those of a later incarnation, see `relax.control.course`. Announcing the newest
        version again, with the same path, is harmless.

        Raises:
            ControlRefusedError: the role is not the actor, or the version is not above the last.
            ControlDeadlineError: the hub did not answer.
        """
        value = {"version": version, "path": str(path), "incarnation": incarnation}
        self.set(POLICY_VERSION_KEY, value, deadline_s=deadline_s)

    def wait_for(self, predicate: Callable[[], bool], deadline_s: float) -> bool:
        """Block until `predicate()` holds and return True, or return False after `deadline_s`.

        It is evaluated in the calling thread at each change of the state, the phase included; it may call
        this member.
        """
        end_s = time.monotonic() + deadline_s
        while True:
            with self._lock:
                seen = self._session.changes
                over = self._closing or self._failure is not None
            if predicate():
                return True
            with self._changed:
                left_s = end_s - time.monotonic()
                if over or not self._changed.wait_for(partial(self._has_moved, seen), left_s):
                    return False

    def set_status(self, text: str) -> None:
        """Show `text` beside this member at the hub, with the next heartbeat. Does not block."""
        with self._lock:
            self._session.status = text

    def stats(self) -> dict[str, int]:
        """Return counters by name: snapshots, gaps, malformed and undelivered frames."""
        with self._lock:
            return dict(self._session.counters)

    def close(self) -> None:
        """Leave the hub, close the sockets and end the thread; safe to repeat."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
            self._wake()
        self._thread.join(JOIN_DEADLINE_S)
        if not self._thread.is_alive():
            os.close(self._wake_fd)

    def __enter__(self) -> ControlMember:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _has_moved(self, seen: int) -> bool:
        return self._session.changes != seen or self._closing or self._failure is not None

    def _is_joined(self) -> bool:
        with self._lock:
            return self._session.joined

    def _is_answered(self, request: int) -> bool:
        with self._lock:
            return bool(self._session.dismissal) or self._session.outcome(request) is not None

    def _raise_refusal(self, key: str, reply: Reply | None, dismissal: str) -> None:
        if reply is not None and reply.refusal:
            raise ControlRefusedError(reply.refusal)
        if dismissal:
            raise ControlRefusedError(
                f"control key {key!r}: the sender must be a member, got a dismissal: {dismissal}"
            )

    def _check_running(self) -> None:
        if self._failure is not None:
            raise ControlError(
                f"ControlMember {self.name}: its thread failed: {self._failure!r}"
            ) from self._failure
        if self._closing:
            raise ControlError(
                f"ControlMember {self.name}: the member must be open, got a call after close()"
            )

    def _connect(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK_FRAMES)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK_FRAMES)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        else:
            socket.setsockopt(zmq.IDENTITY, self._session.identity.instance.encode())
            socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing piles up for a hub that is away
        if self._keys is not None:
            self._keys.protect_member(socket)
        socket.connect(endpoint)
        return socket

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            for source in (self._dealer, self._subscriber, self._wake_fd):
                poller.register(source, zmq.POLLIN)
            while not self._closing:
                ready = dict(poller.poll(self._poll_ms()))
                if self._wake_fd in ready:
                    os.eventfd_read(self._wake_fd)
                self._receive(self._dealer, published=False)
                self._receive(self._subscriber, published=True)
                self._handle(Tick())
            self._send([Leave(sender=self._session.identity)])
        except Exception as error:
            _log.exception("control member %s failed", self.name)
            with self._changed:
                self._failure = error
                self._changed.notify_all()
        finally:
            self._dealer.close()
            self._subscriber.close()
            self._context.term()

    def _poll_ms(self) -> int:
        """Return how long to sleep: until the next message is due, but no longer than half a heartbeat."""
        with self._lock:
            due_in_s = self._session.due_s() - time.monotonic()
        return max(1, min(int(due_in_s * 1000) + 1, int(self._timings.heartbeat_s * 500)))

    def _receive(self, socket: zmq.Socket[bytes], *, published: bool) -> None:
        for _ in range(MAX_FRAMES_A_TURN):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) != 1:
                    raise MalformedFrameError(f"control frame: parts must be 1, got {len(frames)}")
                message = decode_from_hub(frames[0])
            except MalformedFrameError as error:
                with self._lock:
                    self._session.counters["malformed_frames"] += 1
                _log.warning("%s", error)
                continue
            self._handle(Heard(message, published))
        self._wake()  # more may be waiting

    def _handle(self, event: Heard | Tick) -> None:
        with self._changed:
            before = self._session.changes
            messages = self._session.handle(event, time.monotonic())
            if self._session.changes != before:
                self._changed.notify_all()
        self._send(messages)

    def _send(self, messages: list[FromMember]) -> None:
        for message in messages:
            try:
                self._dealer.send(encode(message), zmq.NOBLOCK)
            except zmq.Again:  # the hub is away; whatever matters is sent again
                with self._lock:
                    self._session.counters["undelivered_frames"] += 1
