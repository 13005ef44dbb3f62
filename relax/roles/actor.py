"""The actor role: takes whole groups, trains one step on them, writes back what it saw, publishes the weights.

It does not choose what to train on: the queue hands out complete groups within the staleness bound. A step is

    collect -> fetch -> train -> send columns -> gather weights -> columns are there -> ack -> announce

in this order, so that a row counts as trained only after its columns are in the queue, and new prompts are admitted
only after the new weights can be adopted. Weights are written and announced, and checkpoints written, by other threads
while the next step runs (`relax.roles.publishing`, `relax.roles.saving`).

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
from relax.roles.critic_files import head_file, wait_for_head
from relax.roles.given_columns import packed, proximal_lag
from relax.roles.groups import Harvest
from relax.roles.publishing import Publisher
from relax.roles.saving import Saver
from relax.roles.service import Service
from relax.roles.settling import settle
from relax.roles.training_batch import TrainingBatches
from relax.roles.turn_rows import in_whole
from relax.run.checkpoints import checkpoint_dir
from relax.run.snapshots import weights_dir
from relax.train.runtime import leave_parallel
from relax.train.trainer import StepResult, Trainer


def run(service: Service) -> None:
    """Train until all steps are done or the role has to leave; leave a checkpoint either way."""
    config = service.config
    trainer = Trainer(
        service.model_dir, config.actor, config.algorithm, seed=config.seed, services=config.roles.services
    )
    with Actor(service, trainer) as actor:
        first = actor.take_up()
        actor.publish_first(first)
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
        self._speaks = trainer.world.rank == 0
        self.num_steps_done = 0
        export = trainer.weight_export(service.config.weights.bucket_bytes)
        self._publisher = Publisher(service, export, speaks=self._speaks)
        routed = trainer.policy.routed_layers
        self._batches = TrainingBatches(service, trainer.world, routed, idle=self.look)
        keeper = service.queue if self._speaks and service.config.keeps_journal else None
        self._saver = Saver(service, trainer, self._publisher, keeper)
        self._open = ExitStack()
        if self._speaks:
            queue = service.queue
            self._columns = self._open.enter_context(queue.open_put("rollouts", writer="actor"))
            self._metrics = self._open.enter_context(queue.open_put("metrics", writer=service.role))
        self._open.callback(self._publisher.close)
        self._open.callback(self._saver.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: Any) -> bool | None:
        return self._open.__exit__(*exc_info)

    def take_up(self) -> int:
        """Load the checkpoint that the run goes on from; return its step, 0 at the beginning."""
        service = self._service
        course, weights = service.course, weights_dir(service.run_dir)
        if self._speaks and course.incarnation and weights.is_dir():
            for stale in weights.iterdir():  # of an earlier incarnation: nobody may adopt it any more
                shutil.rmtree(stale, ignore_errors=True)
        if course.step:
            self._trainer.load_checkpoint(checkpoint_dir(service.run_dir, course.step))
            self.num_steps_done = self._saver.saved_step = course.step
        return course.step

    def next_batch(self, policy_version: int) -> Harvest | None:
        """Wait for a training batch of whole groups; None when the role has to leave or nothing more will come."""
        return self._batches.collect(policy_version)

    def train(self, step: int, harvest: Harvest) -> None:
        """Train on one batch, write the actor's columns, ack, and publish the next policy version."""
        service, rows = self._service, harvest.table
        with service.clock.part("unpack"):
            batch = self._batches.read(harvest, policy_version=step - 1)
        with service.clock.part("train"):
            result = self._trainer.train_step(batch)
        staleness = pc.subtract(step - 1, rows["policy_version_start"]).cast(pa.int32())
        sent = None
        if self._speaks:
            with service.clock.part("pack"):
                columns = self._trained_columns(step, rows, result, staleness)
            with service.clock.part("put"):
                sent = self._columns.put_nowait(columns)
        self.look()
        self._publisher.publish(step)
        if sent is not None:
            with service.clock.part("put"):
                sent.result()
                settle(service.queue, harvest.lease_ids, rows["uid"].to_pylist(), step)
        self.num_steps_done = step
        metrics = result.metrics | self._data_metrics(rows, staleness) | dict(harvest.metrics)
        self._saver.note_reward(metrics.get("sampling/reward_mean", metrics["reward/mean"]))
        metrics |= self._proximal_metrics(step, rows) | service.clock.report()
        # Whoever reads the metrics of a step finds its weights announced.
        self._publisher.release(lambda times: self._put_metrics(step, metrics | times))
        service.report(state="training", step=step)

    def publish_first(self, policy_version: int) -> None:
        """Publish the weights that the run begins or goes on with, and wait until they are announced."""
        self._publisher.publish(policy_version)
        self._publisher.release()
        self._publisher.join()

    def _put_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Send the metrics of a step; an answer is not waited for."""
        self._metrics.put_nowait(self._service.metric_rows(step, step, metrics))

    def look(self) -> None:
        """Finish a checkpoint that has been written meanwhile, and raise what the publisher has failed at.

        All ranks must call it.
        """
        self._publisher.check()
        with self._service.clock.part("checkpoint"):
            self._saver.look()

    def save(self, step: int, *, final: bool = False) -> None:
        """Begin a checkpoint; at the end wait for it, and write a Hugging Face directory beside it."""
        with self._service.clock.part("checkpoint"):
            self._publisher.join()
            if self._speaks:
                self._metrics.flush()  # the queue's half has them, or there is no checkpoint
            if step != self._saver.saved_step:
                self._saver.begin(step, in_background=not final, critic_file=self._critic_head(step))
            if final:
                self._saver.finish()
                self._saver.export()
                self._trainer.world.wait_for_all()

    def _trained_columns(
        self, step: int, rows: pa.Table, result: StepResult, staleness: pa.ChunkedArray
    ) -> pa.Table:
        count = rows.num_rows
        returns = {"returns": packed(result.returns or [])} if self._writes_returns else {}
        advantages, logprobs = in_whole(rows, result.advantages), in_whole(rows, result.trainer_logprobs)
        return pa.table(
            {
                "uid": rows["uid"],
                "advantages": pack_list([[each] for each in advantages], pa.float32()),
                "trainer_logprobs": pack_list([[each] for each in logprobs], pa.float32()),
                "importance_ratio": pa.array(result.importance_ratio, pa.float32()),
                "trained_policy_version": pa.array([step - 1] * count, pa.int64()),
                "optimizer_step": pa.array([step] * count, pa.int64()),
                "staleness": staleness,
                **returns,
            }
        )

    @property
    def _writes_returns(self) -> bool:
        return "returns" in self._service.config.served.actor_writes()

    def _critic_head(self, step: int) -> Path | None:
        """Wait for the head of a critic that is a service, for the checkpoint; None on other ranks and without one."""
        service = self._service
        if "critic" not in service.config.roles.services or not self._speaks:
            return None
        path = head_file(service.run_dir, service.course, step)
        return wait_for_head(path, service.config.actor.rank_deadline_s, lambda: service.stopping)

    def _proximal_metrics(self, step: int, rows: pa.Table) -> dict[str, float]:
        """Return how far proximal logprobs of another service are behind, and whether they were left out for it."""
        lag = proximal_lag(rows, step - 1)
        if lag is None:
            return {}
        is_scored_anew = lag > self._service.config.roles.max_proximal_lag
        return {"proximal/lag_max": float(lag), "proximal/scored_anew": float(is_scored_anew)}

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
