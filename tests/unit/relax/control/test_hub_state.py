"""The hub's pure state: membership, keys, permissions."""

from __future__ import annotations

import pytest

from relax.control.errors import ControlRefusedError
from relax.control.hub_state import (
    MAX_ENTRIES,
    HubState,
    KeyChanged,
    LocalSet,
    MemberChanged,
    Publish,
    Received,
    Refuse,
    Send,
    Tell,
    Tick,
)
from relax.control.messages import (
    Delta,
    Dismissal,
    Hello,
    HubHeartbeat,
    Identity,
    Leave,
    MemberHeartbeat,
    Reply,
    SetKey,
    Snapshot,
)
from relax.control.timings import ControlTimings

TIMINGS = ControlTimings(heartbeat_s=1.0, member_timeout_s=5.0)


def identity(role: str, index: int = 0, instance: int = 0) -> Identity:
    return Identity(role=role, index=index, pid=100 + instance, instance=f"{instance:032x}")


def heartbeat(role: str, instance: int = 0, status: str = "") -> Received:
    who = identity(role, instance=instance)
    return Received(b"peer", MemberHeartbeat(sender=who, status=status, epoch="", seq=0))


def set_key(role: str, key: str, value: object, request: int = 1) -> Received:
    return Received(b"peer", SetKey(sender=identity(role), request=request, key=key, value=value))


def changes(effects: list) -> list[tuple[str, str]]:
    events = [effect.event for effect in effects if isinstance(effect, Tell)]
    return [(event.change, event.member.name) for event in events if isinstance(event, MemberChanged)]


def refusal(effects: list) -> str:
    return next(
        effect.message.refusal
        for effect in effects
        if isinstance(effect, Send) and isinstance(effect.message, Reply)
    )


def tick_until(state: HubState, start: float, end: float) -> list:
    effects: list = []
    steps = int((end - start) * 4)
    for step in range(1, steps + 1):
        effects += state.handle(Tick(), start + step / 4)
    return effects


def test_hello_is_answered_with_the_whole_state_and_a_heartbeat_to_all():
    """A newcomer gets a snapshot, and a publication that proves its subscription."""
    state = HubState(TIMINGS, {"phase": "pause"})
    effects = state.handle(Received(b"p1", Hello(sender=identity("rollout", 3), status="loading")), 10.0)
    member = state.members()["rollout/3"]
    assert effects == [
        Tell(MemberChanged("joined", member)),
        Send(b"p1", Snapshot(epoch=state.epoch, seq=0, entries={"phase": "pause"})),
        Publish(HubHeartbeat(epoch=state.epoch, seq=0)),
    ]
    assert (member.role, member.index, member.pid, member.status, member.state, member.last_heartbeat_s) == (
        "rollout",
        3,
        100,
        "loading",
        "joined",
        10.0,
    )


def test_set_publishes_a_numbered_delta_and_tells_its_author():
    """Each change has the next seq."""
    state = HubState(TIMINGS)
    assert state.handle(LocalSet("evaluate", {"request": 1}), 0.0) == [
        Publish(Delta(epoch=state.epoch, seq=1, key="evaluate", value={"request": 1})),
        Tell(KeyChanged("evaluate", {"request": 1}, "")),
    ]
    state.handle(heartbeat("rollout"), 0.0)
    assert state.handle(set_key("rollout", "note", "x", request=9), 0.0) == [
        Publish(Delta(epoch=state.epoch, seq=2, key="note", value="x")),
        Tell(KeyChanged("note", "x", "rollout/0")),
        Send(b"peer", Reply(epoch=state.epoch, seq=2, request=9)),
    ]


def test_set_of_the_same_value_makes_no_delta():
    """A repeated request is answered and changes nothing."""
    state = HubState(TIMINGS)
    state.handle(LocalSet("a", 1), 0.0)
    assert state.handle(LocalSet("a", 1), 0.0) == []
    assert state.handle(LocalSet("b", None), 0.0) == []
    assert state.seq == 1


def test_set_of_none_removes_the_key():
    """Null is absence."""
    state = HubState(TIMINGS, {"a": 1})
    assert state.handle(LocalSet("a", None), 0.0)[0] == Publish(
        Delta(epoch=state.epoch, seq=1, key="a", value=None)
    )
    assert state.entries == {}


