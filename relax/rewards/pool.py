"""Worker processes for rewards that may hang, crash or eat memory: killed at the time limit, and replaced.

Each has a session of its own, so that what a plug-in has started goes with it. Safe for several threads.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from relax.rewards.attempt import Outcome, failed
from relax.rewards.base import BoundedReward, Reward, RewardInput
from relax.rewards.config import RewardPart
from relax.rewards.wire import Ask, Ready, Setup, WorkerGoneError, WorkerSilentError, receive, send

START_LIMIT_S = 120.0
"""Longest time in which a worker has to import and warm up all its rewards."""
BOUNDED_GRACE_S = 2.0
"""Time beyond the limit for rewards that keep it by themselves."""
KILL_DEADLINE_S = 5.0
LONGEST_WAIT_S = 3600.0

Spawn = Callable[[list[str], socket.socket], subprocess.Popen[bytes]]


class WorkerPool:
    """A fixed number of workers, each with all the rewards; a process starts when its worker is first needed.

    Args:
        parts: The rewards' names and options.
        rewards: The same rewards, loaded in this process, whose declarations count.
        num_workers: Attempts at the same time.
        max_memory_bytes: Limit of each process; 0: none.
    """

    def __init__(
        self,
        parts: Sequence[RewardPart],
        rewards: Sequence[Reward],
        *,
        num_workers: int,
        max_memory_bytes: int,
    ) -> None:
        self._rewards = list(rewards)
        # The kernel's parent-death signal follows the thread that started the child: it has to last as long as we do.
        self._spawner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward-spawn")
        setup = Setup(
            rewards=[(part.name, part.options) for part in parts], max_memory_bytes=max_memory_bytes
        )
        self._workers = [_Worker(setup, self._spawn) for _ in range(num_workers)]
        self._free: queue.LifoQueue[_Worker] = queue.LifoQueue()  # a warm one first
        for worker in self._workers:
            self._free.put(worker)

    def attempt(self, index: int, sample: RewardInput, time_limit_s: float) -> Outcome:
        """Let a worker make one attempt at reward `index`. Blocks until one is free, then up to the time limit."""
        reward = self._rewards[index]
        worker = self._free.get(timeout=LONGEST_WAIT_S)  # whoever holds one gives it back within the limits
        try:
            grace_s = BOUNDED_GRACE_S if isinstance(reward, BoundedReward) else 0.0
            ask = Ask(reward=index, sample=sample, time_limit_s=time_limit_s)
            return worker.ask(ask, time_limit_s + grace_s)
        except WorkerSilentError:
            if reward.reward_at_limit is not None:
                return Outcome(reward=reward.reward_at_limit)
            return failed(f"must end within {time_limit_s:g} s, got no end", retry=not reward.deterministic)
        except WorkerGoneError as error:
            return failed(f"must not end its process, got {error}", retry=True)
        except (
            OSError,
            ValueError,
            RuntimeError,
        ) as error:  # no process can be started, the text is no text, closing
            return failed(f"must have a worker, got {type(error).__name__}: {error}", retry=True)
        finally:
            self._free.put(worker)

    def pids(self) -> list[int]:
        """Return the processes that are there now."""
        return [worker.pid for worker in self._workers if worker.pid]

    def close(self) -> None:
        """Kill all workers; safe to repeat. Attempts in progress fail."""
        for worker in self._workers:
            worker.kill()
        self._spawner.shutdown()

    def _spawn(self, command: list[str], end: socket.socket) -> subprocess.Popen[bytes]:
        def run() -> subprocess.Popen[bytes]:
            # What a plug-in prints goes to the log; standard output is for the service.
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[end.fileno()], start_new_session=True
            )

        return self._spawner.submit(run).result(START_LIMIT_S)


class _Worker:
    """One place in the pool: a process, or none yet."""

    def __init__(self, setup: Setup, spawn: Spawn) -> None:
        self._setup = setup
        self._spawn = spawn
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def ask(self, ask: Ask, deadline_s: float) -> Outcome:
        """Return the outcome; whatever is raised, the process is gone and the next call starts another.

        Raises:
            WorkerSilentError: no outcome came within `deadline_s`, the start not counted.
            WorkerGoneError: the process ended, or could not load its rewards.
        """
        connection = self._connection or self._start()
        try:
            send(connection, ask, deadline_s=deadline_s)
            return receive(connection, Outcome, deadline_s=deadline_s)
        except WorkerSilentError:
            self.kill()
            raise
        except WorkerGoneError as error:
            raise WorkerGoneError(self._ending(error)) from error

    def kill(self) -> None:
        """Kill the process and what it has started."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: SIGKILL is pending
                process.wait(KILL_DEADLINE_S)
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "relax.rewards.worker", str(theirs.fileno()), str(os.getpid())]
        with theirs:
            self._process = self._spawn(command, theirs)
        self._connection = ours
        try:
            send(ours, self._setup, deadline_s=START_LIMIT_S)
            ready = receive(ours, Ready, deadline_s=START_LIMIT_S)
        except WorkerSilentError as error:
            self.kill()
            raise WorkerGoneError(f"no start within {START_LIMIT_S:g} s") from error
        except WorkerGoneError as error:
            raise WorkerGoneError(self._ending(error)) from error
        if ready.error:
            self.kill()
            raise WorkerGoneError(f"a start that failed: {ready.error}")
        return ours

    def _ending(self, error: WorkerGoneError) -> str:
        """Return how the process ended, which it has or else does now."""
        process = self._process
        try:
            code = process.wait(1.0) if process is not None else None
        except subprocess.TimeoutExpired:
            code = None
        self.kill()
        if code is None:
            return f"a broken connection: {error}"
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
