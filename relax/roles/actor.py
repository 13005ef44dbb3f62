"""The actor role: takes whole groups, trains one step on them, writes back what it saw, publishes the weights.

It does not choose what to train on: the queue hands out complete groups within the staleness bound. A step is

    collect -> fetch -> train -> send columns -> write weights -> columns are there -> ack -> announce

in this order, so that a row counts as trained only after its columns are in the queue, and new prompts are admitted
only after the new weights can be adopted.

On several processes all run this loop in step; rank 0 alone writes to the queue and speaks for the role.
"""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc

from modalities.packing import pack_list
from relax.records import mean_rewards
from relax.roles.groups import Harvest
from relax.roles.service import Service
from relax.roles.settling import settle
from relax.roles.training_batch import TrainingBatches
from relax.run.checkpoints import checkpoint_dir, committed, retire
from relax.train.runtime import leave_parallel
from relax.train.trainer import StepResult, Trainer


def run(service: Service) -> None:
    """Train until all steps are done or the role has to leave; leave a checkpoint either way."""
    config = service.config
    trainer = Trainer(service.model_dir, config.actor, config.algorithm, seed=config.seed)
    with Actor(service, trainer) as actor:
        first = actor.take_up()
        actor.announce(first, actor.write_weights(first))
        service.report(state="ready", step=first)
        for step in range(first + 1, config.num_steps + 1):
            harvest = actor.next_batch(policy_version=step - 1)
            if harvest is None:
                break
            actor.train(step, harvest)
            interval = config.checkpoint.interval_steps
            if interval and step % interval == 0 and step < config.num_steps:
                actor.save(step)
        actor.save(actor.num_steps_done, final=True)
    service.report(state="done", step=actor.num_steps_done)
    leave_parallel()


class Actor:
    """One rank of the trainer between the queue and the published weights."""

    def __init__(self, service: Service, trainer: Trainer) -> None:
        self._service = service
        self._trainer = trainer
        self._batches = TrainingBatches(service, trainer.world, trainer.policy.routed_layers)
        self._speaks = trainer.world.rank == 0
        self.num_steps_done = 0
        self._snapshots: list[Path] = []
        self._saved_step: int | None = None
        self._checkpoints = service.queue if self._speaks and service.config.keeps_journal else None
        self._open = ExitStack()
        if self._speaks:
            queue = service.queue
            self._columns = self._open.enter_context(queue.open_put("rollouts", writer="actor"))
            self._metrics = self._open.enter_context(queue.open_put("metrics", writer=service.role))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: Any) -> bool | None:
        return self._open.__exit__(*exc_info)

    def take_up(self) -> int:
        """Load the checkpoint that the run goes on from; return its step, 0 at the beginning."""
        service = self._service
        course, weights = service.course, service.run_dir / "weights"
        if self._speaks and course.incarnation and weights.is_dir():
            for stale in weights.iterdir():  # of an earlier incarnation: nobody may adopt it any more
                shutil.rmtree(stale, ignore_errors=True)
        if course.step:
            self._trainer.load_checkpoint(checkpoint_dir(service.run_dir, course.step))
            self.num_steps_done = self._saved_step = course.step
        return course.step

    def next_batch(self, policy_version: int) -> Harvest | None:
        """Wait for a training batch of whole groups; None when the role has to leave or nothing more will come."""
        return self._batches.collect(policy_version)

    def train(self, step: int, harvest: Harvest) -> None:
        """Train on one batch, write the actor's columns, ack, and publish the next policy version."""
        service, rows = self._service, harvest.table
        with service.clock.part("unpack"):
            batch = self._batches.read(harvest)
        with service.clock.part("train"):
            result = self._trainer.train_step(batch)
        staleness = pc.subtract(step - 1, rows["policy_version_start"]).cast(pa.int32())
        sent = None
        if self._speaks:
            with service.clock.part("pack"):
                columns = self._trained_columns(step, rows, result, staleness)
            with service.clock.part("put"):
                sent = self._columns.put_nowait(columns)
        with service.clock.part("publish"):
            snapshot = self.write_weights(step)
        if sent is not None:
            with service.clock.part("put"):
                sent.result()
                settle(service.queue, harvest.lease_ids, rows["uid"].to_pylist(), step)
        with service.clock.part("publish"):
            self.announce(step, snapshot)
        self.num_steps_done = step
        if self._speaks:
            metrics = result.metrics | self._data_metrics(rows, staleness) | dict(harvest.metrics)
            self._put_metrics(step, metrics)
        service.report(state="training", step=step)

    def write_weights(self, policy_version: int) -> Path:
        """Write the weights as a snapshot and return where; all ranks must call it."""
        snapshot = self._service.run_dir / "weights" / self._service.course.snapshot_name(policy_version)
        self._trainer.publish(snapshot, policy_version)
        return snapshot

    def announce(self, policy_version: int, snapshot: Path) -> None:
        """Tell the control plane and the queue of new weights, in this order."""
        if not self._speaks:
            return
        course = self._service.course
        self._service.control.announce_policy_version(
            policy_version, snapshot, incarnation=course.incarnation
        )
        self._service.queue.announce("rollouts", policy_version)
        self._snapshots.append(snapshot)
        while len(self._snapshots) > self._service.config.checkpoint.keep_snapshots:
            shutil.rmtree(self._snapshots.pop(0), ignore_errors=True)

    def _put_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Send the metrics of a step with the times since the last one; an answer is not waited for."""
        service = self._service
        rows = service.metric_rows(step, step, metrics | service.clock.report())
        with service.clock.part("put"):
            self._metrics.put_nowait(rows)

    def save(self, step: int, *, final: bool = False) -> None:
        """Write a Megatron checkpoint with the queue's half, and at the end a Hugging Face directory beside it."""
        run_dir = self._service.run_dir
        if step != self._saved_step:
            with committed(self._checkpoints, step):
                self._trainer.save_checkpoint(checkpoint_dir(run_dir, step))
            self._saved_step = step
            if self._speaks:
                retire(self._checkpoints, run_dir, self._service.config.checkpoint.keep)
        if final:
            self._trainer.save_pretrained(run_dir / "checkpoint" / "huggingface")

    def _trained_columns(
        self, step: int, rows: pa.Table, result: StepResult, staleness: pa.ChunkedArray
    ) -> pa.Table:
        count = rows.num_rows
        return pa.table(
            {
                "uid": rows["uid"],
                "advantages": pack_list([[each] for each in result.advantages], pa.float32()),
                "trainer_logprobs": pack_list([[each] for each in result.trainer_logprobs], pa.float32()),
                "importance_ratio": pa.array(result.importance_ratio, pa.float32()),
                "trained_policy_version": pa.array([step - 1] * count, pa.int64()),
                "optimizer_step": pa.array([step] * count, pa.int64()),
                "staleness": staleness,
            }
        )

    def _data_metrics(self, rows: pa.Table, staleness: pa.ChunkedArray) -> dict[str, float]:
        """Return mean reward, by modality too, and the age of the batch in policy versions."""
        values = {
            "reward/mean": pc.mean(rows["reward"]).as_py(),
            "staleness/mean": pc.mean(staleness).as_py(),
            "staleness/max": pc.max(staleness).as_py(),
            "rows": rows.num_rows,
        }
        for modality, reward in mean_rewards(rows).items():
            values[f"reward/{modality}"] = reward
        return values