def test_entries_are_shared_with_no_caller():
    """Changing a value after it was set changes nothing."""
    state = HubState(TIMINGS)
    value = [1]
    state.handle(LocalSet("a", value), 0.0)
    value.append(2)
    assert state.entries == {"a": [1]}


def test_silence_is_loss_once_and_a_heartbeat_a_return():
    """joined -> lost -> joined, each told once."""
    state = HubState(TIMINGS)
    assert changes(state.handle(heartbeat("rollout"), 0.0)) == [("joined", "rollout/0")]
    assert changes(tick_until(state, 0.0, 5.0)) == []
    assert changes(tick_until(state, 5.0, 30.0)) == [("lost", "rollout/0")]
    assert state.members()["rollout/0"].state == "lost"
    assert changes(state.handle(heartbeat("rollout"), 31.0)) == [("returned", "rollout/0")]
    assert state.members()["rollout/0"].state == "joined"


def test_heartbeats_keep_a_member_and_renew_its_status():
    """No loss while it is heard."""
    state = HubState(TIMINGS)
    told = []
    for second in range(60):
        told += changes(state.handle(heartbeat("actor", status=f"step {second}"), float(second)))
        told += changes(state.handle(Tick(), second + 0.5))
    assert told == [("joined", "actor/0")]
    assert state.members()["actor/0"].status == "step 59"


def test_a_hub_that_was_away_blames_nobody():
    """After the hub itself was stopped for an hour, members have their full time again."""
    state = HubState(TIMINGS)
    state.handle(heartbeat("rollout"), 0.0)
    assert changes(state.handle(Tick(), 3600.0)) == []
    assert changes(state.handle(heartbeat("rollout"), 3600.1)) == []


def test_leave_is_told_and_a_late_heartbeat_does_not_undo_it():
    """left is final for that process."""
    state = HubState(TIMINGS)
    state.handle(heartbeat("rollout"), 0.0)
    assert changes(state.handle(Received(b"peer", Leave(sender=identity("rollout"))), 1.0)) == [
        ("left", "rollout/0")
    ]
    assert state.handle(heartbeat("rollout"), 1.1) == []
    assert changes(tick_until(state, 1.0, 20.0)) == []
    assert state.members()["rollout/0"].state == "left"
    assert changes(state.handle(heartbeat("rollout", instance=1), 21.0)) == [("joined", "rollout/0")]


def test_a_new_process_takes_the_place_and_the_old_one_is_dismissed():
    """A hung service that wakes up after it was replaced is told to stop."""
    state = HubState(TIMINGS)
    state.handle(heartbeat("actor", instance=1), 0.0)
    assert changes(state.handle(heartbeat("actor", instance=2), 1.0)) == [("replaced", "actor/0")]
    reason = "actor/0 (pid 101): another process has joined under this name"
    assert state.handle(heartbeat("actor", instance=1), 2.0) == [
        Send(b"peer", Dismissal(epoch=state.epoch, seq=0, reason=reason))
    ]
    assert state.members()["actor/0"].pid == 102


def test_only_the_actor_announces_and_versions_never_go_back():
    """A refusal has its reason and is counted; the newest announcement may be repeated."""
    state = HubState(TIMINGS)
    first = {"version": 3, "path": "/w/3"}
    assert refusal(state.handle(set_key("actor", "policy_version", first), 0.0)) == ""
    assert refusal(state.handle(set_key("actor", "policy_version", first), 0.0)) == ""
    assert state.seq == 1
    assert refusal(
        state.handle(set_key("rollout", "policy_version", {"version": 4, "path": "/w/4"}), 0.0)
    ) == (
        "control key 'policy_version': the role must be 'actor', got the role 'rollout'; "
        "a resumed run gives the hub its version as one of the initial entries"
    )
    assert refusal(state.handle(set_key("actor", "policy_version", {"version": 2, "path": "/w/2"}), 0.0)) == (
        "control key 'policy_version': the version must be above 3, got 2; "
        "versions never go back within an incarnation"
    )
    assert refusal(state.handle(set_key("actor", "policy_version", {"version": 3, "path": "/x"}), 0.0)) == (
        "control key 'policy_version': version 3 must keep its path '/w/3', got '/x'; publish under a new version"
    )
    assert "must be {version, path}" in refusal(state.handle(set_key("actor", "policy_version", None), 0.0))
    assert "must be {version, path}" in refusal(
        state.handle(set_key("actor", "policy_version", {"version": True, "path": "/w"}), 0.0)
    )
    assert isinstance(state.handle(LocalSet("policy_version", {"version": 9, "path": "/"}), 0.0)[0], Refuse)
    assert state.counters["refused_sets"] == 6
    assert state.entries["policy_version"] == first


