"""Rows of one consumer of a queue table as a torch `IterableDataset`. It decides nothing about rows.

Each item is one lease as a dictionary, column by column, so give the DataLoader `batch_size=None`. A worker process
connects by itself when it is started, which works with spawned processes only: any Flight call hangs in a forked one.
Workers of one DataLoader are competing members of the consumer: together they see each row once.

    for batch in DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="spawn"):

When rows are acked is a choice:

- `ack="next"`: when the next item is asked for. Asked for by the loop itself without workers; with workers by the
  prefetching of the DataLoader, so that rows in its queue are lost to training if the process dies.
- `ack="caller"`: when the training loop calls `dataset.ack(batch)`. Until then the rows are leased for `lease_s`.

Values are views of the received memory where rows came in one batch (about 2 MB), so change a copy.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import IterableDataset

from flight.client import Lease, QueueClient
from flight.errors import DeadlineExceededError, InvalidRequestError

POLL_S = 2.0
"""One take waits this long, so that a worker that is told to stop does so soon."""

Values = Literal["torch", "numpy"]
Acks = Literal["next", "caller"]

LEASE = "lease_id"
"""Key of the lease in each item."""


class QueueDataset(IterableDataset[dict[str, Any]]):
    """Iterates until the table is sealed and empty. It holds no connection, so it can be sent to a worker."""

    def __init__(
        self,
        uri: str,
        table: str,
        consumer: str,
        *,
        max_rows: int,
        min_rows: int = 1,
        columns: Sequence[str] | None = None,
        policy_version: int | None = None,
        lease_s: float = 300.0,
        idle_deadline_s: float = 600.0,
        values: Values = "torch",
        ack: Acks = "next",
        credentials: Path | None = None,
    ) -> None:
        """`idle_deadline_s` is how long the iterator waits for rows; the rest is as in `QueueClient` and its `take`."""
        super().__init__()
        for what, allowed, got in (
            ("values", get_args(Values), values),
            ("ack", get_args(Acks), ack),
        ):
            if got not in allowed:
                raise InvalidRequestError(f"QueueDataset: {what} must be one of {allowed}, got {got!r}")
        self.uri = uri
        self.credentials = credentials
        self.table = table
        self.consumer = consumer
        self.max_rows = max_rows
        self.min_rows = min_rows
        self.columns = None if columns is None else list(columns)
        self.policy_version = policy_version
        self.lease_s = lease_s
        self.idle_deadline_s = idle_deadline_s
        self.values: Values = values
        self.ack_when: Acks = ack

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield leases as dictionaries.

        Raises:
            DeadlineExceededError: no rows came for `idle_deadline_s`.
        """
        with self._client() as client:
            used: Lease | None = None
            while (lease := self._next_lease(client, used)) is not None:
                item = to_arrays(lease.table, self.values)
                item[LEASE] = lease.lease_id
                is_used = False
                try:
                    yield item
                    is_used = True
                finally:
                    if not is_used and self.ack_when == "next":
                        # The loop was left at this item: whether it was used, nobody knows.
                        client.nack(
                            self.table, self.consumer, lease_id=lease.lease_id, reason="iteration ended"
                        )
                used = lease if self.ack_when == "next" else None

    def ack(self, batch: Mapping[str, Any], *, step: int | None = None) -> int:
        """Finish the rows of an item; `step` is the optimizer step that used them. Idempotent. Returns their number.

        Raises:
            LeaseLostError: it took longer than `lease_s`; the rows go to the next taker.
        """
        with self._client() as client:
            return client.ack(self.table, self.consumer, lease_id=batch[LEASE], step=step)

    def _client(self) -> QueueClient:
        worker = torch.utils.data.get_worker_info()
        name = f"dataset-{self.consumer}" if worker is None else f"dataset-{self.consumer}-{worker.id}"
        return QueueClient(self.uri, identity=name, credentials=self.credentials)

    def _next_lease(self, client: QueueClient, used: Lease | None) -> Lease | None:
        ends_at = time.monotonic() + self.idle_deadline_s
        while True:
            lease = client.take(
                self.table,
                self.consumer,
                max_rows=self.max_rows,
                min_rows=self.min_rows,
                columns=self.columns,
                policy_version=self.policy_version,
                lease_s=self.lease_s,
                deadline_s=min(POLL_S, max(0.0, ends_at - time.monotonic())),
                ack=used,
            )
            used = None
            if lease.status == "rows":
                return lease
            if lease.status == "sealed":
                return None
            if lease.status == "outdated":
                raise InvalidRequestError(
                    f"QueueDataset of {self.table}: policy_version must be the announced {lease.policy_version} or "
                    f"absent, got {self.policy_version}"
                )
            if time.monotonic() >= ends_at:
                raise DeadlineExceededError(
                    f"QueueDataset of {self.table}: rows must come within {self.idle_deadline_s:g} s, got none"
                )


def to_arrays(table: pa.Table, values: Values) -> dict[str, Any]:
    """Return columns as arrays: numbers [num_rows], fixed shapes [num_rows, ...], lists as one array a row.

    Text and what else has no array stays as Python values. A column of numbers with nulls is a list with None.
    """
    return {name: _column(_whole(table.column(name)), values) for name in table.column_names}


def _whole(column: pa.ChunkedArray) -> pa.Array:
    """Return a column as one array: as it is if it came in one batch, joined (a copy) if it came in several."""
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _column(column: pa.Array, values: Values) -> Any:
    arrow_type = column.type
    if isinstance(arrow_type, pa.FixedShapeTensorType) and not column.null_count:
        return _view(column.storage.flatten(), values).reshape(len(column), *arrow_type.shape)
    if isinstance(column, pa.ExtensionArray):
        return _column(column.storage, values)
    if _is_number(arrow_type) and not column.null_count:
        return _view(column, values)
    if pa.types.is_fixed_size_list(arrow_type) and _is_dense(column):
        return _view(column.flatten(), values).reshape(len(column), arrow_type.list_size)
    if pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type):
        return _lists(column, values)
    return column.to_pylist()


def _lists(column: pa.ListArray | pa.LargeListArray, values: Values) -> list[Any]:
    if not _is_number(column.type.value_type) or column.values.null_count:
        return [_column(each.values, values) if each.is_valid else None for each in column]
    flat = _view(column.values, values)
    offsets = column.offsets.to_numpy()
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    return [flat[offsets[row] : offsets[row + 1]] if valid[row] else None for row in range(len(column))]


def _is_dense(column: pa.FixedSizeListArray) -> bool:
    return not column.null_count and not column.flatten().null_count and _is_number(column.type.value_type)


def _is_number(arrow_type: pa.DataType) -> bool:
    return (
        pa.types.is_integer(arrow_type) or pa.types.is_floating(arrow_type) or pa.types.is_boolean(arrow_type)
    )


def _view(array: pa.Array, values: Values) -> Any:
    """Return numbers without nulls; no copy but of booleans, which Arrow packs into bits."""
    if pa.types.is_boolean(array.type):
        flags: np.ndarray = array.to_numpy(zero_copy_only=False)
        return torch.from_numpy(flags) if values == "torch" else flags
    if values == "numpy":
        return array.to_numpy()
    return torch.from_dlpack(array)
