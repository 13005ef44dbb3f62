"""The two halves of a checkpoint: what fits together after a crash, and what is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax.errors import ConfigError
from relax.run.checkpoints import (
    DESCRIPTION_FILE,
    checkpoint_dir,
    checkpoint_steps,
    choose,
    commit,
    prepare,
    reconcile,
    retained,
    retire,
)


class FakeKeeper:
    """A fake of the queue's half: notes what it is told, in order."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def checkpoint_prepare(self, checkpoint_id: str) -> None:
        self.told.append(f"prepare {checkpoint_id}")

    def checkpoint_commit(self, checkpoint_id: str) -> None:
        self.told.append(f"commit {checkpoint_id}")

    def checkpoint_release(self, checkpoint_id: str) -> None:
        self.told.append(f"release {checkpoint_id}")


def write(run_dir: Path, step: int, *, whole: bool = True) -> None:
    directory = checkpoint_dir(run_dir, step)
    directory.mkdir(parents=True)
    if whole:
        (directory / DESCRIPTION_FILE).write_text("{}")


def test_halves_decide_what_a_crash_has_left():
    """With files: it counts, and is committed if it was not. Without: it is given up. Files alone: not gone back to."""
    found = reconcile(["000000", "000004", "000008"], on_disk=[0, 2, 4])
    assert found.kept == (0, 4)
    assert found.to_commit == ("000000", "000004")
    assert found.to_release == ("000008",)


def test_files_count_once_they_are_whole(tmp_path):
    """Under their final name, with what is written last; the beginning needs none."""
    assert checkpoint_steps(tmp_path) == [0]
    write(tmp_path, 4)
    write(tmp_path, 6, whole=False)
    (tmp_path / "checkpoint" / "megatron" / ".000008.17.partial").mkdir()
    (tmp_path / "checkpoint" / "megatron" / ".000008.17.partial" / DESCRIPTION_FILE).write_text("{}")
    assert checkpoint_steps(tmp_path) == [0, 4]


def test_newest_is_chosen_unless_another_is_asked_for():
    """One that is not there is refused with those that are."""
    assert choose((0, 4, 8), None) == 8
    assert choose((0, 4, 8), 4) == 4
    with pytest.raises(ConfigError, match=r"^resume_step: must be one of 0, 4, 8, got 5$"):
        choose((0, 4, 8), 5)
    with pytest.raises(
        ConfigError, match=r"^resume: the run must have a checkpoint that its queue's journal knows"
    ):
        choose((), None)


def test_queue_is_told_of_both_phases_but_for_the_beginning():
    """The beginning has no files of its own, and a rank without the queue says nothing."""
    queue = FakeKeeper()
    for step in (0, 4):
        prepare(queue, step)
        commit(queue, step)
        prepare(None, step)
        commit(None, step)
    assert queue.told == ["prepare 000004", "commit 000004"]


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    """Both halves of the others go, the beginning's too."""
    queue = FakeKeeper()
    for step in (4, 6, 8):
        write(tmp_path, step)
    assert retire(queue, tmp_path, keep=2) == [0, 4]
    assert checkpoint_steps(tmp_path) == [0, 6, 8]
    assert queue.told == ["release 000000", "release 000004"]
    assert [path.name for path in checkpoint_dir(tmp_path, 0).parent.iterdir() if path.name[0] == "."] == []


def test_checkpoints_are_kept_by_three_rules():
    """The last ones, the best ones (the later of equals, those without a reward never), and every so many steps."""
    steps = [0, 2, 4, 6, 8, 10, 12]
    rewards = {2: 0.5, 4: 0.9, 6: 0.9, 8: 0.1}
    assert retained(steps, 2, rewards=rewards) == {10, 12}
    assert retained(steps, 1, best=1, rewards=rewards) == {6, 12}
    assert retained(steps, 1, best=2, rewards=rewards) == {4, 6, 12}
    assert retained(steps, 1, every=4, rewards=rewards) == {4, 8, 12}
    assert retained([0, 2], 2, best=1, every=4, rewards=rewards) == {0, 2}
    assert retained(steps, 1, best=9, rewards=rewards) == {2, 4, 6, 8, 12}


def test_best_checkpoint_outlives_newer_ones(tmp_path):
    """By the reward in its description; one that cannot say has none."""
    queue = FakeKeeper()
    for step, reward in ((2, 0.3), (4, 0.8), (6, None), (8, 0.1)):
        write(tmp_path, step)
        facts = {} if reward is None else {"reward": reward}
        (checkpoint_dir(tmp_path, step) / DESCRIPTION_FILE).write_text(json.dumps(facts))
    assert retire(queue, tmp_path, keep=1, best=1, every=6) == [0, 2]
    assert checkpoint_steps(tmp_path) == [0, 4, 6, 8]
    assert queue.told == ["release 000000", "release 000002"]
