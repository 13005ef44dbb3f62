"""Where published weights lie, which of them are kept, and what a run that was killed leaves in shared memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax.errors import ConfigError
from relax.run.snapshots import remove_abandoned, surplus, weights_dir, weights_home


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run's directory."""
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory in place of the machine's shared memory."""
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


def test_all_but_the_newest_and_the_pinned_are_surplus() -> None:
    """Oldest first."""
    assert surplus([0, 1, 2, 3, 4], 2) == [0, 1, 2]
    assert surplus([0, 1, 2, 3, 4], 2, pinned={1, 4}) == [0, 2]
    assert surplus([3], 2) == surplus([], 2) == []


def test_weights_in_shared_memory_go_with_the_run(run_dir, root) -> None:
    """The run's directory has a link to them meanwhile; nobody else takes them for abandoned."""
    with weights_home(run_dir, "shm", root):
        (weights_dir(run_dir) / "000001").mkdir()
        assert [path.name for path in root.glob("relax-*/0*")] == ["000001"]
        assert remove_abandoned(root) == []
    assert list(root.iterdir()) == []
    assert not weights_dir(run_dir).is_symlink()


def test_weights_on_disk_stay(run_dir, root) -> None:
    """Nothing is in shared memory."""
    with weights_home(run_dir, "disk", root):
        (weights_dir(run_dir) / "000001").mkdir(parents=True)
        assert list(root.iterdir()) == []
    assert (weights_dir(run_dir) / "000001").is_dir()


def test_next_run_removes_what_a_killed_one_has_left(run_dir, root, tmp_path) -> None:
    """Its own link and directory, and that of any other run that nobody has locked."""
    with weights_home(run_dir, "shm", root):
        left = weights_dir(run_dir).resolve()
    left.mkdir()
    (left / "lock").touch()
    (left / "000007").mkdir()
    weights_dir(run_dir).symlink_to(left)
    (tmp_path / "other").mkdir()
    with weights_home(tmp_path / "other", "disk", root):
        assert list(root.iterdir()) == []
    with weights_home(run_dir, "disk", root):
        assert not weights_dir(run_dir).exists()


def test_machine_without_shared_memory_is_refused(run_dir, tmp_path) -> None:
    """With the way out."""
    with (
        pytest.raises(
            ConfigError, match=r"^weights.where: shm needs shared memory at .*none, got none; set weights"
        ),
        weights_home(run_dir, "shm", tmp_path / "none"),
    ):
        pass