@pytest.mark.parametrize("key", ["phase", "phase/rollout"])
def test_phase_keys_take_only_phases(key):
    """A misspelt phase is refused with the choices."""
    state = HubState(TIMINGS)
    assert state.handle(LocalSet(key, "halt"), 0.0) == [
        Refuse(f"control key {key!r}: the phase must be one of run, pause, drain, stop, got 'halt'")
    ]
    assert isinstance(state.handle(LocalSet(key, ["run"]), 0.0)[0], Refuse)
    assert isinstance(state.handle(LocalSet(key, "drain"), 0.0)[0], Publish)


def test_scale_keys_take_only_numbers_of_rollout_services():
    """None takes the wish back."""
    state = HubState(TIMINGS)
    for value in (0, 1001, True, 2.0, "2"):
        assert state.handle(LocalSet("scale/rollout", value), 0.0) == [
            Refuse(
                f"control key 'scale/rollout': the number of services must be from 1 to 1000, got {value!r}"
            )
        ]
    assert state.handle(LocalSet("scale/actor", 2), 0.0) == [
        Refuse("control key 'scale/actor': the role must be rollout, got 'actor'")
    ]
    for number in (2, None):
        assert isinstance(state.handle(LocalSet("scale/rollout", number), 0.0)[0], Publish)


@pytest.mark.parametrize(("key", "value"), [("", 1), ("k" * 201, 1), ("k", object()), ("k", "x" * 70_000)])
def test_set_refuses_impossible_keys_and_values(key, value):
    """Nothing that could not be sent enters the state."""
    state = HubState(TIMINGS)
    assert isinstance(state.handle(LocalSet(key, value), 0.0)[0], Refuse)
    assert state.entries == {}


def test_set_refuses_more_keys_than_allowed():
    """The state stays small."""
    state = HubState(TIMINGS, {f"k{number}": 1 for number in range(MAX_ENTRIES)})
    assert isinstance(state.handle(LocalSet("one more", 1), 0.0)[0], Refuse)
    assert isinstance(state.handle(LocalSet("k0", 2), 0.0)[0], Publish)


def test_initial_entries_are_checked():
    """A resumed run may begin with a policy version; a wrong phase is refused."""
    assert HubState(TIMINGS, {"policy_version": {"version": 7, "path": "/w"}}).seq == 0
    with pytest.raises(ControlRefusedError, match="phase must be one of"):
        HubState(TIMINGS, {"phase": "go"})


def test_heartbeats_to_all_come_at_the_interval():
    """One publication an interval, whatever the number of ticks."""
    state = HubState(TIMINGS)
    effects = tick_until(state, 0.0, 10.0)
    assert effects == [Publish(HubHeartbeat(epoch=state.epoch, seq=0))] * 10


def test_versions_go_back_with_a_later_incarnation_only():
    """Its numbers begin at a checkpoint; who still speaks of the one before is refused."""
    state = HubState(TIMINGS)

    def announce(version: int, incarnation: int) -> str:
        value = {"version": version, "path": f"/w/{version}", "incarnation": incarnation}
        return refusal(state.handle(set_key("actor", "policy_version", value), 0.0))

    assert announce(7, 0) == announce(4, 1) == announce(5, 1) == ""
    assert announce(8, 0) == (
        "control key 'policy_version': the incarnation must be 1, got 0; "
        "the run has gone back to a checkpoint meanwhile"
    )
    assert "the version must be above 5, got 4" in announce(4, 1)
    assert state.entries["policy_version"]["version"] == 5
