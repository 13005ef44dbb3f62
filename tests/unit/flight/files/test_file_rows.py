"""Files as rows of a table, and tables as files."""

from __future__ import annotations

import base64
import datetime as dt
import json
from pathlib import Path

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flight.errors import InvalidRequestError, SchemaMismatchError
from flight.files.file_rows import FileRows, write_table
from flight.schema import Column, TableSpec

SPEC = TableSpec(
    name="rollouts",
    columns=(
        Column(name="text", type=pa.string(), meaning="words", writer="rollout"),
        Column(name="reward", type=pa.float32(), meaning="score", writer="rollout"),
        Column(name="step", type=pa.int32(), meaning="a whole number", writer="rollout", nullable=True),
        Column(name="tokens", type=pa.list_(pa.int32()), meaning="ids", writer="rollout", nullable=True),
        Column(name="image", type=pa.binary(), meaning="picture", writer="rollout", nullable=True),
        Column(
            name="when", type=pa.timestamp("us", "UTC"), meaning="a moment", writer="rollout", nullable=True
        ),
        Column(
            name="grid",
            type=pa.fixed_shape_tensor(pa.float32(), [2]),
            meaning="g",
            writer="rollout",
            nullable=True,
        ),
        Column(name="advantage", type=pa.float32(), meaning="advantage", writer="actor"),
    ),
    consumers=(),
)


def file_rows(path: Path, **changes) -> FileRows:
    """Return the rows of a file for the table above."""
    return FileRows(**({"path": path, "name": path.name, "spec": SPEC, "uid_prefix": path.name} | changes))


def read(path: Path, **changes) -> list[pa.RecordBatch]:
    """Return all batches of a file."""
    return list(file_rows(path, **changes).batches())


def json_file(folder: Path, *rows: object) -> Path:
    """Write rows as JSON lines; text goes in as it is."""
    path = folder / "in.jsonl"
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def refusal(path: Path, **changes) -> str:
    """Return what is said about a file's rows."""
    with pytest.raises((SchemaMismatchError, InvalidRequestError)) as caught:
        read(path, **changes)
    return str(caught.value)


def test_json_lines_become_the_types_of_the_table(tmp_path):
    """Base64, ISO times, whole floats and nested lists; uids name file and line; empty lines count."""
    path = json_file(
        tmp_path,
        {
            "text": "a",
            "reward": 0.1,
            "step": 3.0,
            "tokens": [1, None],
            "image": base64.b64encode(b"hi").decode(),
        },
        "",
        {
            "uid": "u",
            "group_id": "g",
            "text": "b",
            "reward": 1,
            "when": "2026-01-31T01:02:03Z",
            "grid": [1, 2],
        },
    )
    [batch] = read(path)
    assert batch.drop_columns(["reward"]).to_pylist() == [
        {
            "uid": "in.jsonl:1",
            "group_id": None,
            "text": "a",
            "step": 3,
            "tokens": [1, None],
            "image": b"hi",
            "when": None,
            "grid": None,
        },
        {
            "uid": "u",
            "group_id": "g",
            "text": "b",
            "step": None,
            "tokens": None,
            "image": None,
            "when": dt.datetime(2026, 1, 31, 1, 2, 3, tzinfo=dt.UTC),
            "grid": [1.0, 2.0],
        },
    ]
    assert batch.schema.field("reward").type == pa.float32()
    assert batch.schema.field("grid").type == pa.fixed_shape_tensor(pa.float32(), [2])


