"""Values of Arrow columns as short text for people. Long lists and strings are cut before they become Python values."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

MAX_CHARS = 48
MAX_VALUES = 6


def shorten(value: pa.Scalar) -> Any:
    """Return a value for display: numbers as they are, text and lists cut, binary as its length."""
    if not value.is_valid:
        return None
    if isinstance(value, pa.ExtensionScalar):
        return shorten(value.value)
    if isinstance(value, pa.ListScalar | pa.LargeListScalar | pa.FixedSizeListScalar):
        values = value.values
        head = ", ".join(str(shorten(each)) for each in values.slice(0, MAX_VALUES))
        return f"[{head}]" if len(values) <= MAX_VALUES else f"[{head}, … {len(values)} values]"
    if isinstance(
        value, pa.BinaryScalar | pa.LargeBinaryScalar | pa.FixedSizeBinaryScalar
    ) and not isinstance(value, pa.StringScalar | pa.LargeStringScalar):
        return f"{len(value.as_buffer())} bytes"
    plain = value.as_py()
    if isinstance(plain, bool | int):
        return plain
    if isinstance(plain, float):
        return float(f"{plain:.5g}")
    text = str(plain)
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}… {len(text)} characters"


def shorten_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Return rows as dictionaries of short values."""
    return [
        {name: shorten(table.column(name)[row]) for name in table.column_names}
        for row in range(table.num_rows)
    ]
