"""New weights for SGLang servers: from the disk, as tensors over HTTP, or by a broadcast. It decides nothing.

    pause -> [begin] -> update(s) -> [end] -> continue

Servers from 0.5.21 on want tensors and broadcasts between begin and end; older ones know neither word. Names are
checked before this is called (`check_names`): SGLang ignores names that it does not know, and answers that all is well.
"""

from __future__ import annotations

import base64
import io
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from safetensors import safe_open

from relax.errors import ServiceError
from relax.launch.ranks import listen
from relax.models.errors import SnapshotError
from relax.models.layout import TensorLayout
from relax.rollout.sglang_config import SGLangConfig
from relax.rollout.sglang_http import SGLangClient
from relax.rollout.sglang_messages import ChecksumAnswer, ServerInfo, UpdateAnswer
from relax.rollout.sglang_weights_wire import BucketEntry, flattened_bucket

SESSION_SINCE = (0, 5, 21)
"""First release that wants begin_weight_update and end_weight_update."""
GROUP_DEADLINE_S = 120.0
POLL_S = 0.05


@dataclass(frozen=True)
class Bucket:
    """Some tensors, flattened one after another into bytes."""

    flat: torch.Tensor
    """uint8 [num_bytes]."""
    entries: list[BucketEntry]


def check_names(
    found: Mapping[str, TensorLayout], expected: Mapping[str, TensorLayout], where: Path | str
) -> None:
    """Check that a snapshot has the model's tensors, all of them, and no others.

    Raises:
        SnapshotError: A name is missing or unknown, or a shape differs.
    """
    missing, unknown = expected.keys() - found.keys(), found.keys() - expected.keys()
    if missing or unknown:
        raise SnapshotError(
            f"SGLang weights: {where} must hold exactly the model's tensors, lacks {len(missing)} "
            f"{sorted(missing)[:3]}, has {len(unknown)} unknown {sorted(unknown)[:3]}"
        )
    for name, layout in found.items():
        if layout.shape != expected[name].shape:
            raise SnapshotError(
                f"SGLang weights: {name} of {where} must have shape {list(expected[name].shape)}, "
                f"got {list(layout.shape)}"
            )


def payloads(payload: bytes, tp_size: int) -> list[str]:
    """Return a payload for each tensor-parallel rank: a server dies when it gets fewer than it has ranks."""
    return [base64.b64encode(payload).decode()] * tp_size


def checksum(client: SGLangClient) -> str:
    """Return the server's checksum of its weights."""
    return client.post("/weights_checker", {"action": "checksum"}, ChecksumAnswer).per_engine_checksum


@contextmanager
def paused(client: SGLangClient, mode: str) -> Iterator[None]:
    """Pause a server around an update, and let it go on whatever becomes of the update.

    When the update fails, what runs there is aborted: the weights may be a mixture.
    """
    if mode == "wait":
        yield
        return
    client.tell("/pause_generation", {"mode": mode})
    try:
        yield
    except BaseException:
        with suppress(ServiceError):  # the failure itself says more
            abort_all(client)
            client.tell("/continue_generation", {})
        raise
    client.tell("/continue_generation", {})


def abort_all(client: SGLangClient) -> None:
    """End every completion that runs on a server; their requests return with what there is."""
    client.tell("/abort_request", {"rid": "", "abort_all": True})


@dataclass(kw_only=True)
class WeightSender:
    """Brings one directory of safetensors to one server by the way that the configuration names."""

    config: SGLangConfig
    _groups: dict[str, _Group] = field(default_factory=dict)

    def send(self, client: SGLangClient, info: ServerInfo, directory: Path, policy_version: int) -> None:
        """Replace the server's weights. The caller has paused the server and checked the names.

        Raises:
            ServiceError: The server refused or failed; with `tensor` and `distributed` its weights are then a mixture.
        """
        final = {"weight_version": str(policy_version), "flush_cache": self.config.pause != "in_place"}
        if self.config.weights == "disk":
            body = {"model_path": str(directory.resolve()), **final}
            _update(client, "/update_weights_from_disk", body)
            return
        with _session(client, info):
            for bucket, is_last in _with_last(read_buckets(directory, self.config.bucket_bytes)):
                # The version changes with the last bucket; before it the server must not claim the new one.
                options = final if is_last else {"flush_cache": False}
                if self.config.weights == "tensor":
                    self._post(client, info, bucket, options)
                else:
                    self._broadcast(client, info, bucket, options)

    def forget(self, client: SGLangClient) -> None:
        """Let go of the broadcast group with a server, which may be gone. Idempotent."""
        group = self._groups.pop(client.url, None)
        if group is not None:
            group.close(client)

    def _post(
        self, client: SGLangClient, info: ServerInfo, bucket: Bucket, options: Mapping[str, Any]
    ) -> None:
        payload = flattened_bucket(_saved(bucket.flat), bucket.flat.numel(), bucket.entries)
        named = payloads(payload, info.tp_size)
        body = {"serialized_named_tensors": named, "load_format": "flattened_bucket", **options}
        _update(client, "/update_weights_from_tensor", body)

    def _broadcast(
        self, client: SGLangClient, info: ServerInfo, bucket: Bucket, options: Mapping[str, Any]
    ) -> None:
        if client.url not in self._groups:
            self._groups[client.url] = _Group.join(client, info, "gloo" if self.config.on_cpu else "nccl")
        group = self._groups[client.url]
        body = {
            "names": [entry.name for entry in bucket.entries],
            "dtypes": [entry.dtype for entry in bucket.entries],
            "shapes": [list(entry.shape) for entry in bucket.entries],
            "group_name": group.name,
            "load_format": "flattened_bucket",
            **options,
        }
        try:
            group.broadcast(client, bucket.flat, body)
        except BaseException:
            self.forget(client)
            raise


