"""Batches on their way into a table, from a stream or from shared memory."""

from __future__ import annotations

import pyarrow as pa

from flight import messages as m
from flight.broker import Broker, Wait
from flight.data.batches import check_buffers
from flight.errors import InvalidRequestError
from flight.shared.host import SharedMemoryHost

MAX_BATCH_BYTES = 512 << 20
"""Largest batch that one message of a put may hold."""


def add_batch(
    broker: Broker, command: m.PutCommand | m.PutShared, batch: pa.RecordBatch, wait: Wait
) -> m.PutAck:
    """Add one batch to its table; what lies in shared memory is kept where it lies."""
    check_buffers(command.table, batch, full=False)
    if batch.nbytes > MAX_BATCH_BYTES:
        raise InvalidRequestError(
            f"put into {command.table}: batch must be at most {MAX_BATCH_BYTES} bytes, "
            f"got {batch.nbytes}; cut it to 1 to 4 MB"
        )
    is_shared = isinstance(command, m.PutShared)
    outcome = broker.put(command.table, batch, command.writer, wait, is_retained=is_shared)
    return m.PutAck(num_rows=batch.num_rows, num_duplicates=outcome.num_duplicates, row_ids=outcome.row_ids)


def put_shared(
    broker: Broker, host: SharedMemoryHost | None, request: m.PutShared, wait: Wait
) -> list[m.PutAck]:
    """Add the batches that a client wrote into its slots."""
    if host is None:
        raise InvalidRequestError("put_shared: the server must have shared memory, got one without")
    batches = host.adopt(request.connection, request.slots)
    return [add_batch(broker, request, batch, wait) for batch in batches]
