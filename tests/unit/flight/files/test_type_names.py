"""Arrow types by name."""

from __future__ import annotations

from contextlib import suppress

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flight.errors import InvalidRequestError
from flight.files.type_names import parse_type

PLAIN = [
    *(pa.bool_(), pa.int8(), pa.uint64(), pa.float16(), pa.float32(), pa.float64(), pa.string(), pa.binary()),
    *(pa.large_string(), pa.string_view(), pa.binary(16), pa.date32(), pa.time32("ms"), pa.time64("ns")),
    *(pa.duration("s"), pa.timestamp("s"), pa.timestamp("us", "UTC"), pa.timestamp("ns", "+01:00")),
    *(pa.decimal128(10, 2), pa.decimal256(40, -2), pa.uuid(), pa.json_(), pa.bool8(), pa.null()),
    pa.fixed_shape_tensor(pa.float32(), [2, 3]),
]
NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)


def _nest(inner: st.SearchStrategy) -> st.SearchStrategy:
    field = st.builds(
        lambda *parts: pa.field(*parts), NAMES, inner.filter(lambda t: t != pa.null()), st.booleans()
    )
    return st.one_of(
        st.builds(pa.list_, field),
        st.builds(pa.large_list, inner),
        st.builds(pa.list_view, inner),
        st.builds(lambda each, size: pa.list_(each, size), inner, st.integers(0, 9)),
        st.builds(pa.map_, st.just(pa.string()), inner),
        st.builds(pa.struct, st.lists(field, min_size=1, max_size=3, unique_by=lambda each: each.name)),
    )


@settings(max_examples=200, deadline=None)
@given(st.recursive(st.sampled_from(PLAIN), _nest, max_leaves=6))
def test_parse_type_reads_what_arrow_prints(arrow_type):
    """A printed schema can be pasted."""
    assert parse_type(str(arrow_type), where="x") == arrow_type


@pytest.mark.parametrize(
    ("name", "arrow_type"),
    [
        ("list<int32>", pa.list_(pa.int32())),
        ("fixed_size_list<float32>[3]", pa.list_(pa.float32(), 3)),
        ("struct<x:int32,y: list<string>>", pa.struct([("x", pa.int32()), ("y", pa.list_(pa.string()))])),
        ("fixed_shape_tensor<float>[2, 3]", pa.fixed_shape_tensor(pa.float32(), [2, 3])),
        ("timestamp[us, UTC]", pa.timestamp("us", "UTC")),
        (" map< string , int32 > ", pa.map_(pa.string(), pa.int32())),
    ],
)
def test_parse_type_reads_what_people_write(name, arrow_type):
    """Short forms and spaces."""
    assert parse_type(name, where="x") == arrow_type


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("int23", "x: type must be the name of an Arrow type, got 'int23'; did you mean 'int32'?"),
        ("list<int32", "x: type must have '>' at character 11, got 'list<int32'"),
        ("list<int32>>", "x: type must have nothing more at character 12, got 'list<int32>>'"),
        (
            "time64",
            "x: type must be the name of an Arrow type, got 'time64'; write time64 with its unit, such as time64[us]",
        ),
        ("struct<>", "x: type must have a field as NAME: TYPE at character 8, got 'struct<>'"),
    ],
)
def test_parse_type_says_what_is_wrong(name, message):
    """The place, and the nearest type."""
    with pytest.raises(InvalidRequestError) as caught:
        parse_type(name, where="x")
    assert str(caught.value) == message


@settings(max_examples=200, deadline=None)
@given(st.text("list<in32>[], :struma()0", max_size=40))
def test_parse_type_never_fails_otherwise(name):
    """Whatever stands there, the error is ours."""
    with suppress(InvalidRequestError):
        parse_type(name, where="x")


def test_parse_type_refuses_a_name_too_long():
    """Depth is bounded by length."""
    with pytest.raises(InvalidRequestError, match="at most 1000 characters, got 5000"):
        parse_type("list<" * 1000, where="x")
