"""JSON values as values of Arrow types."""

from __future__ import annotations

import pyarrow as pa
import pytest

from flight.files.json_values import MisfitError, converter, to_array

MOMENT = "2026-01-31T13:45:10"


@pytest.mark.parametrize(
    ("arrow_type", "value", "shown"),
    [
        (pa.uint8(), 255, 255),
        (pa.int8(), 2.0, 2),
        (pa.float16(), 0.5, 0.5),
        (pa.bool8(), True, True),
        (pa.large_string(), "x", "x"),
        (pa.json_(), "[1]", "[1]"),
        (pa.binary(2), "aGk=", b"hi"),
        (pa.binary_view(), "aGk=", b"hi"),
        (pa.list_view(pa.int8()), [1], [1]),
        (pa.list_(pa.int8(), 2), [1, None], [1, None]),
        (pa.map_(pa.string(), pa.int32()), {"a": 1}, [("a", 1)]),
        (pa.struct([("a", pa.list_(pa.int8()))]), {"a": [1]}, {"a": [1]}),
        (pa.fixed_shape_tensor(pa.float32(), [2, 2]), [[1, 2], [3, 4]], [1.0, 2.0, 3.0, 4.0]),
    ],
)
def test_converter_takes_what_fits(arrow_type, value, shown):
    """A value and a null, in the type asked for."""
    convert = converter(arrow_type)
    assert convert is not None
    array = to_array([convert(value), None], arrow_type)
    assert (array.type, array.to_pylist()) == (arrow_type, [shown, None])


@pytest.mark.parametrize(
    ("arrow_type", "value", "text"),
    [
        (pa.decimal128(10, 2), "1.25", "1.25"),
        (pa.decimal128(10, 2), 3, "3.00"),
        (pa.timestamp("us", "UTC"), f"{MOMENT}Z", "2026-01-31 13:45:10+00:00"),
        (pa.timestamp("s"), MOMENT, "2026-01-31 13:45:10"),
        (pa.time32("ms"), "13:00:01.001", "13:00:01.001000"),
        (pa.date32(), "2026-01-31", "2026-01-31"),
        (pa.uuid(), "12345678123456781234567812345678", "12345678-1234-5678-1234-567812345678"),
    ],
)
def test_converter_reads_text_for_what_json_lacks(arrow_type, value, text):
    """Decimals, times and UUIDs."""
    convert = converter(arrow_type)
    assert convert is not None
    assert str(to_array([convert(value)], arrow_type)[0].as_py()) == text


@pytest.mark.parametrize(
    ("arrow_type", "value", "rule", "path"),
    [
        (pa.int8(), 128, "an integer from -128 to 127", ""),
        (pa.int64(), True, f"an integer from {-(2**63)} to {2**63 - 1}", ""),
        (pa.float32(), 2**24 + 1, "an integer that float holds exactly", ""),
        (pa.float64(), 10**400, "a number that double can hold", ""),
        (pa.bool_(), 1, "true or false", ""),
        (pa.string(), "\ud800", "text without lone surrogates", ""),
        (pa.binary(), "é", "base64 text", ""),
        (pa.binary(3), "aGk=", "base64 text of 3 bytes", ""),
        (pa.uuid(), "x", "a UUID as text", ""),
        (pa.decimal128(4, 2), "1.255", "text of a number within decimal128(4, 2)", ""),
        (pa.decimal128(4, 2), "NaN", "text of a number within decimal128(4, 2)", ""),
        (pa.timestamp("s"), f"{MOMENT}.5", "a time in whole s", ""),
        (pa.timestamp("s", "UTC"), MOMENT, "a time such as 2026-01-31T13:45:10Z, with its zone", ""),
        (pa.list_(pa.list_(pa.int8())), [[1], [2, "x"]], "an integer from -128 to 127", "[1][1]"),
        (pa.list_(pa.field("item", pa.int8(), nullable=False)), [None], "not null", "[0]"),
        (pa.struct([("a", pa.int8())]), {"b": 1}, "an object with keys among ['a']", ""),
        (pa.struct([("a", pa.int8())]), {"a": "x"}, "an integer from -128 to 127", ".a"),
        (pa.fixed_shape_tensor(pa.int8(), [2]), [1, 2, 3], "a list of 2 values", ""),
    ],
)
def test_converter_refuses_what_would_lose_something(arrow_type, value, rule, path):
    """The rule, and the place inside the value."""
    convert = converter(arrow_type)
    assert convert is not None
    with pytest.raises(MisfitError) as caught:
        convert(value)
    assert (caught.value.rule, caught.value.path) == (rule, path)


@pytest.mark.parametrize("arrow_type", [pa.duration("s"), pa.null(), pa.list_(pa.duration("s"))])
def test_converter_knows_what_json_cannot_hold(arrow_type):
    """Such columns come from Parquet or Arrow files."""
    assert converter(arrow_type) is None
