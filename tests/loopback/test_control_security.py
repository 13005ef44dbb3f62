"""The control plane with CURVE keys, over real sockets."""

from __future__ import annotations

import pytest
import zmq

from relax.control.curve import CurveKeys, make_curve_keys
from relax.control.errors import ControlDeadlineError, ControlRefusedError
from relax.control.hub import ControlHub
from relax.control.member import ControlMember
from relax.control.messages import HubAddress
from relax.control.timings import ControlTimings
from tests.kit.recorder import Recorder, replay
from tests.kit.storage import until

QUICK = ControlTimings(heartbeat_s=0.05, member_timeout_s=0.8, hub_timeout_s=0.8)
REFUSED_S = 0.5


@pytest.fixture
def keys(tmp_path):
    """Keys of a hub and two members."""
    for name in ("server", "actor-0", "rollout-0"):
        (tmp_path / name).mkdir()
    make_curve_keys(tmp_path, ["actor-0", "rollout-0"])
    return tmp_path


@pytest.fixture
def hub(keys):
    """A hub that lets these in."""
    with ControlHub(timings=QUICK, keys=keys) as hub:
        yield hub


def test_members_with_keys_join_and_hear(hub, keys):
    """Both ways: a member's set reaches the other."""
    with (
        ControlMember(hub.uri, "actor", 0, timings=QUICK, keys=keys / "actor-0") as actor,
        ControlMember(hub.uri, "rollout", 0, timings=QUICK, keys=keys / "rollout-0") as rollout,
    ):
        actor.announce_policy_version(1, "/weights/1")
        assert rollout.wait_for(lambda: rollout.policy_version is not None, 10.0)
        assert rollout.policy_version.version == 1


def test_stranger_without_keys_hears_nothing(hub):
    """The constructor ends at its deadline; the hub never saw a member."""
    with pytest.raises(ControlDeadlineError, match=r"must answer within 0\.5 s, got silence"):
        ControlMember(hub.uri, "rollout", 7, timings=QUICK, connect_deadline_s=REFUSED_S)
    assert hub.members() == {}


def test_keys_of_another_run_are_refused(hub, tmp_path):
    """They name another hub, and this one does not know them."""
    other = tmp_path / "other"
    for name in ("server", "rollout-0"):
        (other / name).mkdir(parents=True)
    make_curve_keys(other, ["rollout-0"])
    with pytest.raises(ControlDeadlineError):
        ControlMember(
            hub.uri, "rollout", 0, timings=QUICK, connect_deadline_s=REFUSED_S, keys=other / "rollout-0"
        )
    assert hub.members() == {}


def test_unknown_member_with_the_hubs_public_key_is_refused(hub, keys):
    """The hub's public key is no secret."""
    public, secret = zmq.curve_keypair()
    hub_key = CurveKeys.load(keys / "server").public
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.linger = 0
        subscriber.subscribe(b"")
        subscriber.curve_publickey, subscriber.curve_secretkey = public, secret
        subscriber.curve_serverkey = hub_key.encode()
        subscriber.connect(HubAddress.parse(hub.uri).publisher)
        for number in range(20):
            hub.set("note", str(number))
        assert not subscriber.poll(int(REFUSED_S * 1000))


def test_recorded_bytes_of_a_member_change_nothing_when_sent_again(hub, keys):
    """A session's keys die with it, so what was recorded opens no second one."""
    address = HubAddress.parse(hub.uri)
    recorded = []
    with Recorder(address.router, recorded) as router:
        uri = str(HubAddress("127.0.0.1", router, int(address.publisher.rsplit(":", 1)[1])))
        with ControlMember(uri, "rollout", 0, timings=QUICK, keys=keys / "rollout-0") as member:
            member.set("note", "first")
            until(lambda: hub.get("note") == "first")
    until(lambda: _states(hub) != ["joined"])
    hub.set("note", "second")
    replay(int(address.router.rsplit(":", 1)[1]), recorded, silence_s=REFUSED_S)
    assert len(recorded) > 1
    assert hub.get("note") == "second"
    assert _states(hub) in (["left"], ["lost"])


def _states(hub) -> list[str]:
    return [member.state for member in hub.members().values()]


def test_member_cannot_speak_for_another_role(hub, keys):
    """The keys of a rollout worker announce no weights."""
    with pytest.raises(ControlDeadlineError):
        ControlMember(
            hub.uri, "actor", 0, timings=QUICK, connect_deadline_s=REFUSED_S, keys=keys / "rollout-0"
        )
    assert hub.members() == {}
    assert hub.stats()["malformed_frames"] > 0


def test_keys_of_a_role_are_good_for_all_its_members(tmp_path):
    """A run has one pair for each role."""
    for name in ("server", "rollout"):
        (tmp_path / name).mkdir()
    make_curve_keys(tmp_path, ["rollout"])
    with (
        ControlHub(timings=QUICK, keys=tmp_path) as hub,
        ControlMember(hub.uri, "rollout", 0, timings=QUICK, keys=tmp_path / "rollout"),
        ControlMember(hub.uri, "rollout", 1, timings=QUICK, keys=tmp_path / "rollout"),
    ):
        assert sorted(hub.members()) == ["rollout/0", "rollout/1"]


def test_missing_keys_are_refused_at_once(tmp_path):
    """Not after a deadline."""
    with pytest.raises(ControlRefusedError, match="must hold CURVE keys"):
        ControlMember("control://127.0.0.1:1,2", "rollout", 0, keys=tmp_path)
    with pytest.raises(ControlRefusedError, match="must hold CURVE keys"):
        ControlHub(keys=tmp_path)


def test_keys_print_no_secret(keys):
    """Logs show objects."""
    found = CurveKeys.load(keys / "actor-0")
    assert found.secret not in repr(found)
    assert {path.stat().st_mode & 0o777 for path in keys.rglob("*.json")} == {0o600}
