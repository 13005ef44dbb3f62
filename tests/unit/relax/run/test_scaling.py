"""Rollout services that come and go: who is started, who has to leave, and what stays as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax.config import RolloutConfig, RunConfig
from relax.control.hub import ControlHub
from relax.control.scale import SCALE_KEY, WORKERS_KEY, member_phase_key
from relax.run.directory import CONTROL_URI
from relax.run.scaling import Scaling, ScalingHands, most_services
from tests.kit.services import FakeServices

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def hub() -> Iterator[ControlHub]:
    """A control plane of its own."""
    with ControlHub() as own:
        yield own


def follow(hub: ControlHub, services: FakeServices, **options) -> Scaling:
    config = RunConfig(
        prompts_per_step=4, rollout=RolloutConfig(num_workers=len(services.indices("rollout")), **options)
    )
    hands = ScalingHands(
        running=lambda: services.running, give_back=services.voided.append, tell=services.said.append
    )
    return Scaling(config, hub, services, hands)  # type: ignore[arg-type]


def end(scaling: Scaling, services: FakeServices, name: str) -> bool:
    """Have a service end, as the driver learns it."""
    del services.running[name]
    return scaling.has_left(name)


def test_missing_services_are_started_once(hub):
    """And prompts are shared by the new number at once."""
    services = FakeServices(1)
    scaling = follow(hub, services)
    assert hub.get(WORKERS_KEY) == 1
    scaling.tick()
    hub.set(SCALE_KEY, 3)
    for _ in range(3):
        scaling.tick()
    assert sorted(services.running) == ["rollout-0", "rollout-1", "rollout-2"]
    assert hub.get(WORKERS_KEY) == 3
    assert services.said == ["1 rollout service(s) become 3"]


def test_highest_services_leave_and_what_they_held_is_given_back(hub):
    """They stay services of the run until they have ended, and their places can be taken again then."""
    services = FakeServices(3)
    scaling = follow(hub, services)
    hub.set(SCALE_KEY, 1)
    scaling.tick()
    assert [hub.get(member_phase_key("rollout", index)) for index in range(3)] == [None, "drain", "drain"]
    assert services.indices("rollout") == {0, 1, 2}
    assert end(scaling, services, "rollout-2")
    assert not scaling.has_left("rollout-0")
    assert not scaling.has_left("actor-1")
    assert (services.indices("rollout"), services.voided) == ({0, 1}, ["rollout-2"])
    assert hub.get(member_phase_key("rollout", 2)) is None
    hub.set(SCALE_KEY, 2)
    scaling.tick()
    assert hub.get(member_phase_key("rollout", 1)) == "drain"
    assert end(scaling, services, "rollout-1")
    scaling.tick()
    assert sorted(services.running) == ["rollout-0", "rollout-1"]
    assert hub.get(member_phase_key("rollout", 1)) is None


def test_service_that_is_dead_just_now_is_not_waited_for(hub):
    """It was about to be started again."""
    services = FakeServices(2)
    scaling = follow(hub, services)
    del services.running["rollout-1"]
    hub.set(SCALE_KEY, 1)
    scaling.tick()
    assert services.indices("rollout") == {0}
    assert hub.get(member_phase_key("rollout", 1)) is None


def test_number_that_the_run_does_not_allow_is_put_back(hub):
    """More services than prompts in a batch, or than servers that run already."""
    services = FakeServices(2)
    scaling = follow(hub, services)
    hub.set(SCALE_KEY, 5)
    scaling.tick()
    assert (hub.get(SCALE_KEY), hub.get(WORKERS_KEY)) == (2, 2)
    assert services.said == ["scale/rollout: must be at most 4 in this run, got 5"]
    urls = RolloutConfig(engine="sglang", num_workers=2, engine_urls=["http://a:1", "http://b:1"])
    assert most_services(RunConfig(prompts_per_step=4, rollout=urls)) == 2


def test_nothing_changes_once_the_role_leaves_as_a_whole(hub):
    """At the end of a run."""
    services = FakeServices(1)
    scaling = follow(hub, services)
    scaling.end()
    hub.set(SCALE_KEY, 2)
    scaling.tick()
    assert sorted(services.running) == ["rollout-0"]


def run_command(*words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "400"}
    command = [sys.executable, "-m", "relax.run.scale", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


def test_command_asks_and_says_what_came_of_it(hub, tmp_path):
    """It returns when the run has taken the number up; else it says why, with another exit code."""
    (tmp_path / CONTROL_URI).write_text(hub.uri)
    hub.set(WORKERS_KEY, 2)
    done = run_command("--run", str(tmp_path), "rollout=2")
    assert (done.returncode, done.stdout) == (0, "rollout services: 2 -> 2\n")
    assert hub.get(SCALE_KEY) == 2
    late = run_command("--control", hub.uri, "--deadline-s", "0.5", "rollout=3")
    assert late.returncode == 1
    assert "the run must take up rollout=3, got 2 service(s); it did not answer within 0.5 s" in late.stderr
    for words, message in (
        (("--control", hub.uri, "actor=2"), "the role must be rollout, got 'actor'"),
        (("--control", hub.uri, "rollout=0"), "the number of services must be from 1 to 1000, got 0"),
        (("--control", hub.uri, "rollout"), "must be rollout=NUMBER, got 'rollout'"),
        (("rollout=2",), "give either --run or --control"),
    ):
        refused = run_command(*words)
        assert refused.returncode != 0
        assert message in refused.stderr
