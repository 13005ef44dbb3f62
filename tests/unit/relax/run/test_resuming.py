"""What the command line may say of a run that goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax.config import RunConfig, save_config
from relax.errors import ConfigError
from relax.run.resuming import read_words, resumed_config


def saved_run(directory: Path, **changes) -> Path:
    config = RunConfig(**changes)
    config.checkpoint.interval_steps = 5
    (directory / "journal").mkdir()
    save_config(config, directory / "config.yaml")
    return directory


def test_words_of_a_new_run_ask_for_no_resume():
    """Whatever else they say."""
    assert read_words(["seed=2", "name=x"]) is None


def test_resumed_run_has_its_own_configuration_with_more_steps(tmp_path):
    """The seed stays; the number of steps and of processes is the new one."""
    run_dir = saved_run(tmp_path, seed=7, num_steps=10)
    request = read_words([f"resume={run_dir}", "resume_step=5", "num_steps=20", "actor.layout.tp=2"])
    assert (request.run_dir, request.step) == (run_dir, 5)
    config = resumed_config(request)
    assert (config.seed, config.num_steps, config.actor.layout.tp) == (7, 20, 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["resume_step=4"],
            "resume_step: resume must name the run, got resume_step alone; add resume=runs/<name>",
        ),
        (["resume=x", "resume_step=last"], "resume_step: must be a number of optimizer steps, got 'last'"),
        (
            ["resume=x", "seed=3"],
            "command line: 'seed' must stay as it was in a resumed run; only num_steps, progress, actor.layout.*, "
            "weights.*, checkpoint.*, restarts.*, evaluation.deadline_s, queue.lease_s may be another",
        ),
    ],
)
def test_words_that_cannot_be_are_refused(words, message):
    """By name, with what may be."""
    with pytest.raises(ConfigError) as caught:
        read_words(words)
    assert str(caught.value) == message


def test_what_is_no_run_or_kept_no_journal_is_refused(tmp_path):
    """Before anything starts."""
    with pytest.raises(
        ConfigError, match=r"^resume: must be the directory of a run, got '.*' without config\.yaml$"
    ):
        resumed_config(read_words([f"resume={tmp_path / 'nowhere'}"]))
    run_dir = saved_run(tmp_path)
    (run_dir / "journal").rmdir()
    with pytest.raises(
        ConfigError, match=r"must have kept a journal, got none; runs with checkpoint\.interval_steps"
    ):
        resumed_config(read_words([f"resume={run_dir}"]))
