"""The actor's checkpoints: begun after a step, written while training goes on, committed when they are on the disk.

    all ranks   queue prepares -> state is copied -> training goes on
    threads     shards, and with `checkpoint.huggingface=every` a Hugging Face directory
    all ranks   after a later step: all ranks have written -> named -> queue commits -> what the rule lets go is deleted

At most one is on its way; the next one, and the end, wait for it. One that a crash breaks off is given up by whoever
starts next (see `relax.run.checkpoints`).
"""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path

from flight.client import QueueClient
from relax.models.pretrained import export_pretrained, fill_pretrained
from relax.roles.publishing import Publisher
from relax.roles.service import Service
from relax.run.checkpoints import checkpoint_dir, commit, prepare, retire
from relax.train.checkpoint import CheckpointWriter
from relax.train.trainer import Trainer

HUGGINGFACE = "huggingface"


class Saver:
    """One rank's part in the checkpoints of a run. All ranks must call its methods together.

    Args:
        service: The actor's, of this rank.
        trainer: Whose state is written.
        publisher: Of the snapshots that Hugging Face directories are made of.
        queue: That keeps its own half; None: it does not, or another rank speaks to it.
    """

    def __init__(
        self, service: Service, trainer: Trainer, publisher: Publisher, queue: QueueClient | None
    ) -> None:
        self.saved_step: int | None = None
        """Step of the newest checkpoint that is whole, or on its way."""
        self._service = service
        self._trainer = trainer
        self._publisher = publisher
        self._queue = queue
        self._speaks = trainer.world.rank == 0
        self._writer: CheckpointWriter | None = None
        self._rewards: list[float] = []

    def note_reward(self, reward: float) -> None:
        """Remember the mean reward of a step, for the rule that keeps the best."""
        self._rewards.append(reward)

    def begin(self, step: int, *, in_background: bool = True, critic_file: Path | None = None) -> None:
        """Begin the checkpoint of `step`, whose weights were published last. Blocks until its state is copied.

        `critic_file` is the head of a critic that is a service, on rank 0.
        Without `in_background`, or with `checkpoint.asynchronous=false`, blocks until the checkpoint is there.
        """
        if step == self.saved_step:
            return
        self.finish()
        self._publisher.join()
        prepare(self._queue, step)
        config = self._service.config.checkpoint
        in_background = in_background and config.asynchronous
        facts = {"reward": statistics.fmean(self._rewards)} if self._rewards else {}
        self._rewards = []
        fill = None
        if config.huggingface == "every" and self._speaks and self._publisher.newest is not None:
            self._publisher.pinned.add(step)
            fill = partial(_fill, self._service.model_dir, self._publisher.newest)
        self._writer = self._trainer.begin_checkpoint(
            checkpoint_dir(self._service.run_dir, step),
            facts,
            in_background=in_background,
            fill=fill,
            critic_file=critic_file,
        )
        self.saved_step = step
        if not in_background:
            self.finish()

    def look(self) -> None:
        """Finish what all ranks have written by now; does not wait."""
        if self._writer is not None and not self._trainer.world.largest(int(not self._writer.is_written)):
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint on its way, commit it, and delete those that the rule does not keep."""
        if self._writer is None or self.saved_step is None:
            return
        config = self._service.config
        self._writer.finish(config.actor.rank_deadline_s)
        self._writer = None
        commit(self._queue, self.saved_step)
        self._publisher.pinned.discard(self.saved_step)
        if self._speaks:
            rule = config.checkpoint
            retire(
                self._queue,
                self._service.run_dir,
                rule.keep,
                best=rule.keep_best,
                every=rule.keep_every,
            )

    def export(self) -> None:
        """Write the Hugging Face directory of the weights that were published last."""
        self._publisher.join()
        if self._speaks and self._publisher.newest is not None:
            target = self._service.run_dir / "checkpoint" / HUGGINGFACE
            export_pretrained(target, self._service.model_dir, self._publisher.newest)

    def close(self) -> None:
        """Leave nothing half-written. Idempotent."""
        if self._writer is not None:
            self._writer.give_up()
            self._writer = None


def _fill(model_dir: Path, snapshot: Path, checkpoint: Path) -> None:
    directory = checkpoint / HUGGINGFACE
    directory.mkdir()
    fill_pretrained(directory, model_dir, snapshot)
