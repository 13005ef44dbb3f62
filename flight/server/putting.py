"""Batches on their way into a table, from a stream or from shared memory."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from flight import messages as m
from flight.broker import Broker, Wait
from flight.data.batches import check_names
from flight.errors import InvalidRequestError
from flight.schema import KEY_COLUMNS
from flight.shared.host import SharedMemoryHost

MAX_BATCH_BYTES = 512 << 20
"""Largest batch that one message of a put may hold."""

MIN_KEPT_BYTES = 1 << 20
"""Messages from this size on have memory of their own; a smaller one may be a part of what was read at once."""

MOST_BESIDES = 1 / 16
"""Share of a message that may be something else than values if it is kept as it came."""


def add_batch(
    broker: Broker, command: m.PutCommand | m.PutShared, batch: pa.RecordBatch, wait: Wait
) -> m.PutAck:
    """Add one batch to its table; what lies in shared memory, or fills its message, is kept where it lies."""
    check_names(command.table, batch.schema)
    # Not nbytes: it follows offsets that nobody has checked yet, and takes a hundred times as long.
    num_bytes = batch.get_total_buffer_size()
    if num_bytes > MAX_BATCH_BYTES:
        raise InvalidRequestError(
            f"put into {command.table}: batch must be at most {MAX_BATCH_BYTES} bytes, "
            f"got {num_bytes}; cut it to 1 to 4 MB"
        )
    can_stay = isinstance(command, m.PutShared) or fills_its_message(batch)
    outcome = broker.put(command.table, batch, command.writer, wait, is_retained=can_stay)
    return m.PutAck(
        num_rows=batch.num_rows,
        num_duplicates=outcome.num_duplicates,
        row_ids=outcome.row_ids,
        placement=broker.placement_version,
    )


def fills_its_message(batch: pa.RecordBatch) -> bool:
    """Return whether a received batch can be kept without a copy.

    Its buffers are slices of one gRPC message, all of which stays as long as one of them does. That is no loss if there
    is next to nothing else in it, and then what the table accounts for is what it holds. The rows of a batch go
    together or are copied out by the store, so a few never keep the message of many for long.
    """
    if batch.get_total_buffer_size() < MIN_KEPT_BYTES:
        return False
    columns = {
        name: [each for each in column.buffers() if each is not None]
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }
    messages = {(whole.address, whole.size) for buffers in columns.values() for whole in map(_whole, buffers)}
    if len(messages) != 1:
        return False
    [(_, message_bytes)] = messages
    value_bytes = sum(
        buffer.size for name, buffers in columns.items() if name not in KEY_COLUMNS for buffer in buffers
    )
    return value_bytes >= message_bytes * (1 - MOST_BESIDES)


def _whole(buffer: pa.Buffer) -> pa.Buffer:
    while buffer.parent is not None:
        buffer = buffer.parent
    return buffer


def sum_up(acks: Sequence[m.PutAck]) -> m.PutAck:
    """Return one acknowledgement for all batches of a put."""
    return m.PutAck(
        num_rows=sum(ack.num_rows for ack in acks),
        num_duplicates=sum(ack.num_duplicates for ack in acks),
        row_ids=[row_id for ack in acks for row_id in ack.row_ids],
        placement=max((ack.placement for ack in acks), default=0),
    )


def put_shared(
    broker: Broker, host: SharedMemoryHost | None, request: m.PutShared, wait: Wait
) -> list[m.PutAck]:
    """Add the batches that a client wrote into its slots."""
    if host is None:
        raise InvalidRequestError("put_shared: the server must have shared memory, got one without")
    batches = host.adopt(request.connection, request.slots)
    return [add_batch(broker, request, batch, wait) for batch in batches]
