"""Which service is started again, when, and when it is enough."""

from __future__ import annotations

import pytest

from relax.errors import ConfigError
from relax.run.restarts import (
    AGAIN_CODE,
    STEADY_S,
    VERDICT_CODE,
    Again,
    Death,
    Over,
    RestartPolicy,
    RestartsConfig,
    Sign,
    hung,
)

KILLED = Death(service="rollout-0", returncode=-9)


def make_policy(draw: float = 1.0, **changes) -> RestartPolicy:
    return RestartPolicy(RestartsConfig(**changes), draw=lambda: draw)


def failed(error: str, code: int = AGAIN_CODE) -> Death:
    return Death(service="rollout-0", returncode=code, error=error)


def test_killed_service_is_started_again_after_its_delay_and_once():
    """It waits, is due, and is not due again."""
    policy = make_policy(first_delay_s=2.0)
    assert policy.died(KILLED, now=10.0) == Again(service="rollout-0", number=1, delay_s=2.0)
    assert policy.waiting == ["rollout-0"]
    assert policy.due(11.9) == []
    assert policy.due(12.0) == ["rollout-0"]
    assert policy.due(13.0) == policy.waiting == []


def test_delays_double_up_to_the_longest_and_half_of_each_is_drawn():
    """Restart by restart, for each service by itself."""
    longest = make_policy(max=5, first_delay_s=1.0, max_delay_s=5.0)
    shortest = make_policy(draw=0.0, max=5, first_delay_s=1.0, max_delay_s=5.0)
    assert [longest.died(KILLED, now).delay_s for now in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert [shortest.died(KILLED, now).delay_s for now in range(5)] == [0.5, 1.0, 2.0, 2.5, 2.5]
    other = longest.died(Death(service="actor", returncode=-9), 5.0)
    assert other == Again(service="actor", number=1, delay_s=1.0)


def test_budget_is_per_window():
    """Restarts that are older than the window do not count any more."""
    policy = make_policy(max=2, window_s=100.0)
    assert isinstance(policy.died(KILLED, 0.0), Again)
    assert isinstance(policy.died(KILLED, 50.0), Again)
    assert policy.died(KILLED, 99.0) == Over(service="rollout-0", why="2 restarts in 100 s did not help")
    assert policy.died(KILLED, 100.0).number == 2


def test_verdict_of_the_service_itself_is_final():
    """A wrong configuration does not change by being read again; nor does anything when restarts are off."""
    assert make_policy().died(failed("ERROR ConfigError: no", VERDICT_CODE), 0.0) == Over(
        service="rollout-0", why=""
    )
    assert make_policy(max=0).died(KILLED, 0.0) == Over(service="rollout-0", why="")


def test_same_error_soon_after_the_restart_is_final():
    """A fault of the program comes again at once; another error, a later one, or a kill is another matter."""
    policy = make_policy(first_delay_s=1.0)
    assert isinstance(policy.died(failed("ERROR OSError: disk"), 0.0), Again)
    assert isinstance(policy.died(failed("ERROR OSError: net"), 10.0), Again)
    assert policy.died(failed("ERROR OSError: net"), 20.0) == Over(
        service="rollout-0", why="as it did when it was started before"
    )
    policy = make_policy(first_delay_s=1.0)
    assert isinstance(policy.died(failed("ERROR OSError: net"), 0.0), Again)
    assert isinstance(policy.died(failed("ERROR OSError: net"), 2.0 + STEADY_S), Again)
    assert isinstance(policy.died(KILLED, 100.0), Again)
    assert isinstance(policy.died(KILLED, 101.0), Again)


def test_hung_is_who_was_silent_for_too_long_in_this_life():
    """Silence of the process before it, or of one that has not spoken yet, is not its own."""
    running = {"actor-0": 1, "rollout-0": 2, "recorder-0": 3, "preprocess-0": 4}
    signs = {
        "actor-0": Sign(pid=1, at=0.0, patience_s=60.0),
        "rollout-0": Sign(pid=7, at=0.0, patience_s=60.0),
        "recorder-0": Sign(pid=3, at=50.0, patience_s=60.0),
    }
    assert hung(running, signs, now=60.0) == []
    assert hung(running, signs, now=61.0) == ["actor-0"]
    assert hung(running, signs, now=111.0) == ["actor-0", "recorder-0"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max": -1}, "restarts.max: must be at least 0, got -1"),
        ({"silence_s": 5.0}, "restarts.silence_s: must be at least 15, got 5.0"),
        (
            {"first_delay_s": 9.0, "max_delay_s": 3.0},
            "restarts.first_delay_s: must be above 0 and at most max_delay_s=3.0, got 9.0",
        ),
    ],
)
def test_impossible_numbers_are_refused(changes, message):
    """By their key in the configuration."""
    with pytest.raises(ConfigError) as caught:
        RestartsConfig(**changes)
    assert str(caught.value) == message
