"""Options of agents, plug-ins by name, and calls with a time limit."""

from __future__ import annotations

import threading

import pytest

from relax.agents.calls import MAX_LEFT_BEHIND, BoundedCalls
from relax.agents.config import AgentConfig
from relax.agents.registry import check_agent, load_environment
from relax.config import load_config
from relax.errors import ConfigError, HopelessError, WiringError


def test_agents_are_off_unless_named() -> None:
    """By an environment or a program; options of theirs may have any name."""
    assert not load_config([]).rollout.agent.is_on
    config = load_config([], ["rollout.agent.environment=a:B", "rollout.agent.options.depth=3"])
    assert (config.rollout.agent.is_on, config.rollout.agent.options) == (True, {"depth": 3})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"environment": "a:B", "program": "a:b"}, "must have an environment or a program, got both"),
        ({"max_turns": 0}, "rollout.agent.max_turns: must be at least 1, got 0"),
        ({"call_limit_s": 0.0}, "rollout.agent.call_limit_s: must be above 0, got 0.0"),
        ({"reward": "none"}, "rollout.agent.reward: must be one of environment, rewards, got 'none'"),
        ({"branches": "all"}, "rollout.agent.branches: must be one of refuse, last, got 'all'"),
    ],
)
def test_impossible_options_are_refused(options: dict, message: str) -> None:
    """With the key, the rule and the value."""
    with pytest.raises(ConfigError) as raised:
        AgentConfig(**options)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"environment": "Shower"}, "rollout.agent.environment: must be 'package.module:name', got 'Shower'"),
        ({"environment": "no_such_package:A"}, "module of 'no_such_package:A' must be importable"),
        ({"environment": "tests.kit.agents:Absent"}, "must be something to call, tests.kit.agents has ["),
        (
            {"environment": "tests.kit.clock:FakeClock"},
            "must have methods reset and step, lacks ['reset', 'step']",
        ),
        (
            {"environment": "tests.kit.agents:Shower", "options": {"dept": 3}},
            "options must be of ['greeting', 'modality'], got ['dept']",
        ),
        (
            {"program": "tests.kit.plugins.my_agents:two_turns", "options": {"x": 1}},
            "options must be of ['bonus']",
        ),
    ],
)
def test_plug_in_that_cannot_be_is_found_out_before_the_run(options: dict, message: str) -> None:
    """By name, methods and options."""
    with pytest.raises(WiringError) as raised:
        check_agent(AgentConfig(**options))
    assert message in str(raised.value)


def test_environment_is_made_with_its_options() -> None:
    """A new one for each episode."""
    make = load_environment("tests.kit.agents:Shower", {"greeting": "hello"})
    assert make() is not make()


def test_calls_that_hang_too_often_end_the_service() -> None:
    """Each costs a thread; somebody has to look."""
    released = threading.Event()
    calls = BoundedCalls(max_parallel=100, limit_s=0.2)
    with pytest.raises(HopelessError, match=rf"must end within 0.2 s, got {MAX_LEFT_BEHIND + 1} that hang"):
        calls.run([released.wait] * (MAX_LEFT_BEHIND + 1))
    released.set()


def test_calls_answer_in_order_with_what_they_raise() -> None:
    """SystemExit too."""

    def leave() -> None:
        raise SystemExit("bye")

    answers = BoundedCalls(max_parallel=1, limit_s=10.0).run([lambda: 1, leave, lambda: 3])
    assert [(each.value, each.error) for each in answers] == [(1, ""), (None, "SystemExit: bye"), (3, "")]
