"""The recorder: whole files only, nothing lost, nothing twice, natural types."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relax.errors import ServiceError, WiringError
from relax.observe.natural import natural_table
from relax.observe.recorder import RolloutRecorder, read_rollouts, read_routed_experts, write_table

Rows = Callable[..., pa.Table]


def test_recorder_makes_a_version_visible_when_a_newer_one_begins(tmp_path: Path, rollout_rows: Rows) -> None:
    """Batches of the open version stay hidden; the file appears whole."""
    directory = tmp_path / "rollouts"
    recorder = RolloutRecorder(directory)
    recorder.write(rollout_rows(3, 4))
    recorder.write(rollout_rows(3, 4, first=4))
    assert list(directory.iterdir()) == []
    recorder.write(rollout_rows(4, 4))
    assert [path.name for path in directory.iterdir()] == ["000003.parquet"]
    assert pq.read_metadata(recorder.path_of(3)).num_rows == 8
    recorder.close()
    assert sorted(path.name for path in directory.iterdir()) == ["000003.parquet", "000004.parquet"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rollouts"]
    assert recorder.num_rows == 12


def test_recorder_splits_a_batch_by_version_and_adds_late_rows(tmp_path: Path, rollout_rows: Rows) -> None:
    """One batch of three versions gives three files; a late row joins its version's file."""
    with RolloutRecorder(tmp_path / "rollouts") as recorder:
        mixed = pa.concat_tables([rollout_rows(2, 3), rollout_rows(0, 3), rollout_rows(1, 3)])
        recorder.write(mixed)
        recorder.write(rollout_rows(0, 2, first=3))
    rows = read_rollouts(tmp_path / "rollouts")
    assert rows["trained_policy_version"].to_pylist() == [0] * 5 + [1] * 3 + [2] * 3
    assert set(rows["uid"].to_pylist()) >= set(mixed["uid"].to_pylist())


def test_recorder_keeps_every_column_value_and_note(tmp_path: Path, rollout_rows: Rows) -> None:
    """What is read is what was written, with meaning, unit and shape."""
    given = rollout_rows(0)
    with RolloutRecorder(tmp_path / "rollouts") as recorder:
        recorder.write(given)
    rows = pq.read_table(tmp_path / "rollouts" / "000000.parquet")
    assert set(rows.column_names) == set(given.column_names) | {"routed_experts_shape"}
    for name in given.column_names:
        if name != "routed_experts":
            assert rows[name].to_pylist() == given[name].to_pylist()
            assert rows.schema.field(name).metadata[b"meaning"] == b"made up"
    notes = rows.schema.field("routed_experts").metadata
    assert (notes[b"dtype"], notes[b"byte_order"], notes[b"unit"]) == (b"uint8", b"little", b"unit")
    assert (
        pq.read_metadata(tmp_path / "rollouts" / "000000.parquet").row_group(0).column(0).compression
        == "ZSTD"
    )


def test_recorder_continues_after_a_kill(tmp_path: Path, rollout_rows: Rows) -> None:
    """Rows that `write` took survive without `close`; rows delivered again are kept once."""
    killed = RolloutRecorder(tmp_path / "rollouts")
    killed.write(rollout_rows(5, 6))
    killed.write(rollout_rows(6, 6))
    (tmp_path / ".rollouts.open" / "000006-000000009.unfinished").write_bytes(b"torn")
    with RolloutRecorder(tmp_path / "rollouts") as recorder:
        recorder.write(rollout_rows(6, 6))
        recorder.write(rollout_rows(6, 2, first=6))
    assert recorder.num_duplicates == 6
    assert pq.read_metadata(recorder.path_of(6)).num_rows == 8
    assert len(read_rollouts(tmp_path / "rollouts")) == 14


def test_recorder_survives_a_kill_between_rename_and_clean_up(tmp_path: Path, rollout_rows: Rows) -> None:
    """Batches that are already in their file are not recorded twice."""
    directory = tmp_path / "rollouts"
    first = RolloutRecorder(directory)
    first.write(rollout_rows(1, 4))
    (leftover,) = (tmp_path / ".rollouts.open").iterdir()
    data = leftover.read_bytes()
    first.close()
    leftover.parent.mkdir()
    leftover.write_bytes(data)
    RolloutRecorder(directory).close()
    assert len(read_rollouts(directory)) == 4


def test_recorder_joins_batches_of_different_columns(tmp_path: Path, rollout_rows: Rows) -> None:
    """A column that one batch lacks is null in its rows."""
    with RolloutRecorder(tmp_path / "rollouts") as recorder:
        recorder.write(rollout_rows(0, 2).drop_columns(["media_paths"]))
        recorder.write(rollout_rows(0, 2, first=2))
    assert read_rollouts(tmp_path / "rollouts")["media_paths"].null_count == 2


