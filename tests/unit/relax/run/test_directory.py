"""Run directories: names, replacement, and the order that is made after a run was broken off."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relax.errors import ConfigError
from relax.observe.recorder import RolloutRecorder
from relax.run.directory import complete_records, make_run_dir, release_run_dir


def test_make_run_dir_numbers_runs_without_a_name(tmp_path):
    """omni_grpo, then omni_grpo-2, whatever else is there."""
    names = [make_run_dir(tmp_path / "runs", None, overwrite=False).name for _ in range(3)]
    assert names == ["omni_grpo", "omni_grpo-2", "omni_grpo-3"]


def test_make_run_dir_refuses_a_name_that_is_taken(tmp_path):
    """The message has the way out."""
    run_dir = make_run_dir(tmp_path, "a", overwrite=False)
    with pytest.raises(ConfigError) as caught:
        make_run_dir(tmp_path, "a", overwrite=False)
    assert str(caught.value) == (
        f"name: {run_dir} must be new, got a directory that exists; choose another name or overwrite=true"
    )


def test_make_run_dir_replaces_only_what_is_a_run(tmp_path):
    """overwrite=true empties a run's directory and never another."""
    run_dir = make_run_dir(tmp_path, "a", overwrite=False)
    (run_dir / "config.yaml").write_text("seed: 0\n")
    (run_dir / "report.html").write_text("old")
    assert list(make_run_dir(tmp_path, "a", overwrite=True).iterdir()) == []
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "1.png").write_bytes(b"")
    with pytest.raises(
        ConfigError, match=r"must be a run's directory to be replaced, got one without config\.yaml"
    ):
        make_run_dir(tmp_path, "photos", overwrite=True)
    assert (tmp_path / "photos" / "1.png").exists()


def test_release_run_dir_frees_the_name_of_a_run_that_did_not_start(tmp_path):
    """An empty directory goes, one in use stays."""
    run_dir = make_run_dir(tmp_path, "a", overwrite=False)
    release_run_dir(run_dir)
    assert make_run_dir(tmp_path, "a", overwrite=False) == run_dir
    (run_dir / "config.yaml").write_text("")
    release_run_dir(run_dir)
    assert run_dir.is_dir()


def test_complete_records_makes_files_of_what_a_killed_recorder_had(tmp_path):
    """Rows that were acked are in a file of their version, and no hidden directory is left."""
    killed = RolloutRecorder(tmp_path / "rollouts")
    killed.write(pa.table({"uid": ["0-0/0", "0-0/1"], "trained_policy_version": [0, 0]}))
    complete_records(tmp_path)
    complete_records(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["rollouts"]
    assert pq.read_table(tmp_path / "rollouts" / "000000.parquet")["uid"].to_pylist() == ["0-0/0", "0-0/1"]


def test_complete_records_removes_what_was_left_half_written(tmp_path):
    """Partial directories and files at any depth; whole ones and Megatron's .metadata stay."""
    whole = [Path("weights/000001/model.safetensors"), Path("checkpoint/megatron/000001/.metadata")]
    partial = [
        Path("weights/.000002.77.partial/model.safetensors"),
        Path("checkpoint/megatron/.000002.77.partial/.metadata"),
        Path(".report.html.unfinished"),
        Path("queue.uri"),
    ]
    for path in (*whole, *partial):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"x")
    complete_records(tmp_path)
    left = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == set(whole)
