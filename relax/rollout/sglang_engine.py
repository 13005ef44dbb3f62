"""The SGLang engine: one protocol over several servers. Implements `relax.rollout.engine.RolloutEngine`.

A request goes to the least loaded server, or to the one that has seen its prompt; when that server goes away it goes to
another one. A server takes prompts only while it has the engine's weights: one that missed an update is fenced until
it has caught up, and what it still returns carries the versions that it sampled with.

Streaming would change `_ask` alone: it sends one body and returns its completions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import structlog

from relax.data.chat import ChatTokenizer
from relax.errors import ServiceError
from relax.models.errors import SnapshotNotFoundError
from relax.models.spec import ThinkerSpec
from relax.rollout.early_stop import EarlyStop
from relax.rollout.engine import Completion, GenerateRequest, refused
from relax.rollout.routing import Router
from relax.rollout.sglang_completion import (
    Job,
    aborted,
    completions_of,
    finished_before,
    jobs_of,
    one_refusal,
    refusal_of,
)
from relax.rollout.sglang_config import SGLangConfig, checkpoint_dtype
from relax.rollout.sglang_http import RequestRefusedError, ServerGoneError
from relax.rollout.sglang_messages import Generated
from relax.rollout.sglang_server import Launch, Server, ServerFleet
from relax.rollout.sglang_update import WeightKeeper
from relax.rollout.sglang_weights import abort_all
from relax.rollout.submission_gate import SubmissionGate

MAX_SERVERS_LOST = 2
"""Servers that may go away under one request before the request is taken to be the reason."""
ABORT_GRACE_S = 10.0
"""Time in which aborted requests return before their connections are closed."""
MAX_CONNECTIONS = 256
POLL_S = 0.1


class SGLangEngine:
    """Samples through SGLang servers; see `relax.rollout.engine` for the contract.

    Blocks until all servers answer and have the weights of `launch.model_dir`, policy version 0.

    Args:
        config: Options of the servers and of updates.
        launch: Model directory, run directory and what else servers need.
        num_servers: Servers to start.
        urls: Servers that run already; then none is started. They need the plugin of tools/sglang_media and see the
            model directory and the snapshots under the same paths.

    Raises:
        WiringError: SGLang is not installed, or a server at `urls` lacks an option.
        ServiceError: A server does not start.
    """

    def __init__(
        self, config: SGLangConfig, launch: Launch, *, num_servers: int = 1, urls: Sequence[str] = ()
    ) -> None:
        self._config = config
        self._spec = ThinkerSpec.from_pretrained(launch.model_dir)
        self._tokenizer = ChatTokenizer(launch.model_dir)
        self._gate = SubmissionGate(config.request_deadline_s)
        self._router = Router()
        self._lock = threading.RLock()
        self._num_in_flight = 0
        self._log = structlog.get_logger(engine="sglang")
        self._requests = ThreadPoolExecutor(MAX_CONNECTIONS, thread_name_prefix="sglang-request")
        self._updates = ThreadPoolExecutor(MAX_CONNECTIONS, thread_name_prefix="sglang-update")
        if launch.dtype == "auto":
            launch = replace(launch, dtype=checkpoint_dtype(launch.model_dir))
        self._fleet = ServerFleet(config, launch, num_servers=num_servers, urls=urls)
        self._keeper = WeightKeeper(config, self._fleet, launch.model_dir, self._updates)
        try:
            self._fleet.wait_until_started()
            self._catch_up()
            self._check_serving()
        except BaseException:
            self.close()
            raise

    @property
    def policy_version(self) -> int:
        """Return the version of the weights that every server which takes prompts has."""
        return self._keeper.policy_version

    @property
    def servers(self) -> list[Server]:
        """Return what is known of each server."""
        return list(self._fleet.servers)

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Return completions request by request; see the protocol. Calls from several threads run side by side.

        Raises:
            ServiceError: No server is left, or one answered with something that is not a completion.
        """
        mark = self._gate.begin_round()
        self._catch_up()
        groups: list[list[Completion]] = []
        waiting = []
        for index, request in enumerate(requests):
            reason = refusal_of(request, self._spec)
            groups.append([refused(request, reason)] if reason else finished_before(request))
            if not reason:
                jobs = jobs_of(request, self._spec, seeded=self._config.seeded, cache_key=self._cache_key())
                stop = EarlyStop(request.num_wanted, len(groups[index]))
                waiting += [(index, stop, self._requests.submit(self._run, job, mark, stop)) for job in jobs]
        for index, stop, future in waiting:
            groups[index] += stop.result(future)
        return [
            completion
            for group in groups
            for completion in sorted(one_refusal(group), key=lambda each: each.sample_index)
        ]

    def adopt(self, snapshot_dir: Path | str, policy_version: int) -> None:
        """Replace the weights of every server; see the protocol. One that fails is fenced until it has caught up.

        Raises:
            SnapshotError: The snapshot is missing, altered, of another version or not of this model.
            ServiceError: No server took it.
        """
        directory = Path(snapshot_dir)
        self._keeper.check(directory, policy_version)
        with self._gate.hold(), self._lock:
            self._keeper.adopt(directory, policy_version, is_paused=self._gate.paused)
            self._open_router()
        if not self._fleet.serving() and not directory.exists():
            raise SnapshotNotFoundError(
                f"SGLangEngine.adopt: {directory} must stay until it is adopted, got nothing there; take the next one"
            )
        self._check_serving()

    def pause(self) -> None:
        """Hold generation on every server; caches are kept."""
        self._gate.pause()
        for server in self._fleet.serving():
            server.client.tell("/pause_generation", {"mode": "in_place"})

    def resume(self) -> None:
        """Go on after `pause`."""
        for server in self._fleet.serving():
            server.client.tell("/continue_generation", {})
        self._gate.resume()

    def abort(self) -> None:
        """End the `generate` calls in flight with what they have; what takes too long ends with nothing."""
        self._gate.abort()
        reachable = [server for server in self._fleet.servers if server.state in ("serving", "behind")]
        for server in reachable:
            try:
                abort_all(server.client)
                if self._gate.paused:  # a paused scheduler answers aborted requests only when it goes on
                    server.client.tell("/continue_generation", {})
            except ServiceError as error:
                self._log.warning("abort failed", server=server.name, reason=str(error))
        self._wait_for_aborted(reachable)
        if self._gate.paused:
            self.pause()

    def _wait_for_aborted(self, reachable: Sequence[Server]) -> None:
        end_s = time.monotonic() + ABORT_GRACE_S
        while self._num_in_flight and time.monotonic() < end_s:
            time.sleep(POLL_S)
        if self._num_in_flight:
            for server in reachable:
                server.client.hang_up()

    def close(self) -> None:
        """Abort and end our servers."""
        self._gate.abort()
        for server in self._fleet.servers:
            server.client.hang_up()
        self._keeper.close()
        self._fleet.close()
        self._requests.shutdown(wait=True, cancel_futures=True)
        self._updates.shutdown(wait=True, cancel_futures=True)

    def _run(self, job: Job, mark: int, stop: EarlyStop) -> list[Completion]:
        """Ask servers until one answers; an aborted round, or group that has enough, returns what was there before."""
        for _ in range(MAX_SERVERS_LOST):
            server = None if stop.is_over else self._enter(job, mark)
            if server is None:
                return aborted(job)
            try:
                with stop.asking(job.body.rid, server.client):
                    made = self._ask(server, job)
                stop.finished(sum(each.is_finished for each in made))
                return made
            except RequestRefusedError as error:
                return [refused(job.request, str(error))]
            except ServerGoneError as error:
                if self._gate.aborted(mark):
                    return aborted(job)
                with self._lock:
                    self._fleet.lost(server, str(error))
                    self._open_router()
            finally:
                with self._lock:
                    self._num_in_flight -= 1
                    self._router.done(server.name, job.num_samples)
        reason = (
            f"request {job.request.uid}: {MAX_SERVERS_LOST} servers went away under it; it may be the reason"
        )
        return [refused(job.request, reason)]

    def _enter(self, job: Job, mark: int) -> Server | None:
        """Wait for a server that takes prompts; None when the round was aborted.

        Raises:
            ServiceError: There is none within the deadline, or none is left.
        """
        end_s = time.monotonic() + self._config.start_deadline_s
        while self._gate.enter(mark):
            with self._lock:
                name = self._router.choose(job.request.uid, job.num_samples)
                if name is not None:
                    self._num_in_flight += 1
                    return next(server for server in self._fleet.servers if server.name == name)
            self._catch_up()
            if self._fleet.all_dead() or time.monotonic() > end_s:
                self._check_serving()
            time.sleep(POLL_S)
        return None

    def _ask(self, server: Server, job: Job) -> list[Completion]:
        if job.num_samples == 1:
            generated = [server.client.post("/generate", job.body, Generated)]
        else:
            generated = server.client.post("/generate", job.body, list[Generated])
        where = f"{server.name}: request {job.request.uid}"
        return completions_of(job, generated, self._spec, self._tokenizer.decode, where)

    def _cache_key(self) -> str | None:
        """Keep prefixes of old weights from new prompts: an update in place cannot flush the cache."""
        return str(self.policy_version) if self._config.pause == "in_place" else None

    def _catch_up(self) -> None:
        with self._lock:
            self._keeper.catch_up(is_paused=self._gate.paused)
            self._open_router()

    def _open_router(self) -> None:
        self._router.open(server.name for server in self._fleet.serving())

    def _check_serving(self) -> None:
        if not self._fleet.serving():
            states = "; ".join(f"{each.name} is {each.state}: {each.reason}" for each in self._fleet.servers)
            raise ServiceError(f"SGLangEngine: a server must take prompts, got none: {states}")
