"""Which experts each token went to, as Arrow columns and back.

A routing table is uint8 or uint16 [num_tokens - 1, num_layers, top_k]: the last token of a completion is never fed
to the model, so it has no route. A row without a table (a dense model, routing not reported) is null.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from flight.schema import Column
from modalities.errors import ModalityError
from modalities.packing import pack_list, unpack_list

SMALL_NUM_EXPERTS = 256
"""Up to here a byte names an expert."""


def _value_type(num_experts: int) -> pa.DataType:
    if not 1 <= num_experts <= 65_536:
        raise ModalityError(f"num_experts must be from 1 to 65536, got {num_experts}")
    return pa.uint8() if num_experts <= SMALL_NUM_EXPERTS else pa.uint16()


def routing_columns(num_experts: int = SMALL_NUM_EXPERTS) -> tuple[Column, ...]:
    """Return the two columns of a routing table for a model with `num_experts` experts in a layer."""
    shape = "[num_tokens - 1, num_layers, top_k]"
    return (
        Column(
            name="routed_experts",
            type=pa.list_(_value_type(num_experts)),
            meaning="experts that each token was sent to in each layer, row-major",
            shape=shape,
            writer="rollout",
            nullable=True,
        ),
        Column(
            name="routed_experts_shape",
            type=pa.list_(pa.int32(), 3),
            meaning="shape of routed_experts",
            shape=shape,
            writer="rollout",
            nullable=True,
        ),
    )


ROUTING_COLUMNS = routing_columns()
"""The columns for models with at most 256 experts in a layer."""


def routing_to_arrow(
    tables: Sequence[np.ndarray | None], num_experts: int = SMALL_NUM_EXPERTS
) -> dict[str, pa.Array]:
    """Return the columns for one routing table a row.

    Raises:
        ModalityError: a table is not made of integers in three dimensions, or names an expert that is not there.
    """
    for row, table in enumerate(tables):
        if table is None:
            continue
        if table.ndim != 3 or table.dtype.kind not in "iu":
            raise ModalityError(
                f"routed_experts of row {row} must be integers [num_tokens - 1, num_layers, top_k], "
                f"got {table.dtype} {list(table.shape)}"
            )
        if table.size and not 0 <= int(table.min()) <= int(table.max()) < num_experts:
            raise ModalityError(
                f"routed_experts of row {row} must be in [0, {num_experts}), got {table.min()} to {table.max()}"
            )
    present = [[] if table is None else [table] for table in tables]
    absent = np.fromiter((table is None for table in tables), bool, len(tables))
    shapes = np.zeros((len(tables), 3), np.int32)
    for row, table in enumerate(tables):
        if table is not None:
            shapes[row] = table.shape
    return {
        "routed_experts": pack_list(present, _value_type(num_experts)),
        "routed_experts_shape": pa.FixedSizeListArray.from_arrays(
            pa.array(shapes.reshape(-1)), 3, mask=pa.array(absent)
        ),
    }


def routing_from_arrow(columns: pa.Table | pa.RecordBatch) -> list[np.ndarray | None]:
    """Return each row's routing table as a read-only view; null becomes None."""
    flat = unpack_list(columns["routed_experts"])
    shapes = columns["routed_experts_shape"].to_pylist()
    return [
        None if values is None or shape is None else values.reshape(shape)
        for values, shape in zip(flat, shapes, strict=True)
    ]
