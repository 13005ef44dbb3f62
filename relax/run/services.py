"""Which processes a run has and what each is started with. When they are started is the driver's matter."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from relax.config import RunConfig
from relax.control.hub import ControlHub
from relax.launch.local import LocalSupervisor
from relax.launch.ports import ReservedPort, reserve_port
from relax.launch.ranks import Rendezvous
from relax.roles.config import SERVABLE
from relax.run.restarting import QUEUE
from relax.run.security import RunSecurity

QUEUE_PORTS = range(8815, 8915)
"""Where a run's own queue may listen: the port that `python -m flight` looks at by default, others for further runs."""


class Services:
    """The services of one run and their command lines.

    Args:
        config: Of the run; says how many there are of each role.
        run_dir: Of the run.
        model_dir: What training starts from.
        supervisor: Starts them.
        hub: The control plane that they join.
        security: What each shows to the others.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        model_dir: Path,
        supervisor: LocalSupervisor,
        hub: ControlHub,
        security: RunSecurity,
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._model_dir = model_dir
        self._supervisor = supervisor
        self._hub = hub
        self._security = security
        self._rendezvous = Rendezvous.on_this_machine(config.actor.num_procs)
        self._queue_port: ReservedPort | None = None
        self.queue_uri = config.queue.uri or ""
        """Where the queue listens; '' until it does."""
        self._indices = {role: set(range(count)) for role, count in self.counts().items()}

    def counts(self) -> dict[str, int]:
        """Return how many services each role begins with, in the order of their start."""
        return {
            "actor": self._config.actor.num_procs,
            **dict.fromkeys(self._config.roles.services, 1),
            "rollout": self._config.rollout.num_workers,
            **({"evaluation": self._config.num_evaluators} if self._config.num_evaluators else {}),
            "preprocess": self._config.data.num_workers,
            "recorder": 1,
        }

    def names(self, *roles: str) -> list[str]:
        """Return the services of some roles, of all by default."""
        return [f"{role}-{index}" for role in roles or self._indices for index in sorted(self._indices[role])]

    def indices(self, role: str) -> set[int]:
        """Return the numbers of a role's services, those that are about to leave included."""
        return set(self._indices[role])

    def add(self, role: str, index: int) -> None:
        """Have another service of a role; it is not started."""
        self._indices[role].add(index)

    def remove(self, role: str, index: int) -> None:
        """Have a service no more; it has ended."""
        self._indices[role].discard(index)

    def start_queue(self) -> None:
        """Start the queue's server; at its old address if it had one."""
        self._queue_port = self._queue_port or reserve_port(QUEUE_PORTS)
        words = [
            *queue_words(self._config, self._run_dir, self._queue_port.port),
            *self._security.queue_words,
        ]
        self._supervisor.start(QUEUE, [sys.executable, *words])

    def start(self, name: str) -> None:
        """Start a service."""
        role, _, index = name.rpartition("-")
        words = ["-m", "relax.roles", role, "--index", index, "--run-dir", str(self._run_dir)]
        words += ["--model-dir", str(self._model_dir), "--queue", self.queue_uri, "--control", self._hub.uri]
        words += ["--parent-pid", str(os.getpid()), *self._security.role_words(role)]
        generates = role in ("rollout", "evaluation")
        threads = self._config.rollout.num_threads if generates else self._config.actor.num_threads
        env = {"OMP_NUM_THREADS": str(threads if generates or role in ("actor", *SERVABLE) else 1)}
        env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if role == "actor":
            env |= self._rendezvous.environment(int(index))
        self._supervisor.start(name, [sys.executable, *words], env=env)

    def meet_anew(self) -> None:
        """Give the ranks of the trainer another place to meet: the last one may still be taken."""
        last, self._rendezvous = self._rendezvous, Rendezvous.on_this_machine(self._config.actor.num_procs)
        last.close()


def queue_words(config: RunConfig, run_dir: Path, port: int) -> list[str]:
    """Return what a run's own queue server is started with."""
    words = ["-m", "flight", "serve", "--port", str(port), "--parent-pid", str(os.getpid())]
    words += ["--uri-file", str(run_dir / "queue.uri")]
    return [*words, "--journal", str(run_dir / "journal")] if config.keeps_journal else words
