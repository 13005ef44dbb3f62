"""SGLang servers: ours are started, watched and started again; others' are only looked at. No request is made here.

States of a server:
    starting --answers--> behind --weights adopted--> serving
        ^                   ^-----missed an update-------|
        |--- dead <---process ended, or it does not answer (from any state)
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import structlog

from relax.errors import ServiceError, WiringError
from relax.launch.local import Exited, LocalSupervisor
from relax.rollout.sglang_config import CLONE, SGLangConfig, check_installation
from relax.rollout.sglang_http import SGLangClient
from relax.rollout.sglang_messages import ServerInfo

MEDIA_PLUGIN = CLONE / "tools" / "sglang_media"
CPU_STAND_INS = CLONE / "tools" / "sglang_cpu"
PROBE_DEADLINE_S = 10.0
"""Silence after which a server that is only asked who it is counts as away."""
POLL_S = 0.2

State = Literal["starting", "behind", "serving", "dead"]


@dataclass(kw_only=True)
class Server:
    """One server as the engine knows it."""

    name: str
    client: SGLangClient
    owned: bool
    """Whether it was started here."""
    state: State = "starting"
    info: ServerInfo | None = None
    policy_version: int | None = None
    """Version of its weights; None before the first is known."""
    checksum: str = ""
    """Of its weights, by its own count; empty when it cannot say."""
    reason: str = ""
    """Why it is behind or dead."""
    num_restarts: int = 0


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What the servers of one engine have in common."""

    model_dir: Path
    run_dir: Path
    dtype: str
    num_threads: int = 1
    seed: int = 0
    first_index: int = 0
    """Number of the first server among those of all engines of the run."""


class ServerFleet:
    """The servers of one engine. Not for several threads at once.

    Args:
        config: Options of the servers.
        launch: What ours serve and where their logs go.
        num_servers: Servers to start; none when `urls` are given.
        urls: Servers that run already.

    Raises:
        WiringError: Servers are to be started and the interpreter is not there.
    """

    def __init__(
        self, config: SGLangConfig, launch: Launch, *, num_servers: int = 1, urls: Sequence[str] = ()
    ) -> None:
        self._config = config
        self._launch = launch
        self._supervisor = LocalSupervisor(launch.run_dir)
        self.servers: list[Server] = []
        self._log = structlog.get_logger(engine="sglang")
        deadline_s = config.request_deadline_s
        for number, url in enumerate(urls):
            client = SGLangClient(url, deadline_s=deadline_s)
            self.servers.append(Server(name=f"url-{number}", client=client, owned=False))
        if urls:
            return
        check_installation(config)
        for number in range(launch.first_index, launch.first_index + num_servers):
            client = SGLangClient(f"http://127.0.0.1:{_free_port()}", deadline_s=deadline_s)
            server = Server(name=f"sglang-{number}", client=client, owned=True)
            self.servers.append(server)
            self._start(server)

    def serving(self) -> list[Server]:
        """Return the servers that have the engine's weights and take prompts."""
        return [server for server in self.servers if server.state == "serving"]

    def all_dead(self) -> bool:
        """Whether no server is left that could come to serve."""
        return all(server.state == "dead" for server in self.servers)

    def wait_until_started(self) -> None:
        """Wait until every server answers.

        Raises:
            ServiceError: One ended or did not answer within the deadline; the message has the end of its log.
        """
        end_s = time.monotonic() + self._config.start_deadline_s
        while True:
            self.look()
            waiting = [server for server in self.servers if server.state in ("starting", "dead")]
            if not waiting:
                return
            dead = next((server for server in waiting if server.state == "dead"), None)
            if dead is not None or time.monotonic() > end_s:
                server = dead or waiting[0]
                raise ServiceError(
                    f"{server.name} at {server.client.url}: must start within "
                    f"{self._config.start_deadline_s:.0f} s, got {server.reason or 'no answer'}"
                    + (f" (log: {self._supervisor.log_path(server.name)})" if server.owned else "")
                )
            time.sleep(POLL_S)

    def look(self) -> None:
        """Bring the states up to date: find those that ended, start them again, see which answer. Takes no long."""
        ended = {exited.name: exited for exited in self._supervisor.poll()}
        for server in self.servers:
            if server.name in ended:
                self._note_end(server, ended[server.name])
            elif server.state == "starting" or (server.state == "dead" and not server.owned):
                self._probe(server)

    def lost(self, server: Server, reason: str) -> None:
        """Take a server that did not answer out of service; ours is ended, to be started again."""
        if server.state not in ("serving", "behind"):
            return
        self._log.warning("server lost", server=server.name, reason=reason)
        server.state, server.reason = "dead", reason
        if server.owned:
            for exited in self._supervisor.stop([server.name]):
                self._note_end(server, exited)

    def close(self) -> None:
        """End our servers; safe to repeat."""
        self._supervisor.close(grace_s=5.0)

    def _note_end(self, server: Server, exited: Exited) -> None:
        server.state, server.reason, server.policy_version = "dead", str(exited), None
        self._log.warning("server ended", server=server.name, reason=server.reason)
        if server.num_restarts < self._config.max_restarts and server.info is not None:
            server.num_restarts += 1
            self._start(server)

    def _probe(self, server: Server) -> None:
        try:
            info = server.client.info(deadline_s=PROBE_DEADLINE_S)
        except ServiceError as error:
            server.reason = str(error)
            return
        if not info.enable_return_routed_experts:
            raise WiringError(
                f"{server.client.url}: must be started with --enable-return-routed-experts, got a server without"
            )
        if self._config.seeded and not info.enable_deterministic_inference:
            raise WiringError(
                f"{server.client.url}: must be started with --enable-deterministic-inference for rollout.sglang.seeded"
            )
        server.info, server.state, server.reason = info, "behind", "it has just started"

    def _start(self, server: Server) -> None:
        server.state, server.reason = "starting", ""
        number = int(server.name.rpartition("-")[2])
        port = int(server.client.url.rpartition(":")[2])
        self._supervisor.start(
            server.name,
            launch_words(self._config, self._launch, number, port),
            launch_env(self._config, self._launch),
        )


