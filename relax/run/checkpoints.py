"""The checkpoints of a run: the trainer's files and the queue's position under one name, committed in two phases.

    prepared   the queue keeps its state of that moment     queue.checkpoint_prepare(id)
    written    the trainer's files are whole on the disk    checkpoint/megatron/<id>/, renamed into place
    committed  both halves are there                        queue.checkpoint_commit(id)

Training goes on between the first and the last; the trainer's files are of the moment of the first.
A crash between any two is resolved by whoever starts next: a checkpoint counts if its files are whole, for these are
written after `prepare`; without files it is given up, without the queue's half it cannot be gone back to. Step 0 has no
files: it is the model that the run began with. Nothing is started or trained here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flight.client import QueueClient
from relax.errors import ConfigError

BEGINNING = 0
DESCRIPTION_FILE = "trainer.json"
"""File of a checkpoint that is written last."""


def checkpoint_id(step: int) -> str:
    """Return the name of a step's checkpoint, for the queue and on the disk."""
    return f"{step:06d}"


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    """Return the trainer's half of a checkpoint."""
    return run_dir / "checkpoint" / "megatron" / checkpoint_id(step)


def checkpoint_steps(run_dir: Path) -> list[int]:
    """Return the steps whose files are whole, in order; the beginning counts as one."""
    found = (run_dir / "checkpoint" / "megatron").glob(f"*/{DESCRIPTION_FILE}")
    return [BEGINNING, *sorted(int(path.parent.name) for path in found if path.parent.name.isdigit())]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What of two halves fits together. Ids are the queue's."""

    kept: tuple[int, ...]
    """Steps that can be gone back to, in order."""
    to_commit: tuple[str, ...]
    """Prepared, and their files are whole: a crash came before the commit."""
    to_release: tuple[str, ...]
    """Without files: a crash came before these were whole, or they were deleted."""


def reconcile(at_queue: Collection[str], on_disk: Sequence[int]) -> Found:
    """Return what follows from the checkpoints that the queue has and those whose files are whole."""
    by_id = {checkpoint_id(step): step for step in on_disk}
    both = sorted(by_id[each] for each in at_queue if each in by_id)
    return Found(
        kept=tuple(both),
        to_commit=tuple(checkpoint_id(step) for step in both),
        to_release=tuple(sorted(each for each in at_queue if each not in by_id)),
    )


def choose(kept: Sequence[int], asked: int | None) -> int:
    """Return the step to go back to: the newest, or the one that was asked for.

    Raises:
        ConfigError: there is none, or not that one.
    """
    if not kept:
        raise ConfigError(
            "resume: the run must have a checkpoint that its queue's journal knows, got none; only runs with "
            "queue.journal=true or checkpoint.interval_steps above 0 keep one"
        )
    if asked is not None and asked not in kept:
        raise ConfigError(f"resume_step: must be one of {', '.join(map(str, kept))}, got {asked}")
    return kept[-1] if asked is None else asked


def prepare(queue: QueueClient | None, step: int) -> None:
    """Let the queue keep its state of this moment; the trainer's state must be of the same step.

    Without a queue that keeps its own half (`None`) there is but the trainer's; so at the beginning.
    """
    if queue is not None and step != BEGINNING:
        queue.checkpoint_prepare(checkpoint_id(step))


def commit(queue: QueueClient | None, step: int) -> None:
    """Tell the queue that the trainer's half is whole."""
    if queue is not None and step != BEGINNING:
        queue.checkpoint_commit(checkpoint_id(step))


def known_to(queue: QueueClient) -> list[str]:
    """Return the ids of the checkpoints of which the queue keeps its half."""
    return [each["checkpoint_id"] for each in queue.checkpoints()]


def pin_beginning(queue: QueueClient) -> None:
    """Keep the state of tables without rows, so that a run can begin anew before its first checkpoint."""
    queue.checkpoint_prepare(checkpoint_id(BEGINNING))
    queue.checkpoint_commit(checkpoint_id(BEGINNING))


def delete_files(run_dir: Path, step: int) -> None:
    """Delete the trainer's half of a checkpoint. It is whole or gone at any moment, for it is renamed first."""
    directory = checkpoint_dir(run_dir, step)
    if directory.exists():
        doomed = directory.with_name(f".{directory.name}.replaced")
        shutil.rmtree(doomed, ignore_errors=True)
        directory.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def retained(
    steps: Sequence[int], newest: int, *, best: int = 0, every: int = 0, rewards: Mapping[int, float]
) -> set[int]:
    """Return the steps whose checkpoints are kept, of those that there are, in order.

    Args:
        steps: With the beginning, which the newest rule alone keeps.
        newest: So many of the last ones.
        best: So many of those with the highest reward, the later one of two that are alike.
        every: Those whose step it divides; 0: none for that.
        rewards: By step; a checkpoint without one is none of the best.
    """
    ranked = sorted((rewards[step], step) for step in steps if step in rewards and step != BEGINNING)
    kept = set(steps[-newest:]) | {step for _, step in ranked[max(0, len(ranked) - best) :]}
    return kept | {step for step in steps if every and step != BEGINNING and step % every == 0}


def checkpoint_rewards(run_dir: Path, steps: Sequence[int]) -> dict[int, float]:
    """Return the mean training reward up to each checkpoint, since the one before it, of those that have it."""
    rewards = {}
    for step in steps:
        path = checkpoint_dir(run_dir, step) / DESCRIPTION_FILE
        if path.is_file():
            reward = json.loads(path.read_text()).get("reward")
            if isinstance(reward, float):
                rewards[step] = reward
    return rewards


def retire(
    queue: QueueClient | None, run_dir: Path, keep: int, *, best: int = 0, every: int = 0
) -> list[int]:
    """Delete both halves of all checkpoints but those that `retained` keeps, files first; return their steps."""
    steps = checkpoint_steps(run_dir)
    rewards = checkpoint_rewards(run_dir, steps) if best else {}
    kept = retained(steps, keep, best=best, every=every, rewards=rewards)
    gone = [step for step in steps if step not in kept]
    for step in gone:
        delete_files(run_dir, step)
        if queue is not None:
            queue.checkpoint_release(checkpoint_id(step))
    return gone
