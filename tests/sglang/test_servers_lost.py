"""Servers that miss an update or die: fenced, passed over, started again. Runs last: it ends a server."""

from __future__ import annotations

import os
import signal
import time

import pytest

from relax.errors import ServiceError
from relax.rollout.sglang_config import SGLangConfig
from relax.rollout.sglang_engine import SGLangEngine
from tests.sglang.test_agreement import assert_alike

RESTART_DEADLINE_S = 400.0


def test_a_server_that_misses_an_update_is_fenced_until_it_has_caught_up(
    servers, publish, requests, torch_engine, home
) -> None:
    """It gets no prompts under the new version, what it has is of its true version, and it comes back by itself."""
    stopped, other = servers.servers
    snapshot, version = publish()
    _hold(servers, stopped, signal.SIGSTOP)
    servers.adopt(snapshot, version)
    assert (other.state, other.policy_version) == ("serving", version)
    assert stopped.state == "behind"
    assert stopped.policy_version != version
    torch_engine.adopt(snapshot, version)
    assert_alike(servers.generate(requests[-1:]), torch_engine.generate(requests[-1:]))
    assert servers._router.engines == [other.name]
    _hold(servers, stopped, signal.SIGCONT)
    _until(lambda: servers.generate(requests[-1:]) and stopped.state == "serving")
    assert (stopped.policy_version, stopped.checksum) == (version, other.checksum)
    assert_alike(servers.generate(requests), torch_engine.generate(requests))


def test_a_server_that_dies_is_started_again_with_the_newest_weights(
    servers, publish, requests, torch_engine
) -> None:
    """Its prompts go to the other one, and it serves only once it has the engine's weights."""
    snapshot, version = publish()
    servers.adopt(snapshot, version)
    torch_engine.adopt(snapshot, version)
    expected = torch_engine.generate(requests)
    dead, _ = servers.servers
    _hold(servers, dead, signal.SIGKILL)
    assert_alike(servers.generate(requests), expected)
    _until(lambda: servers.generate(requests[-1:]) and dead.state == "serving")
    assert (dead.num_restarts, dead.policy_version) == (1, version)
    assert_alike(servers.generate(requests), expected)


def test_a_server_that_cannot_start_says_why(home, tmp_path) -> None:
    """The error has the end of the server's own log."""
    config = SGLangConfig(device="cpu", extra_args=["--no-such-option"])
    with pytest.raises(
        ServiceError, match=r"sglang-0 at http.*: must start within .*no-such-option.*\(log: "
    ):
        SGLangEngine(config, home.launch)


def _hold(engine, server, number: signal.Signals) -> None:
    """Send a signal to all processes of a server."""
    os.killpg(engine._fleet._supervisor.running()[server.name], number)


def _until(condition) -> None:
    end_s = time.monotonic() + RESTART_DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.5)