def test_recorder_refuses_rows_it_cannot_place(tmp_path: Path, rollout_rows: Rows) -> None:
    """A missing or null version, and writing after close, are named."""
    recorder = RolloutRecorder(tmp_path / "rollouts")
    with pytest.raises(WiringError, match=r"must have column 'trained_policy_version', got \['uid'\]"):
        recorder.write(pa.table({"uid": ["a"]}))
    nulls = pa.table({"uid": ["a", "b"], "trained_policy_version": pa.array([1, None], pa.int64())})
    with pytest.raises(WiringError, match="must be filled in every row, got 1 nulls in 2 rows"):
        recorder.write(nulls)
    recorder.write(rollout_rows(0, 1).slice(0, 0))
    recorder.close()
    recorder.close()
    with pytest.raises(ServiceError, match="must be open to write, got closed"):
        recorder.write(rollout_rows(0, 1))


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("form", ["fixed", "nested", "flat"])
def test_recorder_stores_routed_experts_as_bytes(tmp_path: Path, bits: int, form: str) -> None:
    """Every Arrow form of the expert table comes back as the same array, also from pandas rows."""
    leaf, dtype = (pa.uint8(), np.uint8) if bits == 8 else (pa.uint16(), np.uint16)
    arrays = [
        np.arange(12, dtype=dtype).reshape(3, 2, 2) * (20 if bits == 8 else 300),
        None,
        np.zeros((1, 2, 2), dtype),
    ]
    kinds = {"fixed": pa.list_(pa.list_(pa.list_(leaf, 2), 2)), "nested": pa.list_(pa.list_(pa.list_(leaf)))}
    versions = pa.array([0, 0, 0], pa.int64())
    if form == "flat":
        flat = [None if array is None else array.ravel() for array in arrays]
        shapes = pa.array(
            [None if array is None else array.shape for array in arrays], pa.list_(pa.int32(), 3)
        )
        columns = {"routed_experts": pa.array(flat, pa.list_(leaf)), "routed_experts_shape": shapes}
    else:
        nested = [None if array is None else array.tolist() for array in arrays]
        columns = {"routed_experts": pa.array(nested, kinds[form])}
    with RolloutRecorder(tmp_path / "rollouts") as recorder:
        recorder.write(pa.table({"trained_policy_version": versions} | columns))
    path = tmp_path / "rollouts" / "000000.parquet"
    readings = (pq.read_table(path).to_pylist(), pl.read_parquet(path).to_dicts())
    for row, array in ((row, array) for rows in readings for row, array in zip(rows, arrays, strict=True)):
        read = read_routed_experts(row)
        assert (read is None) == (array is None)
        if array is not None:
            assert read.dtype == array.dtype
            np.testing.assert_array_equal(read, array)
    np.testing.assert_array_equal(read_routed_experts(pd.read_parquet(path).iloc[0]), arrays[0])


def test_recorder_refuses_wide_experts(tmp_path: Path) -> None:
    """int32 experts would be four times the bytes: they are refused with the way out."""
    table = pa.table({"trained_policy_version": [0], "routed_experts": pa.array([[1]], pa.list_(pa.int32()))})
    with (
        RolloutRecorder(tmp_path / "rollouts") as recorder,
        pytest.raises(WiringError, match="lists of uint8 or uint16"),
    ):
        recorder.write(table)


def test_natural_table_turns_views_dictionaries_and_extensions_into_lists_and_strings() -> None:
    """Types that polars or pandas cannot show become plain ones, nulls and values kept."""
    values = {
        "views": pa.array([[1, 2], None, [3]], pa.list_view(pa.int32())),
        "deep": pa.array(
            [{"x": [[1], None]}, None, {"x": []}], pa.struct([("x", pa.list_(pa.list_view(pa.int8())))])
        ),
        "text": pa.array(["a", None, "b"], pa.string_view()),
        "codes": pa.array(["a", "b", "a"]).dictionary_encode(),
        "grid": pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12, dtype=np.int32).reshape(3, 2, 2)),
    }
    natural = natural_table(pa.table(values))
    natural.validate(full=True)
    assert natural["views"].to_pylist() == [[1, 2], None, [3]]
    assert natural["deep"].to_pylist() == [{"x": [[1], None]}, None, {"x": []}]
    assert natural["text"].type == natural["codes"].type == pa.string()
    assert natural["grid"].to_pylist()[1] == [4, 5, 6, 7]


def test_records_read_as_natural_types_in_pandas_and_polars(recorded_run: Path) -> None:
    """A directory of records opens in both libraries, lists as lists."""
    frame = pd.read_parquet(recorded_run / "rollouts")
    polars_frame = pl.scan_parquet(recorded_run / "rollouts").collect()
    assert len(frame) == len(polars_frame) == 288
    assert polars_frame.schema["rollout_logprobs"] == pl.List(pl.Float32)
    assert polars_frame.schema["media_paths"] == pl.List(pl.String)
    assert polars_frame.schema["routed_experts"] == pl.Binary
    assert frame["completion_token_ids"].iloc[0].dtype == np.int32


def test_write_table_keeps_rows_and_makes_directories(tmp_path: Path) -> None:
    """One table, one file, nothing else left behind."""
    path = tmp_path / "evaluation" / "000003.parquet"
    assert write_table(pa.table({"text": pa.array(["a", None], pa.string_view())}), path) == 2
    assert [entry.name for entry in path.parent.iterdir()] == ["000003.parquet"]
    assert read_rollouts(path.parent).to_pydict() == {"text": ["a", None]}
    assert read_rollouts(tmp_path / "nothing").num_rows == 0


def test_recorder_forgets_what_was_trained_after_a_checkpoint(tmp_path: Path, rollout_rows: Rows) -> None:
    """Files and open batches of that version and later ones; what is trained anew takes their place."""
    with RolloutRecorder(tmp_path / "rollouts") as recorder:
        for version in range(4):
            recorder.write(rollout_rows(version, 2))
    recorder = RolloutRecorder(tmp_path / "rollouts")
    recorder.write(rollout_rows(4, 2))
    assert recorder.forget_from(2) == 3
    recorder.write(rollout_rows(2, 3))
    recorder.close()
    rows = read_rollouts(tmp_path / "rollouts")
    assert rows["trained_policy_version"].to_pylist() == [0] * 2 + [1] * 2 + [2] * 3
