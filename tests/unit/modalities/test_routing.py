"""Routing tables to columns and back."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from modalities.errors import ModalityError
from modalities.routing import ROUTING_COLUMNS, routing_columns, routing_from_arrow, routing_to_arrow


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
    assert ROUTING_COLUMNS[0].type == pa.list_(pa.uint8())


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