def launch_words(config: SGLangConfig, launch: Launch, number: int, port: int) -> list[str]:
    """Return the command of server `number`."""
    words = [str(config.interpreter), "-m", "sglang.launch_server", "--model-path", str(launch.model_dir)]
    words += ["--host", "127.0.0.1", "--port", str(port), "--dtype", launch.dtype]
    words += ["--tp-size", str(config.tp_size), "--max-running-requests", str(config.max_running_requests)]
    words += ["--random-seed", str(launch.seed + number), "--weight-version", "0"]
    words += ["--enable-return-routed-experts", "--skip-server-warmup", "--grammar-backend", "none"]
    if config.max_total_tokens:
        words += ["--max-total-tokens", str(config.max_total_tokens)]
    if config.seeded:
        words += ["--enable-deterministic-inference"]
    if config.on_cpu:
        # Without --sleep-on-idle an idle server keeps most of a core busy.
        words += ["--device", "cpu", "--attention-backend", "torch_native", "--sleep-on-idle"]
    else:
        words += ["--base-gpu-id", str(number * config.tp_size)]
    return words + list(config.extra_args)


def launch_env(config: SGLangConfig, launch: Launch) -> dict[str, str]:
    """Return what a server's environment has beside ours. Our own packages are not on its path."""
    paths = [MEDIA_PLUGIN, *([CPU_STAND_INS] if config.on_cpu else [])]
    env = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(launch.num_threads),
    }
    if config.on_cpu:
        env["SGLANG_USE_CPU_ENGINE"] = "1"
        env["TORCH_COMPILE_DISABLE"] = (
            "1"  # SGLang compiles a few small functions, in C++, at the first prompt
        )
        if config.tp_size > 1:
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(config.tp_size)))
    return env


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