def test_json_lines_deliver_the_parts_that_have_values(tmp_path):
    """A part of which a line has nothing stays open, whatever lines stand beside it."""
    path = json_file(
        tmp_path,
        {"text": "a", "reward": 0},
        {"text": "b", "reward": 0, "advantage": None},
        {"uid": "in.jsonl:1", "advantage": 1},
        {"text": "c", "reward": 0, "advantage": 2},
    )
    assert [batch.schema.names for batch in read(path)] == [
        ["uid", "text", "reward"],
        ["uid", "advantage"],
        ["uid", "text", "reward", "advantage"],
    ]
    assert [batch.num_rows for batch in read(path, writer="rollout")][:1] == [2]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"text": "a", "rewrad": 1},
            "in.jsonl:2: column must be one of ['uid', 'group_id', 'text', 'reward', 'step', 'tokens', 'image', "
            "'when', 'grid', 'advantage'], got 'rewrad'; did you mean 'reward'?",
        ),
        (
            {"text": "a", "reward": "high"},
            "in.jsonl:2: column 'reward' must be float, a number, got \"high\"",
        ),
        (
            {"text": "a", "reward": 1e300},
            "in.jsonl:2: column 'reward' must be float, a number that float can hold, got 1e+300",
        ),
        ({"text": 5, "reward": 1}, "in.jsonl:2: column 'text' must be string, text, got 5"),
        ({"text": "a"}, "in.jsonl:2: column 'reward' must be float, not null, got no such key"),
        ({"text": None, "reward": 1}, "in.jsonl:2: column 'text' must be string, not null, got null"),
        (
            {"text": "a", "reward": 1, "step": 2.5},
            "in.jsonl:2: column 'step' must be int32, an integer from -2147483648 to 2147483647, got 2.5",
        ),
        (
            {"text": "a", "reward": 1, "step": True},
            "in.jsonl:2: column 'step' must be int32, an integer from -2147483648 to 2147483647, got true",
        ),
        (
            {"text": "a", "reward": 1, "tokens": [1, "x"]},
            "in.jsonl:2: column 'tokens[1]' must be an integer from -2147483648 to 2147483647, got \"x\"",
        ),
        (
            {"text": "a", "reward": 1, "image": "?"},
            "in.jsonl:2: column 'image' must be binary, base64 text, got \"?\"",
        ),
        ({"uid": 7}, "in.jsonl:2: column 'uid' must be text, got 7"),
        ("[1]", "in.jsonl:2: line must be one JSON object, got [1]"),
        ("{", "in.jsonl:2: line must be one JSON object, got: Expecting property name"),
        ("[" * 100_000, "in.jsonl:2: line must be one JSON object, got: "),
    ],
)
def test_json_lines_are_refused_by_line_and_column(tmp_path, row, message):
    """The second line is wrong, and the message says how."""
    assert refusal(json_file(tmp_path, {"text": "a", "reward": 1}, row)).startswith(message)


def test_rows_need_a_uid_or_a_prefix(tmp_path):
    """Standard input has no name to make uids of."""
    message = "column 'uid' must be there, got none; give the rows uids, or a --uid-prefix"
    assert message in refusal(json_file(tmp_path, {"text": "a", "reward": 1}), uid_prefix=None)


def test_json_lines_of_any_size_become_batches(tmp_path):
    """Four megabytes of text or so make a batch."""
    path = json_file(tmp_path, *({"text": "x" * 1_000_000, "reward": 0} for _ in range(9)))
    assert [batch.num_rows for batch in read(path)] == [4, 4, 1]


def test_typed_files_are_cast_where_nothing_is_lost(tmp_path):
    """Wider integers, large lists, dictionaries and exact floats are what pandas and polars write."""
    table = pa.table(
        {
            "text": pa.array(["a", "b"]).dictionary_encode(),
            "reward": pa.array([0.5, float("nan")], pa.float64()),
            "step": pa.array([1, 2], pa.int64()),
            "tokens": pa.array([[1], None], pa.large_list(pa.int64())),
            "grid": pa.array([[1, 2], None], pa.list_(pa.float64(), 2)),
        }
    )
    for name in ("in.parquet", "in.arrow"):
        write_table(table, tmp_path / name)
        [batch] = read(tmp_path / name)
        assert batch.schema.field("tokens").type == pa.list_(pa.int32())
        assert batch.drop_columns(["reward", "grid"]).to_pylist() == [
            {"uid": f"{name}:1", "text": "a", "step": 1, "tokens": [1]},
            {"uid": f"{name}:2", "text": "b", "step": 2, "tokens": None},
        ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"reward": pa.array([0.5, 0.1])},
            "in.parquet row 2: column 'reward' must be float or become it without loss, got 0.1 (double); "
            "give --round-floats to take the nearest",
        ),
        (
            {"step": pa.array([1, 1 << 40])},
            "in.parquet row 2: column 'step' must be int32 or become it without loss, got 1099511627776 (int64)",
        ),
        (
            {"step": pa.array([1.0, 1.5])},
            "in.parquet row 2: column 'step' must be int32 or become it without loss, got 1.5 (double)",
        ),
        (
            {"step": pa.array(["1", "2"])},
            "in.parquet: column 'step' must be int32 or become it without loss, got string",
        ),
        (
            {"tokens": pa.array([[1], [2.5]])},
            "in.parquet row 2: column 'tokens' must be list<item: int32> or become it without loss, got [2.5]",
        ),
        (
            {"rewards": pa.array([1.0, 2.0])},
            "in.parquet: column must be one of ['uid', 'group_id', 'text', 'reward', ",
        ),
        (
            {"text": pa.array(["a", None])},
            "in.parquet row 2: column 'text' must be string, not null, got null",
        ),
        ({"uid": pa.array(["a", None])}, "in.parquet row 2: column 'uid' must be string, not null, got null"),
    ],
)
def test_typed_files_are_refused_by_row_and_column(tmp_path, values, message):
    """A cast that would lose something is not made."""
    whole = {"text": pa.array(["a", "b"]), "reward": pa.array([1.0, 2.0], pa.float32())}
    pq.write_table(pa.table(whole | values), tmp_path / "in.parquet")
    assert refusal(tmp_path / "in.parquet").startswith(message)


