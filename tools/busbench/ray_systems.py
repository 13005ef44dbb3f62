"""The systems that need Ray, in the virtual environment that `busbench.environment` makes: TransferQueue, object store.

Both get their data in the form that suits them best, made outside the timing: TransferQueue a TensorDict of dense or
jagged tensors, the object store an Arrow table.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pyarrow as pa

from busbench import workloads as w
from busbench.processes import descendants, name_of

PARTITION = "bench"
STORE_BYTES = 1500 << 20
SMALL_STORE_BYTES = 128 << 20
STORAGE_UNITS = 2


def _init_ray(store_bytes: int) -> Any:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=store_bytes,
        log_to_driver=False,
        configure_logging=False,
    )
    return ray


class RayStore:
    """`ray.put` of the Arrow tables; an actor in another process gets and touches them, without a copy."""

    def __init__(self, workload: w.Workload) -> None:
        self._ray = _init_ray(STORE_BYTES)
        self._tables = workload.tables
        self._reader = self._ray.remote(_Reader).remote()
        self._ray.get(self._reader.touch.remote([]))
        self._refs: list[Any] = []

    def prepare(self) -> None:
        """Free what was put last."""
        self._refs = []

    def put(self) -> None:
        """Put the tables."""
        self._refs = [self._ray.put(table) for table in self._tables.values()]

    def take(self) -> int:
        """Let the actor get them."""
        return self._ray.get(self._reader.touch.remote(self._refs))

    def digest(self) -> str:
        """Return the digest that the actor finds."""
        return self._ray.get(self._reader.digest.remote(list(self._tables), self._refs))

    def server_pids(self) -> list[int]:
        """Return the raylet, which holds the store."""
        return [pid for pid in descendants(os.getpid()) if name_of(pid) == "raylet"]

    def close(self) -> None:
        """End Ray."""
        self._ray.shutdown()


class _Reader:
    """The reading process."""

    def touch(self, refs: list[Any]) -> int:
        """Get tables and read a byte of every page."""
        import ray

        return sum(w.touch_table(table) for table in ray.get(refs))

    def digest(self, parts: list[str], refs: list[Any]) -> str:
        """Get tables and return their digest."""
        import ray

        tables = dict(zip(parts, ray.get(refs), strict=True))
        return w.table_digest(tables, {part: table.column_names for part, table in tables.items()})


class TransferQueue:
    """`kv_batch_put` and `kv_batch_get` with SimpleStorage units; clearing is not timed.

    It has no place for what rows share: media go with every row of a group.
    """

    def __init__(self, workload: w.Workload) -> None:
        import torch
        import transfer_queue
        from omegaconf import OmegaConf
        from tensordict import TensorDict

        torch.set_num_threads(1)
        self._ray = _init_ray(SMALL_STORE_BYTES)
        self._torch = torch
        self._queue = transfer_queue
        backend = {
            "storage_backend": "SimpleStorage",
            "SimpleStorage": {"num_data_storage_units": STORAGE_UNITS},
        }
        transfer_queue.init(OmegaConf.create({"backend": backend}))
        self._workload = workload
        fields = {name: self._tensor(workload.rows.column(name)) for name in workload.rows.column_names}
        if workload.media is not None:
            groups = torch.from_numpy(workload.rows.column(w.GROUP).to_numpy().copy()).long()
            for name in workload.media.column_names:
                fields[name] = self._tensor(workload.media.column(name))[groups]
        self._fields = TensorDict(fields, batch_size=[workload.rows.num_rows])
        self._round = 0
        self._keys: list[str] = []
        self._taken: Any = None

    def _tensor(self, column: pa.ChunkedArray) -> Any:
        """Return scalars as [rows], lists of equal length as [rows, length], others as a jagged tensor."""
        lengths, values = w.column_values(column)
        flat = self._torch.from_numpy(np.concatenate(values))
        if not lengths:
            return flat
        counts = np.concatenate(lengths)
        if (counts == counts[0]).all():
            return flat.reshape(len(counts), -1)
        offsets = self._torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]))
        return self._torch.nested.nested_tensor_from_jagged(flat, offsets)

    def prepare(self) -> None:
        """Clear what was put last; fresh keys."""
        self._taken = None
        if self._keys:
            self._queue.kv_clear(self._keys, PARTITION)
        self._round += 1
        self._keys = [f"{self._round}/{row}" for row in range(self._workload.rows.num_rows)]

    def put(self) -> None:
        """Put all rows."""
        self._queue.kv_batch_put(self._keys, PARTITION, self._fields)

    def take(self) -> int:
        """Get all rows and read a byte of every page."""
        self._taken = self._queue.kv_batch_get(self._keys, PARTITION)
        return sum(w.touch(self._values(tensor)) for tensor in self._taken.values())

    def _values(self, tensor: Any) -> Any:
        if tensor.is_nested:
            values = tensor.values() if tensor.layout == self._torch.jagged else None
            tensor = values if values is not None else self._torch.cat([t.flatten() for t in tensor.unbind()])
        return np.ascontiguousarray(tensor.numpy()).reshape(-1)

    def digest(self) -> str:
        """Return the digest of what was got; of media, that of the first row of each group.

        Raises:
            RuntimeError: rows of one group have different media.
        """
        columns = {}
        for part, table in self._workload.tables.items():
            for name in table.column_names:
                rows = [np.ascontiguousarray(row.numpy()).reshape(-1) for row in self._taken[name].unbind()]
                if part == w.MEDIA:
                    size = self._workload.group_size
                    if any(not np.array_equal(row, rows[i - i % size]) for i, row in enumerate(rows)):
                        raise RuntimeError(f"{name}: rows of a group must have the same media")
                    rows = rows[::size]
                is_list = pa.types.is_list(table.schema.field(name).type)
                lengths = [np.array([len(row) for row in rows], np.int32)] if is_list else []
                columns[f"{part}.{name}"] = (lengths, rows)
        return w.digest(columns)

    def server_pids(self) -> list[int]:
        """Return the storage units."""
        return [pid for pid in descendants(os.getpid()) if name_of(pid).startswith("ray::Simple")]

    def close(self) -> None:
        """End TransferQueue and Ray."""
        self._taken = None
        self._queue.close()
        self._ray.shutdown()
