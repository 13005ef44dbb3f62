"""Routing tables to columns and back."""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa
import pytest

from modalities.errors import ModalityError
from modalities.routing import (
    joined_routing,
    layer_groups,
    routing_columns,
    routing_from_arrow,
    routing_groups,
    routing_names,
    routing_to_arrow,
)


@pytest.mark.parametrize(("num_experts", "dtype"), [(4, np.uint8), (256, np.uint8), (512, np.uint16)])
def test_routing_survives_the_columns(num_experts: int, dtype: type) -> None:
    """Tables of different lengths, and rows without one, also when sliced."""
    rng = np.random.default_rng(0)
    tables = [rng.integers(0, num_experts, (length, 2, 3)).astype(dtype) for length in (5, 1, 0)]
    given = [tables[0], None, tables[1], tables[2]]
    columns = routing_to_arrow(given, num_experts)
    assert [columns[column.name].type for column in routing_columns(num_experts)] == [
        column.type for column in routing_columns(num_experts)
    ]
    back = routing_from_arrow(pa.table(columns).slice(1))
    assert back[0] is None
    for table, expected in zip(back[1:], given[2:], strict=True):
        assert table is not None
        assert table.dtype == dtype
        assert np.array_equal(table, expected)


def test_routing_columns_are_bytes_for_most_models() -> None:
    """Up to 256 experts a byte is enough."""
    assert routing_columns()[0].type == pa.list_(pa.uint8())


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (np.full((2, 2, 1), 9), "routed_experts of row 0 must be in [0, 8), got 9 to 9"),
        (
            np.zeros((2, 2), np.uint8),
            "routed_experts of row 0 must be integers [num_tokens - 1, num_layers, top_k], got uint8 [2, 2]",
        ),
        (
            np.zeros((2, 2, 1), np.float32),
            "routed_experts of row 0 must be integers [num_tokens - 1, num_layers, top_k], got float32 [2, 2, 1]",
        ),
    ],
)
def test_routing_refuses_what_is_no_table(table: np.ndarray, message: str) -> None:
    """An expert that is not there would replay nonsense."""
    with pytest.raises(ModalityError) as caught:
        routing_to_arrow([table], 8)
    assert str(caught.value) == message


def _tables(num_experts: int, dtype: type, num_layers: int = 7) -> list[np.ndarray | None]:
    rng = np.random.default_rng(1)
    made = [rng.integers(0, num_experts, (length, num_layers, 3)).astype(dtype) for length in (5, 1, 9)]
    return [made[0], None, made[1], made[2]]


def _digests(tables: list[np.ndarray | None], layers: slice = slice(None)) -> list[str | None]:
    return [
        None if each is None else hashlib.sha256(np.ascontiguousarray(each[:, layers])).hexdigest()
        for each in tables
    ]


@pytest.mark.parametrize(("num_experts", "dtype"), [(256, np.uint8), (300, np.uint16)])
@pytest.mark.parametrize("layers_per_column", [0, 1, 3, 7, 9])
@pytest.mark.parametrize("layers", [(0, 7), (3, 6), (2, 4), (6, 7)])
def test_routing_of_some_layers_is_what_slicing_gives(num_experts, dtype, layers_per_column, layers):
    """However the layers are grouped, whatever range is asked for: the same bytes, from no more columns than needed."""
    tables = _tables(num_experts, dtype)
    groups = layer_groups(7, layers_per_column)
    columns = pa.table(routing_to_arrow(tables, num_experts, groups))
    assert columns.column_names == [each.name for each in routing_columns(num_experts, groups)]
    assert routing_groups(columns.column_names) == groups
    names = routing_names(columns.column_names, layers)
    expected = len([group for group in groups if group[0] < layers[1] and group[1] > layers[0]]) or 1
    assert len(names) == expected + 1
    got = routing_from_arrow(columns.select(names), layers)
    assert _digests(got) == _digests(tables, slice(*layers))
    assert {each.dtype for each in got if each is not None} == {np.dtype(dtype)}
    whole = joined_routing(columns)
    assert whole.column_names == ["routed_experts", "routed_experts_shape"]
    assert _digests(routing_from_arrow(whole)) == _digests(tables)


def test_routing_of_one_group_is_a_view():
    """A stage's own column is not copied."""
    columns = pa.table(routing_to_arrow(_tables(256, np.uint8), 256, layer_groups(7, 4)))
    name, _ = routing_names(columns.column_names, (4, 7))
    buffer = columns[name].chunk(0).values.buffers()[1]
    table = routing_from_arrow(columns, (4, 7))[0]
    assert buffer.address <= table.ctypes.data < buffer.address + buffer.size
    assert not table.flags.writeable


def test_routing_of_layers_that_are_not_there_is_refused():
    """The message says which layers are."""
    tables = _tables(256, np.uint8)
    columns = pa.table(routing_to_arrow(tables, 256, layer_groups(7, 3)))
    with pytest.raises(ModalityError) as caught:
        routing_from_arrow(columns.select(routing_names(columns.column_names, (0, 3))), (1, 5))
    assert str(caught.value) == (
        "routed_experts must be there for layers 1 to 4, got columns of layers ['0 to 2']"
    )
    with pytest.raises(ModalityError, match="must be there for layers 5 to 7"):
        routing_names(columns.column_names, (5, 8))
    with pytest.raises(ModalityError) as caught:
        routing_from_arrow(pa.table(routing_to_arrow(tables)), (5, 8))
    assert str(caught.value) == "routed_experts of row 0 must be there for layers 5 to 7, got 7 layers"
    with pytest.raises(ModalityError) as caught:
        routing_to_arrow(tables, 256, layer_groups(6, 3))
    assert str(caught.value) == "routed_experts of row 0 must have the 6 layers of its columns, got 7"
    assert routing_names(["reward"]) == []