def test_round_floats_takes_the_nearest_but_no_infinity(tmp_path):
    """Digits may go, size may not."""
    pq.write_table(pa.table({"text": ["a"], "reward": [0.1]}), tmp_path / "in.parquet")
    [batch] = read(tmp_path / "in.parquet", round_floats=True)
    assert batch["reward"].to_pylist() == [pytest.approx(0.1)]
    pq.write_table(pa.table({"text": ["a"], "reward": [1e300]}), tmp_path / "in.parquet")
    assert "row 1: column 'reward'" in refusal(tmp_path / "in.parquet", round_floats=True)


def test_typed_files_deliver_the_parts_that_have_values(tmp_path):
    """What was exported before the actor came can be put again."""
    table = pa.table(
        {
            "row_id": [7, 8, 9],
            "uid": ["a", "b", "c"],
            "attempt": [1, 1, 1],
            "text": ["a", "b", "c"],
            "reward": pa.array([1, 2, 3], pa.float32()),
            "advantage": pa.array([None, None, 1.0], pa.float32()),
        }
    )
    write_table(table, tmp_path / "in.parquet")
    assert [(batch.num_rows, batch.schema.names) for batch in read(tmp_path / "in.parquet")] == [
        (2, ["uid", "text", "reward"]),
        (1, ["uid", "text", "reward", "advantage"]),
    ]
    assert [batch.schema.names for batch in read(tmp_path / "in.parquet", writer="rollout")] == [
        ["uid", "text", "reward"]
    ]


@pytest.mark.parametrize(
    "name", ["in.csv", "in", "nothing.parquet", "nothing.jsonl", "broken.parquet", "broken.arrow"]
)
def test_files_that_cannot_be_read_are_refused(tmp_path, name):
    """Wrong suffix, no file, no such format."""
    for broken in ("broken.parquet", "broken.arrow"):
        (tmp_path / broken).write_bytes(b"nothing of the kind")
    assert refusal(tmp_path / name).startswith((f"{name}: file must be", f"{tmp_path}/{name}: file must"))


def test_arrow_streams_are_read_too(tmp_path):
    """A stream file has no footer."""
    batch = pa.record_batch({"text": ["a"], "reward": pa.array([1], pa.float32())})
    with pa.OSFile(str(tmp_path / "in.arrow"), "wb") as sink, pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    assert read(tmp_path / "in.arrow")[0].num_rows == 1


def test_write_table_makes_files_that_others_read(tmp_path):
    """pandas and polars need none of our code, and nothing is left of a failure."""
    table = pa.table({"uid": ["a"], "tokens": pa.array([[1, 2]], pa.list_(pa.int32()))})
    write_table(table, tmp_path / "out.parquet")
    write_table(table, tmp_path / "out.arrow")
    assert pd.read_parquet(tmp_path / "out.parquet")["tokens"][0].tolist() == [1, 2]
    assert pl.read_ipc(tmp_path / "out.arrow")["tokens"].to_list() == [[1, 2]]
    with pytest.raises(InvalidRequestError, match="file must end in one of"):
        write_table(table, tmp_path / "out.csv")
    with pytest.raises(InvalidRequestError, match="file must be writable"):
        write_table(table, tmp_path / "no" / "out.parquet")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.arrow", "out.parquet"]
