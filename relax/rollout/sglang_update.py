"""Keeps the servers of one engine at one policy version: checks snapshots, sends them, fences who missed one.

Not for several threads at once; the engine holds its lock.
"""

from __future__ import annotations

from concurrent.futures import Executor
from pathlib import Path

import structlog

from relax.errors import ServiceError, SnapshotError
from relax.models.errors import SnapshotNotFoundError
from relax.models.layout import read_layout
from relax.models.snapshot import describe_snapshot, prove
from relax.rollout.sglang_config import SGLangConfig
from relax.rollout.sglang_server import PROBE_DEADLINE_S, Server, ServerFleet
from relax.rollout.sglang_weights import WeightSender, check_names, checksum, paused


class WeightKeeper:
    """What the weights of all servers are to be, and which servers have them.

    Args:
        config: How weights are sent, and what becomes of running completions.
        fleet: The servers.
        model_dir: The weights of policy version 0; every later snapshot has its names and shapes.
        pool: Updates of several servers run side by side in it.
    """

    def __init__(self, config: SGLangConfig, fleet: ServerFleet, model_dir: Path, pool: Executor) -> None:
        self._config = config
        self._fleet = fleet
        self._layout = read_layout(model_dir)
        self._directory = model_dir
        self._pool = pool
        self._sender = WeightSender(config=config)
        self._log = structlog.get_logger(engine="sglang")
        self.policy_version = 0

    def check(self, directory: Path, version: int) -> None:
        """Prove that a snapshot is whole, of that version and of this model; a server could die of another one.

        Raises:
            SnapshotError: It is not; a SnapshotNotFoundError when it is gone.
        """
        described = describe_snapshot(directory)
        if described["policy_version"] != version:
            raise SnapshotError(
                f"SGLangEngine.adopt: {directory} must be policy version {version}, got {described['policy_version']}"
            )
        prove(directory, described["files"])
        try:
            layout = read_layout(directory)
        except FileNotFoundError as error:
            raise SnapshotNotFoundError(f"SGLangEngine.adopt: the files of {directory} must exist") from error
        except (OSError, ValueError) as error:
            raise SnapshotError(f"SGLangEngine.adopt: {directory} must be whole, got {error}") from error
        check_names(layout, self._layout, directory)

    def adopt(self, directory: Path, version: int, *, is_paused: bool) -> None:
        """Give every server the weights of a checked snapshot; one that fails stays behind, with the reason.

        Args:
            directory: The snapshot.
            version: Its policy version.
            is_paused: Whether the servers are paused already, and are to stay so.
        """
        self._fleet.look()
        targets = [server for server in self._fleet.servers if server.state in ("serving", "behind")]
        for server in targets:
            server.state, server.reason = "behind", f"version {version} is on its way"
        self._directory, self.policy_version = directory, version
        list(self._pool.map(lambda server: self._update(server, is_paused), targets))

    def catch_up(self, *, is_paused: bool) -> None:
        """Give servers that have just started, or are fenced, the newest weights; nothing if those are gone."""
        self._fleet.look()
        behind = [server for server in self._fleet.servers if server.state == "behind"]
        if behind and self._directory.exists():
            list(self._pool.map(lambda server: self._update(server, is_paused), behind))

    def close(self) -> None:
        """Let go of broadcast groups."""
        for server in self._fleet.servers:
            self._sender.forget(server.client)

    def _update(self, server: Server, is_paused: bool) -> None:
        client, info, version = server.client, server.info, self.policy_version
        if info is None:
            return
        try:
            client.info(deadline_s=PROBE_DEADLINE_S)  # one that hangs must not keep the others waiting
            ours_begin_with_it = server.owned and server.policy_version is None and version == 0
            if not ours_begin_with_it:
                with paused(client, "wait" if is_paused else self._config.pause):
                    self._sender.send(client, info, self._directory, version)
            known = checksum(client)
            self._check_alike(server, known)
        except ServiceError as error:
            server.state, server.reason = "behind", str(error)
            self._log.warning(
                "server missed an update", server=server.name, version=version, reason=str(error)
            )
            return
        server.policy_version, server.checksum = version, known
        server.state, server.reason = "serving", ""

    def _check_alike(self, server: Server, known: str) -> None:
        """Check that servers of one version have one checksum; SGLang says nothing of tensors that it ignored.

        Raises:
            ServiceError: another server has the same version and other weights.
        """
        for other in self._fleet.serving():
            if other.policy_version == self.policy_version and other.checksum != known:
                raise ServiceError(
                    f"{server.name}: weights of version {self.policy_version} must have checksum {other.checksum} as "
                    f"{other.name}, got {known}"
                )
