"""A reward worker: `python -m relax.rewards.worker FD PARENT_PID`. It does as told until its connection is closed.

Each attempt is made in this process; whoever asked kills it, with its whole process group, at the time limit.
"""

from __future__ import annotations

import resource
import signal
import socket
import sys
from contextlib import suppress

from relax.launch.parent import die_with_parent
from relax.rewards.attempt import Outcome, attempt, failed
from relax.rewards.base import Reward
from relax.rewards.config import RewardPart
from relax.rewards.registry import load_reward
from relax.rewards.wire import Ask, Ready, Setup, WorkerGoneError, receive, send


def main() -> None:
    """Load the rewards, then answer one question after another."""
    die_with_parent(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as connection, suppress(WorkerGoneError):
        setup = receive(connection, Setup, deadline_s=None)
        rewards: list[Reward] = []
        loaded = _load(setup, rewards)
        send(connection, Ready(error=loaded.error), deadline_s=None)
        while not loaded.error:
            ask = receive(connection, Ask, deadline_s=None)
            outcome = attempt(rewards[ask.reward], ask.sample, ask.time_limit_s)
            send(connection, outcome, deadline_s=None)


def _load(setup: Setup, rewards: list[Reward]) -> Outcome:
    """Fill `rewards`; return why that failed, if it did."""
    try:
        for name, options in setup.rewards:
            reward = load_reward(RewardPart(name=name, label="loaded", options=options))
            reward.warm_up()
            rewards.append(reward)
    except (Exception, SystemExit) as error:  # a plug-in's import may do anything
        return failed(f"{type(error).__name__}: {error}", retry=True)
    if setup.max_memory_bytes:
        limit = setup.max_memory_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return Outcome()


if __name__ == "__main__":
    main()
