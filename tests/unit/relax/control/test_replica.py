"""A member's copy of the state, under loss, reordering and restarts; and what the session sends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax.control.hub_state import HubState, LocalSet, Publish, Received, Send
from relax.control.hub_state import Tick as HubTick
from relax.control.messages import (
    Delta,
    Dismissal,
    Hello,
    HubHeartbeat,
    Identity,
    MemberHeartbeat,
    Reply,
    SetKey,
    Snapshot,
)
from relax.control.replica import Heard, MemberSession, Replica, Tick, effective_phase
from relax.control.timings import ControlTimings

TIMINGS = ControlTimings(heartbeat_s=1.0, member_timeout_s=5.0, hub_timeout_s=5.0, retry_s=0.1)
WHO = Identity(role="rollout", index=0, pid=1, instance="0" * 32)


def delta(seq: int, value: object, epoch: str = "e") -> Delta:
    return Delta(epoch=epoch, seq=seq, key="k", value=value)


def joined_session(now: float = 0.0, **entries: object) -> MemberSession:
    session = MemberSession(WHO, TIMINGS, now)
    session.handle(Tick(), now)
    session.handle(Heard(Snapshot(epoch="e", seq=1, entries=entries), published=False), now)
    session.handle(Heard(HubHeartbeat(epoch="e", seq=1), published=True), now)
    return session


def test_deltas_in_order_are_applied():
    """The plain case: no snapshot is needed."""
    replica = Replica()
    replica.apply_snapshot(Snapshot(epoch="e", seq=1, entries={"k": 1}))
    assert replica.apply_delta(delta(2, 2))
    assert replica.apply_delta(delta(3, None))
    assert (replica.entries, replica.seq, replica.needs_snapshot) == ({}, 3, False)


def test_a_gap_needs_a_snapshot_unless_the_missing_delta_comes():
    """Reordered deltas are kept until they fit."""
    replica = Replica()
    replica.apply_snapshot(Snapshot(epoch="e", seq=1, entries={}))
    assert not replica.apply_delta(delta(3, 3))
    assert replica.needs_snapshot
    assert replica.apply_delta(delta(2, 2))
    assert (replica.entries, replica.seq, replica.needs_snapshot) == ({"k": 3}, 3, False)


def test_deltas_before_the_snapshot_are_kept_and_older_ones_dropped():
    """Subscribe, then snapshot, then only what is newer."""
    replica = Replica()
    replica.apply_delta(delta(4, 4))
    replica.apply_delta(delta(6, 6))
    replica.apply_snapshot(Snapshot(epoch="e", seq=5, entries={"k": 5}))
    assert (replica.entries, replica.seq, replica.needs_snapshot) == ({"k": 6}, 6, False)
    assert not replica.apply_delta(delta(5, 5))
    assert replica.entries == {"k": 6}


def test_a_heartbeat_ahead_shows_the_loss_of_the_last_delta():
    """The position in the heartbeat is what finds it."""
    replica = Replica()
    replica.apply_snapshot(Snapshot(epoch="e", seq=1, entries={}))
    replica.observe("e", 1)
    assert not replica.needs_snapshot
    replica.observe("e", 2)
    assert replica.needs_snapshot


def test_an_older_snapshot_does_not_take_the_copy_back():
    """A slow answer is overtaken by deltas."""
    replica = Replica()
    replica.apply_snapshot(Snapshot(epoch="e", seq=5, entries={"k": 5}))
    assert not replica.apply_snapshot(Snapshot(epoch="e", seq=4, entries={"k": 4}))
    assert replica.entries == {"k": 5}


def test_another_epoch_needs_a_snapshot_and_then_replaces_all():
    """A restarted hub counts from zero and its state counts."""
    replica = Replica()
    replica.apply_snapshot(Snapshot(epoch="e", seq=9, entries={"k": 9, "old": 1}))
    replica.apply_delta(delta(1, 1, epoch="f"))
    assert replica.needs_snapshot
    assert replica.entries == {"k": 9, "old": 1}
    replica.apply_snapshot(Snapshot(epoch="f", seq=1, entries={"k": 1}))
    assert (replica.epoch, replica.seq, replica.entries) == ("f", 1, {"k": 1})
    assert not replica.needs_snapshot


KEYS = st.sampled_from(["a", "b", "phase"])
CHANGES = st.one_of(
    st.tuples(st.just("set"), KEYS, st.sampled_from(["run", "drain", None])),
    st.tuples(st.just("restart"), st.just(""), st.none()),
    st.tuples(st.just("tick"), st.just(""), st.none()),
)


@given(st.lists(CHANGES, max_size=30), st.data())
def test_any_loss_and_reorder_ends_equal_after_heartbeats(script, data):
    """Messages both ways are lost, delayed and swapped at will; one undisturbed heartbeat or two mend the copy."""
    hub = HubState(TIMINGS)
    session = MemberSession(WHO, TIMINGS, 0.0)
    wire: list[Heard] = []
    now = 0.0

    def to_member(effects: list) -> None:
        for effect in effects:
            if isinstance(effect, Publish):
                wire.append(Heard(effect.message, published=True))
            elif isinstance(effect, Send):
                wire.append(Heard(effect.message, published=False))

    def to_hub(messages: list) -> None:
        for message in messages:
            to_member(hub.handle(Received(b"p", message), now))

    for action, key, value in script:
        now += 0.5
        if action == "set":
            to_member(hub.handle(LocalSet(key, value), now))
        elif action == "restart":
            hub = HubState(TIMINGS, hub.entries)
        else:
            to_member(hub.handle(HubTick(), now))
        sent = session.handle(Tick(), now)
        to_hub(sent if data.draw(st.booleans()) else [])
        for _ in range(data.draw(st.integers(0, len(wire)))):
            heard = wire.pop(data.draw(st.integers(0, len(wire) - 1)))
            if data.draw(st.booleans()):
                sent = session.handle(heard, now)
                to_hub(sent if data.draw(st.booleans()) else [])
    for _ in range(8):  # from here on nothing is lost
        now += 0.6
        to_member(hub.handle(HubTick(), now))
        to_hub(session.handle(Tick(), now))
        while wire:
            to_hub(session.handle(wire.pop(0), now))
    assert session.joined
    assert (session.replica.epoch, session.replica.seq) == (hub.epoch, hub.seq)
    assert session.replica.entries == hub.entries


@pytest.mark.parametrize(
    ("entries", "phase"),
    [
        ({}, "run"),
        ({"phase": "pause"}, "pause"),
        ({"phase": "pause", "phase/rollout": "run"}, "run"),
        ({"phase": "run", "phase/rollout": "drain"}, "drain"),
        ({"phase": "run", "phase/actor": "drain"}, "run"),
        ({"phase": "stop", "phase/rollout": "run"}, "stop"),
        ({"phase": "run", "phase/rollout": "stop"}, "stop"),
        ({"phase": "a later release's"}, "stop"),
        ({"phase/rollout": "run", "phase/rollout/1": "drain"}, "drain"),
        ({"phase": "pause", "phase/rollout/2": "drain"}, "pause"),
        ({"phase/rollout/1": "run", "phase": "stop"}, "stop"),
    ],
)
def test_phase_of_a_role_overrides_the_general_one_and_stop_wins(entries, phase):
    """The precedence table."""
    assert effective_phase(entries, "rollout", 1) == phase


def test_session_joins_only_when_its_subscription_is_proved():
    """A snapshot alone is not enough: the next delta could be missed."""
    session = MemberSession(WHO, TIMINGS, 0.0)
    assert session.handle(Tick(), 0.0) == [Hello(sender=WHO)]
    assert session.handle(Tick(), 0.05) == []
    session.handle(Heard(Snapshot(epoch="e", seq=0, entries={}), published=False), 0.06)
    assert not session.joined
    assert session.handle(Tick(), 0.1) == [Hello(sender=WHO)]
    session.handle(Heard(HubHeartbeat(epoch="e", seq=0), published=True), 0.11)
    assert session.joined
    assert session.handle(Tick(), 0.5) == []


def test_session_asks_at_once_when_a_gap_appears_and_backs_off():
    """Requests for a snapshot double their interval up to the heartbeat's."""
    session = joined_session()
    assert session.handle(Heard(delta(3, 1), published=True), 0.1) == [Hello(sender=WHO)]
    asked = [
        round(step / 100, 2)
        for step in range(11, 400)
        if any(isinstance(message, Hello) for message in session.handle(Tick(), step / 100))
    ]
    assert asked == [0.2, 0.4, 0.8, 1.6, 2.6, 3.6]
    assert session.counters == {"snapshots": 1, "gaps": 1}


