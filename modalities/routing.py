"""Which experts each token went to, as Arrow columns and back.

A routing table is uint8 or uint16 [num_tokens - 1, num_layers, top_k]: the last token of a completion is never fed
to the model, so it has no route. A row without a table (a dense model, routing not reported) is null.

The layers lie in one column, `routed_experts`, or in one for each *layer group*, `routed_experts_<first>_<end>` with
the end left out, so that a stage of a pipeline names the columns of its own layers and no others are moved. What is
read says by its names which layers it holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from flight.schema import Column
from modalities.errors import ModalityError
from modalities.packing import pack_list, unpack_list

SMALL_NUM_EXPERTS = 256
"""Up to here a byte names an expert."""

LayerRange = tuple[int, int]
"""First layer, and the first one behind the last."""

NAME, SHAPE_NAME = "routed_experts", "routed_experts_shape"
_GROUP_NAME = re.compile(rf"{NAME}_(\d+)_(\d+)")


def _value_type(num_experts: int) -> pa.DataType:
    if not 0 <= num_experts <= 65_536:
        raise ModalityError(f"num_experts must be from 0 (a dense model) to 65536, got {num_experts}")
    return pa.uint8() if num_experts <= SMALL_NUM_EXPERTS else pa.uint16()


def layer_groups(num_layers: int, layers_per_column: int) -> list[LayerRange]:
    """Cut layers into groups of `layers_per_column`, the last one maybe smaller; none for 0: one column for all."""
    if layers_per_column < 1:
        return []
    starts = range(0, num_layers, layers_per_column)
    return [(start, min(start + layers_per_column, num_layers)) for start in starts]


def routing_columns(
    num_experts: int = SMALL_NUM_EXPERTS, groups: Sequence[LayerRange] = ()
) -> tuple[Column, ...]:
    """Return the columns of a routing table for a model with `num_experts` experts in a layer.

    A dense model, with 0, has them too, all null.
    """
    shape = "[num_tokens - 1, num_layers, top_k]"
    names = {_name(group): f"layers {group[0]} to {group[1] - 1}" for group in groups}
    return (
        *(
            Column(
                name=name,
                type=pa.list_(_value_type(num_experts)),
                meaning=f"experts that each token was sent to in {layers}, row-major",
                shape=shape,
                writer="rollout",
                nullable=True,
            )
            for name, layers in (names or {NAME: "each layer"}).items()
        ),
        Column(
            name=SHAPE_NAME,
            type=pa.list_(pa.int32(), 3),
            meaning="shape of the table of all layers",
            shape=shape,
            writer="rollout",
            nullable=True,
        ),
    )


def routing_groups(names: Iterable[str]) -> list[LayerRange]:
    """Return the layer groups among the names of columns, in order; none if one column holds all layers."""
    found = [_GROUP_NAME.fullmatch(name) for name in names]
    return sorted((int(match[1]), int(match[2])) for match in found if match)


def routing_names(names: Iterable[str], layers: LayerRange | None = None) -> list[str]:
    """Return those of a table's columns that hold the routes of `layers` (None: all), and their shape.

    Raises:
        ModalityError: no column holds some of these layers.
    """
    names = list(names)
    groups = routing_groups(names)
    if not groups:
        return [NAME, SHAPE_NAME] if NAME in names else []
    first, end = layers if layers is not None else (groups[0][0], groups[-1][1])
    chosen = [group for group in groups if group[0] < end and group[1] > first]
    _check_covered(chosen, first, end)
    return [*map(_name, chosen), SHAPE_NAME]


def routing_to_arrow(
    tables: Sequence[np.ndarray | None],
    num_experts: int = SMALL_NUM_EXPERTS,
    groups: Sequence[LayerRange] = (),
) -> dict[str, pa.Array]:
    """Return the columns for one routing table a row. Copies each value once.

    Raises:
        ModalityError: a table is not made of integers in three dimensions, names an expert that is not there, or has
            other layers than the groups.
    """
    for row, table in enumerate(tables):
        if table is not None:
            _check_table(row, table, num_experts, groups[-1][1] if groups else None)
    absent = np.fromiter((table is None for table in tables), bool, len(tables))
    shapes = np.zeros((len(tables), 3), np.int32)
    for row, table in enumerate(tables):
        if table is not None:
            shapes[row] = table.shape
    columns: dict[str, pa.Array] = {}
    for name, chosen in {_name(group): slice(*group) for group in groups}.items() or [(NAME, slice(None))]:
        present = [[] if table is None else [table[:, chosen]] for table in tables]
        columns[name] = pack_list(present, _value_type(num_experts))
    mask = pa.array(absent)
    columns[SHAPE_NAME] = pa.FixedSizeListArray.from_arrays(pa.array(shapes.reshape(-1)), 3, mask=mask)
    return columns


def _check_table(row: int, table: np.ndarray, num_experts: int, num_layers: int | None) -> None:
    if table.ndim != 3 or table.dtype.kind not in "iu":
        raise ModalityError(
            f"routed_experts of row {row} must be integers [num_tokens - 1, num_layers, top_k], "
            f"got {table.dtype} {list(table.shape)}"
        )
    if table.size and not 0 <= int(table.min()) <= int(table.max()) < num_experts:
        raise ModalityError(
            f"routed_experts of row {row} must be in [0, {num_experts}), got {table.min()} to {table.max()}"
        )
    if num_layers is not None and table.shape[1] != num_layers:
        raise ModalityError(
            f"routed_experts of row {row} must have the {num_layers} layers of its columns, got {table.shape[1]}"
        )


def routing_from_arrow(
    columns: pa.Table | pa.RecordBatch, layers: LayerRange | None = None
) -> list[np.ndarray | None]:
    """Return each row's routing table, [num_tokens - 1, layers, top_k], null as None.

    `layers` are those wanted, by default all that are there. From one column it is a read-only view; what lies in
    several columns is joined by a copy.

    Raises:
        ModalityError: some of these layers are not there.
    """
    shapes = columns[SHAPE_NAME].to_pylist()
    groups = routing_groups(columns.schema.names)
    if not groups:
        parts = [(None, unpack_list(columns[NAME]))]
        return [_joined(parts, row, shape, layers) for row, shape in enumerate(shapes)]
    first, end = layers if layers is not None else (groups[0][0], groups[-1][1])
    chosen = [group for group in groups if group[0] < end and group[1] > first]
    _check_covered(chosen, first, end)
    grouped = [(group, unpack_list(columns[_name(group)])) for group in chosen]
    return [_joined(grouped, row, shape, (first, end)) for row, shape in enumerate(shapes)]


def joined_routing(table: pa.Table) -> pa.Table:
    """Return rows with the routes of all layers in one column, for those that keep whole tables."""
    groups = routing_groups(table.column_names)
    if not groups:
        return table
    num_experts = 1 << table.schema.field(_name(groups[0])).type.value_type.bit_width
    joined = routing_to_arrow(routing_from_arrow(table), num_experts)
    rest = table.drop_columns([*map(_name, groups), SHAPE_NAME])
    for column in routing_columns(num_experts):
        rest = rest.append_column(column.to_field(), joined[column.name])
    return rest


def _name(group: LayerRange) -> str:
    return f"{NAME}_{group[0]}_{group[1]}"


def _check_covered(groups: Sequence[LayerRange], first: int, end: int) -> None:
    at = first
    for start, stop in groups:
        at = stop if start <= at else at
    if not first < end or at < end:
        raise ModalityError(
            f"routed_experts must be there for layers {first} to {end - 1}, got columns of layers "
            f"{[f'{start} to {stop - 1}' for start, stop in groups]}"
        )


def _joined(
    parts: Sequence[tuple[LayerRange | None, list[np.ndarray | None]]],
    row: int,
    shape: list[int] | None,
    layers: LayerRange | None,
) -> np.ndarray | None:
    pieces = []
    for group, column in parts:
        values = column[row]
        if shape is None or values is None:
            return None
        num_tokens, num_layers, top_k = shape
        start, end = group or (0, num_layers)
        first, stop = layers or (start, end)
        if not 0 <= first < stop <= num_layers and layers is not None:
            raise ModalityError(
                f"routed_experts of row {row} must be there for layers {first} to {stop - 1}, got {num_layers} layers"
            )
        table = values.reshape(num_tokens, end - start, top_k)
        pieces.append(table[:, max(first, start) - start : min(stop, end) - start])
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=1)
