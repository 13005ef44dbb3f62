"""Metrics: long rows to TensorBoard, to Parquet and to memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest

from relax.errors import ServiceError, WiringError
from relax.observe.metrics import MetricsWriter, Point, SeriesStore, metric_rows, read_metrics


def _values(run_dir: Path) -> list[float]:
    return read_metrics(run_dir)["value"].to_pylist()


def test_metrics_are_readable_while_running_and_merged_at_the_end(tmp_path: Path) -> None:
    """Parts first, one file after close, the same rows throughout."""
    writer = MetricsWriter(tmp_path, rows_per_part=4)
    for step in range(5):
        writer.add("actor", step, step, {"loss": step, "reward": -step}, time_s=100.0 + step)
    assert len(_values(tmp_path)) == 8
    writer.flush()
    assert len(pd.read_parquet(tmp_path / "metrics")) == 10
    running = _values(tmp_path)
    writer.close()
    writer.close()
    assert _values(tmp_path) == running == [0, 0, 1, -1, 2, -2, 3, -3, 4, -4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.parquet", "tensorboard"]
    assert len(pd.read_parquet(tmp_path / "metrics.parquet")) == 10
    with pytest.raises(ServiceError, match="must be open to write"):
        writer.add("actor", 1, 1, {"loss": 1.0})


def test_metrics_parts_follow_the_clock(tmp_path: Path) -> None:
    """A part is written when its oldest row has waited long enough."""
    now = [0.0]
    writer = MetricsWriter(tmp_path, seconds_per_part=10, clock=lambda: now[0])
    writer.add("actor", 0, 0, {"loss": 1.0})
    assert _values(tmp_path) == []
    now[0] = 10.0
    writer.add("actor", 1, 1, {"loss": 2.0})
    assert _values(tmp_path) == [1.0, 2.0]
    writer.close()


def test_metrics_continue_in_the_same_directory(tmp_path: Path) -> None:
    """A second writer appends; parts that are already merged do not count twice."""
    for value in (1.0, 2.0):
        with MetricsWriter(tmp_path) as writer:
            writer.add("actor", 0, 0, {"loss": value})
    stale = tmp_path / "metrics" / "000000.parquet"
    stale.parent.mkdir()
    stale.write_bytes((tmp_path / "metrics.parquet").read_bytes())
    assert _values(tmp_path) == [1.0, 2.0]
    killed = MetricsWriter(tmp_path)
    killed.add("actor", 0, 0, {"loss": 3.0})
    killed.flush()
    assert _values(tmp_path) == [1.0, 2.0, 3.0]
    MetricsWriter(tmp_path).close()
    assert _values(tmp_path) == [1.0, 2.0, 3.0]


def test_metrics_merge_many_parts_on_the_way(tmp_path: Path) -> None:
    """A long run does not leave thousands of parts."""
    writer = MetricsWriter(tmp_path, rows_per_part=1)
    for step in range(70):
        writer.add("actor", step, step, {"loss": step})
    assert len(list((tmp_path / "metrics").iterdir())) == 6
    assert _values(tmp_path) == list(range(70))
    writer.close()


def test_metrics_write_event_files_that_tensorboard_reads(tmp_path: Path) -> None:
    """Tags are role/name, with step and time; not-a-number is kept."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    with MetricsWriter(tmp_path) as writer:
        writer.write(metric_rows("actor", 7, 6, {"loss": 0.5, "bad": float("nan")}, 1234.5))
    (path,) = (tmp_path / "tensorboard").iterdir()
    assert path.name.startswith("events.out.tfevents.")
    first, loss, bad = LegacyEventFileLoader(str(path)).Load()
    assert first.file_version == "brain.Event:2"
    assert (loss.step, loss.wall_time, loss.summary.value[0].tag) == (7, 1234.5, "actor/loss")
    assert loss.summary.value[0].simple_value == 0.5
    assert bad.summary.value[0].simple_value != bad.summary.value[0].simple_value


def test_metrics_refuse_rows_of_another_shape(tmp_path: Path) -> None:
    """A missing column is named."""
    with MetricsWriter(tmp_path) as writer, pytest.raises(WiringError, match=r"got none of \['name', "):
        writer.write(pa.table({"step": [1]}))


def test_series_store_keeps_the_newest_points() -> None:
    """Bounded, by role and name, with a moving mean."""
    store = SeriesStore(max_points=3)
    for step in range(5):
        store.add("actor", "loss", Point(step, step, float(step), 0.0))
    assert [point.step for point in store.points("actor", "loss")] == [2, 3, 4]
    assert store.last("actor", "loss") == Point(4, 4, 4.0, 0.0)
    assert store.mean("actor", "loss", 2) == 3.5
    assert (store.last("actor", "none"), store.mean("actor", "none", 2), store.points("x", "y")) == (
        None,
        None,
        [],
    )
    assert store.names() == [("actor", "loss")]


def test_observe_imports_no_heavy_library() -> None:
    """torch, TensorFlow and matplotlib stay out until a report is drawn."""
    code = (
        "import sys, tempfile; import relax.observe.recorder, relax.observe.progress, relax.observe.report;"
        "from relax.observe.metrics import MetricsWriter; MetricsWriter(tempfile.mkdtemp()).close();"
        "print([m for m in ('torch', 'tensorflow', 'matplotlib', 'jinja2', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_metrics_go_back_with_the_run(tmp_path: Path) -> None:
    """What the stepping roles measured later is gone, in memory too; what was delivered before is kept once."""
    with MetricsWriter(tmp_path) as writer:
        for step in range(4):
            writer.add("actor", step, step, {"loss": step}, time_s=100.0 + step)
        writer.add("preprocess", 30, 30, {"time/put_s": 9.0}, time_s=103.0)
    resumed = MetricsWriter(tmp_path)
    resumed.take_up()
    resumed.go_back(1, ["actor"])
    assert [point.step for point in resumed.series.points("actor", "loss")] == [0, 1]
    resumed.add("actor", 1, 1, {"loss": 1}, time_s=101.0)
    resumed.add("actor", 2, 2, {"loss": 20}, time_s=200.0)
    resumed.close()
    assert sorted(_values(tmp_path)) == [0.0, 1.0, 9.0, 20.0]


def test_metrics_that_are_delivered_twice_are_kept_once(tmp_path: Path) -> None:
    """As rows come again whose lease was lost before they were acked."""
    rows = metric_rows("actor", 1, 1, {"loss": 1.0, "reward": 2.0}, time_s=100.0)
    with MetricsWriter(tmp_path) as writer:
        writer.write(rows)
        writer.write(pa.concat_tables([rows, metric_rows("actor", 1, 1, {"loss": 1.0}, time_s=100.5)]))
        assert not writer.is_flushed
        writer.flush()
        assert writer.is_flushed
    assert _values(tmp_path) == [1.0, 2.0, 1.0]
