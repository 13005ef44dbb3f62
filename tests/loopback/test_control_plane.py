"""Hub and members over real sockets, some in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from relax.control.errors import ControlDeadlineError, ControlError, ControlRefusedError
from relax.control.hub import ControlHub
from relax.control.hub_state import KeyChanged, MemberChanged
from relax.control.member import ControlMember
from relax.control.messages import HubAddress, PolicyVersion
from relax.control.timings import ControlTimings

QUICK = ControlTimings(heartbeat_s=0.05, member_timeout_s=0.8, hub_timeout_s=0.8)
DEADLINE_S = 10.0

MEMBER_PROGRAM = """
import sys
from relax.control.member import ControlMember
from relax.control.timings import ControlTimings
timings = ControlTimings(heartbeat_s=0.05, member_timeout_s=0.8, hub_timeout_s=0.8)
with ControlMember(sys.argv[1], "rollout", int(sys.argv[2]), timings=timings) as member:
    print(member.phase, member.get("note"), member.policy_version, flush=True)
    member.wait_for(lambda: member.phase == "drain", 30.0)
    print(member.phase, member.get("note"), flush=True)
"""


@contextmanager
def member_process(uri: str, index: int = 0) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-c", MEMBER_PROGRAM, uri, str(index)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def hub() -> Iterator[ControlHub]:
    with ControlHub(timings=QUICK) as hub:
        yield hub


def until(hub: ControlHub, change: str, name: str) -> None:
    """Wait until the hub tells of that change; other events are dropped."""
    end_s = time.monotonic() + DEADLINE_S
    while (left_s := end_s - time.monotonic()) > 0:
        for event in hub.events(left_s):
            if isinstance(event, MemberChanged) and (event.change, event.member.name) == (change, name):
                return
    pytest.fail(f"{name} was not told as {change}: {hub.members()}")


def settles(member: ControlMember, predicate: Callable[[], bool]) -> bool:
    return member.wait_for(predicate, DEADLINE_S)


def test_late_joiner_has_the_whole_state_at_once(hub):
    """A process that starts after all was said knows it when its constructor returns, and hears what follows."""
    hub.set("phase", "pause")
    hub.set("note", {"text": "early"})
    with ControlMember(hub.uri, "actor", 0, timings=QUICK) as actor:
        actor.announce_policy_version(7, "/weights/7")
        with member_process(hub.uri) as process:
            assert process.stdout.readline() == (
                "pause {'text': 'early'} PolicyVersion(version=7, path=PosixPath('/weights/7'), incarnation=0)\n"
            )
            member = hub.members()["rollout/0"]
            assert (member.pid, member.state) == (process.pid, "joined")
            hub.set("note", 2)
            hub.set("phase/rollout", "drain")
            assert process.stdout.readline() == "drain 2\n"
            until(hub, "left", "rollout/0")
            assert process.wait(DEADLINE_S) == 0


def test_first_change_after_joining_is_never_missed(hub):
    """The constructor returns only once the subscription is in force: no delta is lost, no second snapshot taken."""
    for number in range(20):
        with ControlMember(hub.uri, "rollout", 0, timings=QUICK) as member:
            hub.set("number", number)
            assert settles(member, lambda member=member, number=number: member.get("number") == number)
            assert member.stats().get("gaps", 0) == 0


def test_phases_reach_the_role_they_are_meant_for(hub):
    """`phase/<role>` overrides `phase`, and stop wins."""
    with (
        ControlMember(hub.uri, "actor", 0, timings=QUICK) as actor,
        ControlMember(hub.uri, "rollout", 0, timings=QUICK) as rollout,
    ):
        assert (actor.phase, rollout.phase) == ("run", "run")
        hub.set("phase/rollout", "pause")
        assert settles(rollout, lambda: rollout.phase == "pause")
        hub.set("phase", "drain")
        assert settles(actor, lambda: actor.phase == "drain")
        assert rollout.phase == "pause"
        hub.set("phase/rollout", None)
        assert settles(rollout, lambda: rollout.phase == "drain")
        hub.set("phase", "stop")
        assert settles(actor, lambda: actor.phase == "stop")
        assert settles(rollout, lambda: rollout.phase == "stop")


def test_versions_only_rise_and_only_the_actor_announces(hub):
    """Each refusal reaches the caller with its reason; the announced version reaches all."""
    with (
        ControlMember(hub.uri, "actor", 0, timings=QUICK) as actor,
        ControlMember(hub.uri, "rollout", 0, timings=QUICK) as rollout,
    ):
        assert actor.policy_version is None
        for version in range(1, 6):
            actor.announce_policy_version(version, Path(f"/weights/{version}"))
            assert actor.policy_version == PolicyVersion(version, Path(f"/weights/{version}"))
        assert settles(rollout, lambda: rollout.policy_version == PolicyVersion(5, Path("/weights/5")))
        with pytest.raises(ControlRefusedError, match="the version must be above 5, got 4"):
            actor.announce_policy_version(4, "/weights/4")
        with pytest.raises(ControlRefusedError, match="the role must be 'actor', got the role 'rollout'"):
            rollout.announce_policy_version(6, "/weights/6")
        with pytest.raises(ControlRefusedError, match="the role must be 'actor', got the hub's own process"):
            hub.set("policy_version", {"version": 6, "path": "/weights/6"})
        assert hub.get("policy_version") == {"version": 5, "path": "/weights/5", "incarnation": 0}
        assert hub.stats()["refused_sets"] == 3
        versions = [event.value["version"] for event in hub.events() if isinstance(event, KeyChanged)]
        assert versions == [1, 2, 3, 4, 5]


def test_members_set_keys_and_status(hub):
    """A member can ask for an evaluation; its status shows at the hub."""
    with ControlMember(hub.uri, "actor", 0, timings=QUICK) as actor:
        actor.set("evaluate", {"request": 1, "policy_version": 3})
        assert hub.get("evaluate") == {"request": 1, "policy_version": 3}
        assert actor.get("evaluate") == {"request": 1, "policy_version": 3}
        actor.set_status("step 3")
        end_s = time.monotonic() + DEADLINE_S
        while hub.members()["actor/0"].status != "step 3" and time.monotonic() < end_s:
            hub.events(0.02)
        assert hub.members()["actor/0"].status == "step 3"


def test_restarted_hub_resynchronises_its_members():
    """A new epoch at the same address: members take its state over, and it learns of them."""
    first = ControlHub(timings=QUICK)
    address = HubAddress.parse(first.uri)
    with ControlMember(first.uri, "actor", 0, timings=QUICK) as actor:
        first.set("note", "old")
        first.set("old", 1)
        assert settles(actor, lambda: actor.get("old") == 1)
        first.close()
        assert settles(actor, lambda: actor.phase == "stop")  # silence
        entries = {"note": "new", "policy_version": {"version": 4, "path": "/w"}}
        ports = (address.router_port, address.publisher_port)
        with ControlHub(ports=ports, entries=entries, timings=QUICK) as second:
            assert second.uri == first.uri
            assert settles(actor, lambda: actor.get("note") == "new" and actor.phase == "run")
            assert (actor.get("old"), actor.policy_version) == (None, PolicyVersion(4, Path("/w")))
            until(second, "joined", "actor/0")
            actor.announce_policy_version(5, "/w5")


def test_stopped_member_is_lost_and_comes_back(hub):
    """SIGSTOP is silence; after SIGCONT the member returns with what it missed, and did not give up itself."""
    with member_process(hub.uri) as process:
        assert process.stdout.readline() == "run None None\n"
        process.send_signal(signal.SIGSTOP)
        until(hub, "lost", "rollout/0")
        assert hub.members()["rollout/0"].state == "lost"
        hub.set("note", "said meanwhile")
        process.send_signal(signal.SIGCONT)
        until(hub, "returned", "rollout/0")
        hub.set("phase", "drain")
        assert process.stdout.readline() == "drain said meanwhile\n"


def test_second_process_of_a_name_replaces_the_first(hub):
    """The first one is told to stop for good."""
    with (
        ControlMember(hub.uri, "actor", 0, timings=QUICK) as first,
        ControlMember(hub.uri, "actor", 0, timings=QUICK) as second,
    ):
        until(hub, "replaced", "actor/0")
        assert settles(first, lambda: first.phase == "stop")
        assert "another process has joined under this name" in first.dismissal
        assert second.phase == "run"
        with pytest.raises(ControlRefusedError, match="a dismissal: actor/0"):
            first.set("a", 1)


def test_malformed_frames_are_counted_and_harm_nobody(hub):
    """Noise of any shape to both sockets; the plane goes on."""
    address = HubAddress.parse(hub.uri)
    with zmq.Context() as context:
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 1000)
        dealer.connect(address.router)
        for frames in (
            [b"noise"],
            [b""],
            [b"a", b"b"],
            [msgspec.msgpack.encode({"type": "hello"})],
            [b"\x91" * 5000],
        ):
            dealer.send_multipart(frames)
        with ControlMember(hub.uri, "actor", 0, timings=QUICK) as actor:
            end_s = time.monotonic() + DEADLINE_S
            while hub.stats().get("malformed_frames", 0) < 5 and time.monotonic() < end_s:
                hub.events(0.02)
            assert hub.stats()["malformed_frames"] == 5
            actor.set("a", 1)
        dealer.close()


def test_member_takes_no_noise_for_a_hub(caplog):
    """A publisher that is no hub of ours is heard as noise, and joining fails by its deadline."""
    with zmq.Context() as context:
        router, publisher = context.socket(zmq.ROUTER), context.socket(zmq.PUB)
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (router, publisher)]
        stop = threading.Event()

        def babble() -> None:
            while not stop.is_set():
                publisher.send(b"noise")
                if router.poll(10):
                    peer, _ = router.recv_multipart()
                    router.send_multipart([peer, b"\xc1"])

        thread = threading.Thread(target=babble)
        thread.start()
        with pytest.raises(ControlDeadlineError):
            ControlMember(str(HubAddress("127.0.0.1", *ports)), "actor", 0, connect_deadline_s=0.3)
        stop.set()
        thread.join(DEADLINE_S)
        router.close(linger=0)
        publisher.close(linger=0)
    assert "control frame: 5 bytes must be one message" in caplog.text


def test_connecting_to_nobody_names_the_address():
    """The error says where, for how long and what to look at."""
    hub = ControlHub(timings=QUICK)
    uri = hub.uri
    hub.close()
    threads = threading.active_count()
    with pytest.raises(ControlDeadlineError) as raised:
        ControlMember(uri, "rollout", 2, connect_deadline_s=0.2)
    assert str(raised.value) == (
        f"ControlMember rollout/2: the control hub at {uri} must answer within 0.2 s, got silence; "
        "check that the driver runs and that the URI is its own"
    )
    assert threading.active_count() == threads


def test_setting_a_key_without_a_hub_ends_by_its_deadline(hub):
    """No call hangs."""
    with ControlMember(hub.uri, "actor", 0, timings=QUICK) as actor:
        hub.close()
        with pytest.raises(ControlDeadlineError, match=r"must answer within 0\.2 s when 'a' is set"):
            actor.set("a", 1, deadline_s=0.2)


def test_wait_for_ends_by_its_deadline(hub):
    """False, not an exception."""
    with ControlMember(hub.uri, "actor", 0, timings=QUICK) as actor:
        assert not actor.wait_for(lambda: False, 0.1)
        assert actor.wait_for(lambda: True, 0.0)


def test_close_leaves_no_thread_and_no_descriptor():
    """Everything that was opened is closed; closing twice and calls afterwards are clear."""
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        hub = ControlHub(timings=QUICK)
        member = ControlMember(hub.uri, "actor", 0, timings=QUICK)
        member.close()
        member.close()
        hub.close()
        hub.close()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    with pytest.raises(ControlError, match="must be open, got a call after close"):
        hub.set("a", 1)
    with pytest.raises(ControlError, match="must be open, got a call after close"):
        member.set("a", 1)
    assert not member.wait_for(lambda: False, 5.0)


def test_hub_refuses_to_listen_beyond_loopback():
    """Nothing unauthenticated leaves the machine."""
    with pytest.raises(ControlRefusedError, match=r"host must be an IPv4 loopback address, got '0\.0\.0\.0'"):
        ControlHub("0.0.0.0")


def test_hub_names_ports_that_are_taken(hub):
    """Two hubs cannot share an address."""
    address = HubAddress.parse(hub.uri)
    with pytest.raises(ControlError, match="must be free, got: Address already in use"):
        ControlHub(ports=(address.router_port, address.publisher_port))


def test_many_threads_set_keys_at_once(hub):
    """Calls from any thread: nothing is lost and every copy is the hub's."""
    with (
        ControlMember(hub.uri, "actor", 0, timings=QUICK) as actor,
        ControlMember(hub.uri, "rollout", 0, timings=QUICK) as rollout,
    ):

        def work(owner: ControlHub | ControlMember, name: str) -> None:
            for number in range(50):
                owner.set(f"{name}/{number % 5}", number)

        threads = [
            threading.Thread(target=work, args=(owner, f"{owner_name}{number}"))
            for owner_name, owner in (("hub", hub), ("actor", actor), ("rollout", rollout))
            for number in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        for name in ("hub0", "hub1", "actor0", "actor1", "rollout0", "rollout1"):
            for slot in range(5):
                assert hub.get(f"{name}/{slot}") == 45 + slot
                assert settles(
                    rollout, lambda key=f"{name}/{slot}", value=45 + slot: rollout.get(key) == value
                )


def test_control_plane_imports_nothing_heavy():
    """No torch, no transformers, no pyarrow, and quickly."""
    program = (
        "import sys, relax.control.hub, relax.control.member, relax.launch.local, relax.launch.parent; "
        "print([name for name in ('torch', 'transformers', 'pyarrow', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"
