"""The hub's sockets and thread: a ROUTER for requests and a PUB for changes around a pure `HubState`.

Life cycle: bound and running once constructed -> `close()`. Calls from any thread change the state under a
lock and leave what has to be sent in an outbox; only the hub's own thread touches the sockets, which are
not thread-safe.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zmq

from relax.control.curve import HUB, CurveKeys, Doorkeeper
from relax.control.errors import ControlError, ControlRefusedError, MalformedFrameError
from relax.control.hub_state import (
    ControlEvent,
    HubState,
    LocalSet,
    Member,
    Publish,
    Received,
    Refuse,
    Send,
    Tell,
    Tick,
)
from relax.control.messages import MAX_FRAME_BYTES, HubAddress, copy_value, decode_from_member, encode
from relax.control.timings import ControlTimings

HIGH_WATER_MARK_FRAMES = 1000
LINGER_MS = 500
MAX_EVENTS = 10_000
MAX_FRAMES_A_TURN = 1000
JOIN_DEADLINE_S = 5.0

_log = logging.getLogger(__name__)


class ControlHub:
    """The one owner of the control state; runs in the driver's process.

    Args:
        host: address to bind; without `keys`, any but a loopback address is refused.
        ports: router and publisher port, 0 for a free one; a restarted hub takes those of its address.
        entries: keys to begin with, such as the policy version of a resumed run.
        timings: heartbeat interval and limits of silence.
        keys: directory of CURVE keys (`relax.control.curve`); only their owners get in.

    Raises:
        ControlRefusedError: the host is not a loopback address though there are no keys, or an entry is not allowed.
        ControlError: the ports cannot be bound.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        ports: tuple[int, int] = (0, 0),
        entries: Mapping[str, Any] | None = None,
        timings: ControlTimings | None = None,
        keys: Path | None = None,
    ) -> None:
        if keys is None:
            _check_loopback(host)
        self._timings = timings or ControlTimings()
        self._state = HubState(self._timings, entries)
        self._lock = threading.Lock()
        self._outbox: deque[Send | Publish] = deque()
        self._events: deque[ControlEvent] = deque(maxlen=MAX_EVENTS)
        self._has_events = threading.Condition(self._lock)
        self._failure: Exception | None = None
        self._closing = False
        self._keys = None if keys is None else CurveKeys.load(keys / HUB)
        self._context = zmq.Context()
        self._doorkeeper = None if keys is None else Doorkeeper(self._context, keys)
        try:
            self._router, router_port = self._bind(zmq.ROUTER, host, ports[0])
            self._publisher, publisher_port = self._bind(zmq.PUB, host, ports[1])
        except zmq.ZMQError as error:
            self._stop_doorkeeper()
            self._context.destroy(linger=0)
            raise ControlError(
                f"ControlHub: {host} ports {ports} must be free, got: {error}; use 0 for any free port"
            ) from error
        self._address = HubAddress(host, router_port, publisher_port)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="control-hub", daemon=True)
        self._thread.start()

    @property
    def uri(self) -> str:
        """What members need to connect: `control://HOST:PORT,PORT`."""
        return str(self._address)

    @property
    def epoch(self) -> str:
        """Drawn anew at each start of a hub."""
        return self._state.epoch

    def set(self, key: str, value: Any) -> None:
        """Change a key for all members; `None` removes it. Does not block; safe to repeat.

        Raises:
            ControlRefusedError: the hub's rules do not allow the value.
            ControlError: the hub is closed or its thread has failed.
        """
        with self._lock:
            self._check_running()
            effects = self._state.handle(LocalSet(key, value), time.monotonic())
            if effects and isinstance(effects[0], Refuse):
                raise ControlRefusedError(effects[0].reason)
            self._carry_out(effects)
            self._wake()

    def get(self, key: str, default: Any = None) -> Any:
        """Return a copy of the key's value, or `default` when it is not set."""
        with self._lock:
            value = self._state.entries.get(key)
        return default if value is None else copy_value(key, value)

    def members(self) -> dict[str, Member]:
        """Return all members ever seen by name (`role/index`), those lost and left included."""
        with self._lock:
            return self._state.members()

    def events(self, deadline_s: float = 0.0) -> list[ControlEvent]:
        """Return what happened since the last call, oldest first; wait up to `deadline_s` for one event.

        Raises:
            ControlError: the hub's thread has failed.
        """
        with self._has_events:
            self._has_events.wait_for(
                lambda: self._events or self._failure or self._closing, timeout=deadline_s
            )
            if self._failure is not None:
                self._check_running()
            events = list(self._events)
            self._events.clear()
        return events

    def stats(self) -> dict[str, int]:
        """Return counters by name: malformed and undelivered frames, refused sets, dropped events."""
        with self._lock:
            return dict(self._state.counters)

    def close(self) -> None:
        """Send what is waiting, close the sockets and end the thread; safe to repeat."""
        with self._has_events:
            if self._closing:
                return
            self._closing = True
            self._has_events.notify_all()
            self._wake()
        self._thread.join(JOIN_DEADLINE_S)
        if not self._thread.is_alive():
            os.close(self._wake_fd)

    def __enter__(self) -> ControlHub:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _bind(self, kind: int, host: str, port: int) -> tuple[zmq.Socket[bytes], int]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK_FRAMES)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK_FRAMES)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an unknown peer is an error, not silence
            socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a member that reconnects takes its own place again
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        if self._keys is not None:
            self._keys.protect_hub(socket)
        socket.bind(f"tcp://{host}:{port or '*'}")
        endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return socket, int(endpoint.rsplit(":", 1)[1])

    def _stop_doorkeeper(self) -> None:
        if self._doorkeeper is not None:
            self._doorkeeper.close()

    def _check_running(self) -> None:
        if self._failure is not None:
            raise ControlError(
                f"ControlHub {self.uri}: its thread failed: {self._failure!r}"
            ) from self._failure
        if self._closing:
            raise ControlError(f"ControlHub {self.uri}: the hub must be open, got a call after close()")

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def _carry_out(self, effects: list[Any]) -> None:
        """File the effects; the caller holds the lock."""
        for effect in effects:
            if isinstance(effect, Tell):
                if len(self._events) == MAX_EVENTS:
                    self._state.counters["dropped_events"] += 1
                self._events.append(effect.event)
                self._has_events.notify_all()
            else:
                self._outbox.append(effect)

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._router, zmq.POLLIN)
            poller.register(self._wake_fd, zmq.POLLIN)
            tick_ms = max(1, int(self._timings.heartbeat_s * 1000 / 4))
            while not self._closing:
                ready = dict(poller.poll(tick_ms))
                if self._wake_fd in ready:
                    os.eventfd_read(self._wake_fd)
                self._receive()
                with self._lock:
                    self._carry_out(self._state.handle(Tick(), time.monotonic()))
                self._flush()
            self._flush()
        except Exception as error:
            _log.exception("control hub %s failed", self.uri)
            with self._has_events:
                self._failure = error
                self._has_events.notify_all()
        finally:
            self._router.close()
            self._publisher.close()
            self._stop_doorkeeper()
            self._context.term()

    def _receive(self) -> None:
        for _ in range(MAX_FRAMES_A_TURN):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            with self._lock:
                try:
                    if len(frames) != 2:
                        raise MalformedFrameError(f"control frame: parts must be 1, got {len(frames) - 1}")
                    message = decode_from_member(frames[1].bytes)
                    if self._doorkeeper is not None:
                        self._doorkeeper.check(frames[1], message.sender)
                except MalformedFrameError as error:
                    self._state.counters["malformed_frames"] += 1
                    _log.warning("%s", error)
                    continue
                self._carry_out(self._state.handle(Received(frames[0].bytes, message), time.monotonic()))
        self._wake()  # more may be waiting

    def _flush(self) -> None:
        while True:
            with self._lock:
                if not self._outbox:
                    return
                effect = self._outbox.popleft()
            frame = encode(effect.message)
            try:
                if isinstance(effect, Publish):
                    self._publisher.send(frame, zmq.NOBLOCK)
                else:
                    self._router.send_multipart([effect.peer, frame], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                    raise
                with self._lock:  # the member is gone or does not read; it asks again when it is back
                    self._state.counters["undelivered_frames"] += 1


def _check_loopback(host: str) -> None:
    try:
        is_loopback = ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise ControlRefusedError(
            f"ControlHub: host must be an IPv4 loopback address, got {host!r}; use 127.0.0.1, or give it "
            "keys (security=on)"
        )