def read_buckets(directory: Path, max_bytes: int) -> Iterator[Bucket]:
    """Yield the tensors of a directory's safetensors files in buckets of at most `max_bytes`, larger tensors alone."""
    waiting: list[tuple[str, torch.Tensor]] = []
    num_bytes = 0
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                tensor = file.get_tensor(name)
                if waiting and num_bytes + tensor.nbytes > max_bytes:
                    yield _bucket(waiting)
                    waiting, num_bytes = [], 0
                waiting.append((name, tensor))
                num_bytes += tensor.nbytes
    if waiting:
        yield _bucket(waiting)


def _with_last(buckets: Iterator[Bucket]) -> Iterator[tuple[Bucket, bool]]:
    """Yield each bucket and whether it is the last one; one more than is being sent is in memory."""
    waiting = next(buckets, None)
    while waiting is not None:
        following = next(buckets, None)
        yield waiting, following is None
        waiting = following


def _bucket(tensors: list[tuple[str, torch.Tensor]]) -> Bucket:
    entries: list[BucketEntry] = []
    at = 0
    for name, tensor in tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(BucketEntry(name, dtype, tuple(tensor.shape), at, at + tensor.nbytes))
        at += tensor.nbytes
    flat = torch.cat([tensor.contiguous().flatten().view(torch.uint8) for _, tensor in tensors])
    return Bucket(flat, entries)


def _saved(flat: torch.Tensor) -> bytes:
    """Return the storage as the bytes that `torch.storage._load_from_bytes` reads."""
    buffer = io.BytesIO()
    typed = torch.storage.TypedStorage(wrap_storage=flat.untyped_storage(), dtype=torch.uint8, _internal=True)
    torch.save(typed, buffer)
    return buffer.getvalue()


def _update(client: SGLangClient, path: str, body: Mapping[str, Any]) -> None:
    answer = client.post(path, body, UpdateAnswer)
    if not answer.success:
        raise ServiceError(f"{client.url}{path}: must succeed, got: {answer.message}")


@contextmanager
def _session(client: SGLangClient, info: ServerInfo) -> Iterator[None]:
    """Hold the update session of newer servers open; nothing for older ones."""
    if info.release < SESSION_SINCE:
        yield
        return
    _update(client, "/begin_weight_update", {"selector": "all"})
    try:
        yield
    finally:
        _update(client, "/end_weight_update", {})


class _Group:
    """A process group of this process (rank 0) and one server's ranks."""

    def __init__(self, name: str, group: Any, pool: ThreadPoolExecutor, device: str) -> None:
        self.name = name
        self._group = group
        self._pool = pool
        self._device = device

    @classmethod
    def join(cls, client: SGLangClient, info: ServerInfo, backend: str) -> _Group:
        """Make the group; both sides wait for each other up to GROUP_DEADLINE_S."""
        from torch.distributed import Backend, PrefixStore, TCPStore
        from torch.distributed.distributed_c10d import _new_process_group_helper

        name, world_size = f"relax-{uuid.uuid4().hex[:12]}", 1 + info.tp_size
        limit = timedelta(seconds=GROUP_DEADLINE_S)
        address = _own_address(client.url)
        door = listen(address)
        port = door.getsockname()[1]
        store = TCPStore(
            address, port, world_size, True, limit, wait_for_workers=False, master_listen_fd=door.detach()
        )
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights-group")
        body = {
            "master_address": address,
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": world_size,
            "group_name": name,
            "backend": backend,
        }
        joined = pool.submit(_update, client, "/init_weights_update_group", body)
        # SGLang builds its side by the same private function of torch, so that the keys in the store agree.
        make: Any = _new_process_group_helper
        group, _ = make(
            world_size, 0, [], Backend(backend), PrefixStore(name, store), group_name=name, timeout=limit
        )
        joined.result(GROUP_DEADLINE_S)
        return cls(name, group, pool, "cuda" if backend == "nccl" else "cpu")

    def broadcast(self, client: SGLangClient, flat: torch.Tensor, body: Mapping[str, Any]) -> None:
        """Send one bucket and wait until the server has loaded it."""
        from torch.distributed import BroadcastOptions

        answered = self._pool.submit(_update, client, "/update_weights_from_distributed", body)
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        work = self._group.broadcast([flat.to(self._device)], options)
        _wait(work, answered)
        answered.result(GROUP_DEADLINE_S)

    def close(self, client: SGLangClient) -> None:
        """Take the group down on both sides, as far as they are there."""
        with suppress(ServiceError):  # the server is gone, and its side with it
            client.tell("/destroy_weights_update_group", {"group_name": self.name}, deadline_s=10.0)
        self._pool.shutdown(wait=False)


def _wait(work: Any, answered: Future[None]) -> None:
    """Wait for a broadcast; a server that refuses the request would never take part in it."""
    end_s = time.monotonic() + GROUP_DEADLINE_S
    while not work.is_completed():
        if answered.done():
            answered.result()
        if time.monotonic() > end_s:
            raise ServiceError(
                f"SGLang weights: broadcast must end within {GROUP_DEADLINE_S:.0f} s, got no end"
            )
        time.sleep(POLL_S)
    work.wait()


def _own_address(url: str) -> str:
    """Return this machine's address as the server sees it."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=10.0) as connection:
        return str(connection.getsockname()[0])