def test_session_sends_heartbeats_with_its_position_and_status():
    """One an interval."""
    session = joined_session()
    session.status = "step 4"
    sent = [message for step in range(1, 31) for message in session.handle(Tick(), step / 10)]
    assert sent == [MemberHeartbeat(sender=WHO, status="step 4", epoch="e", seq=1)] * 3


def test_session_stops_while_the_hub_is_silent():
    """Silence is stop; the first word ends it."""
    session = joined_session(phase="run")
    phases = [(session.handle(Tick(), step / 4), session.phase)[1] for step in range(1, 25)]
    assert phases == ["run"] * 20 + ["stop"] * 4
    before = session.changes
    session.handle(Heard(HubHeartbeat(epoch="e", seq=1), published=True), 6.1)
    assert session.phase == "run"
    assert session.changes > before


def test_session_that_was_stopped_does_not_blame_the_hub():
    """One long step counts little, so a woken process reads its messages before it gives up."""
    session = joined_session(phase="run")
    session.handle(Tick(), 1000.0)
    assert session.phase == "run"


def test_session_repeats_a_request_until_it_is_answered():
    """A lost reply costs an interval, not the change."""
    session = joined_session()
    request = session.ask("a", 1, 0.2)
    ask = SetKey(sender=WHO, request=request, key="a", value=1)
    assert session.due_s() == 0.2
    assert session.handle(Tick(), 0.2) == [ask]
    assert session.handle(Tick(), 0.9) == []
    assert ask in session.handle(Tick(), 1.2)
    assert session.outcome(request) is None


def test_session_shows_an_accepted_change_only_once_its_copy_has_it():
    """What was set can be read back at once."""
    session = joined_session()
    request = session.ask("k", 2, 0.0)
    reply = Reply(epoch="e", seq=2, request=request)
    session.handle(Heard(reply, published=False), 0.0)
    assert session.outcome(request) is None
    assert session.joined
    session.handle(Heard(delta(2, 2), published=True), 0.0)
    assert session.outcome(request) == reply
    refused = session.ask("k", 3, 0.0)
    session.handle(Heard(Reply(epoch="e", seq=9, request=refused, refusal="no"), published=False), 0.0)
    assert session.outcome(refused) == Reply(epoch="e", seq=9, request=refused, refusal="no")


def test_session_that_is_dismissed_stops_and_falls_silent():
    """It must not take its place back from a restarted hub."""
    session = joined_session(phase="run")
    session.handle(Heard(Dismissal(epoch="e", seq=1, reason="replaced"), published=False), 0.5)
    assert (session.phase, session.dismissal) == ("stop", "replaced")
    session.handle(Heard(HubHeartbeat(epoch="f", seq=0), published=True), 0.6)
    assert [message for step in range(1, 50) for message in session.handle(Tick(), step / 4)] == []
    assert session.due_s() > 12.0
