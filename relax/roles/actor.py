"""The actor role: takes whole groups, trains one step on them, writes back what it saw, publishes the weights.

It does not choose what to train on: the queue hands out complete groups within the staleness bound. A step is
take -> train -> put columns -> ack -> publish -> announce, in this order, so that a row counts as trained only
after its columns are in the queue, and new prompts are admitted only after the new weights can be adopted.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from modalities.base import EncodingProfile
from modalities.media import MediaTable
from modalities.packing import pack_list, unpack_present
from modalities.registry import load_modalities
from modalities.routing import routing_from_arrow, routing_names
from relax.data.media import TABLE, MediaReader
from relax.models.inputs import PromptInputs
from relax.records import ACTOR_READS, mean_rewards
from relax.roles.groups import GroupCollector, Harvest
from relax.roles.service import Service
from relax.train.batch import TrainBatch
from relax.train.trainer import StepResult, Trainer


def run(service: Service) -> None:
    """Train until all steps are done or the role has to leave; leave a checkpoint either way."""
    config = service.config
    trainer = Trainer(service.model_dir, config.actor, config.algorithm, seed=config.seed)
    actor = Actor(service, trainer)
    actor.publish(0)
    service.report(state="ready", step=0)
    for step in range(1, config.num_steps + 1):
        service.wait_while_paused()
        harvest = actor.next_batch(policy_version=step - 1)
        if harvest is None:
            break
        actor.train(step, harvest)
        interval = config.checkpoint.interval_steps
        if interval and step % interval == 0 and step < config.num_steps:
            actor.save(step)
    actor.save(actor.num_steps_done, final=True)
    service.report(state="done", step=actor.num_steps_done)


class Actor:
    """One trainer between the queue and the published weights."""

    def __init__(self, service: Service, trainer: Trainer) -> None:
        self._service = service
        self._trainer = trainer
        self.num_steps_done = 0
        config = service.config
        profile = EncodingProfile.from_pretrained(service.model_dir)
        modalities = load_modalities(profile, config.modalities.limits, config.modalities.extra)
        self._media = MediaReader(
            lambda ids: service.queue.read(TABLE, uids=ids),
            MediaTable(modalities, config.media.keep),  # type: ignore[arg-type]
            max_bytes=config.media.cache_bytes,
        )
        columns = [*ACTOR_READS, *routing_names(service.queue.describe("rollouts").columns_by_name)]
        self._groups = GroupCollector(service, columns)
        self._snapshots: list[Path] = []

    def next_batch(self, policy_version: int) -> Harvest | None:
        """Wait for a training batch of whole groups; None when the role has to leave or nothing more will come."""
        return self._groups.collect(policy_version)

    def train(self, step: int, harvest: Harvest) -> None:
        """Train on one batch, write the actor's columns, ack, and publish the next policy version."""
        service, rows = self._service, harvest.table
        with service.clock.part("fetch"):
            batch = self._batch(rows)
        with service.clock.part("train"):
            result = self._trainer.train_step(batch)
        staleness = pc.subtract(step - 1, rows["policy_version_start"]).cast(pa.int32())
        with service.clock.part("put"):
            service.queue.put(
                "rollouts", self._trained_columns(step, rows, result, staleness), writer="actor"
            )
            for lease_id in harvest.lease_ids:
                service.queue.ack("rollouts", "actor", lease_id=lease_id, step=step)
        with service.clock.part("publish"):
            self.publish(step)
        self.num_steps_done = step
        metrics = result.metrics | self._data_metrics(rows, staleness) | service.clock.report()
        metrics |= harvest.metrics
        service.put_metrics(step, step, metrics)
        service.report(state="training", step=step)

    def publish(self, policy_version: int) -> None:
        """Write the weights, then tell the control plane and the queue, in this order."""
        snapshot = self._service.run_dir / "weights" / f"{policy_version:06d}"
        self._trainer.publish(snapshot, policy_version)
        self._service.control.announce_policy_version(policy_version, snapshot)
        self._service.queue.announce("rollouts", policy_version)
        self._snapshots.append(snapshot)
        while len(self._snapshots) > self._service.config.checkpoint.keep_snapshots:
            shutil.rmtree(self._snapshots.pop(0), ignore_errors=True)

    def save(self, step: int, *, final: bool = False) -> None:
        """Write a Megatron checkpoint, and at the end a Hugging Face directory beside it."""
        self._trainer.save_checkpoint(self._service.run_dir / "checkpoint" / "megatron" / f"{step:06d}")
        if final:
            self._trainer.save_pretrained(self._service.run_dir / "checkpoint" / "huggingface")

    def _batch(self, rows: pa.Table) -> TrainBatch:
        """Return the rows as tensors' raw material, with the media of each group fetched once."""
        row_groups = rows["group_id"].to_pylist()
        group_ids = list(dict.fromkeys(row_groups))
        number = {group_id: index for index, group_id in enumerate(group_ids)}
        prompt_tokens = unpack_present(rows["prompt_token_ids"])
        first_row = {group_id: row for row, group_id in reversed(list(enumerate(row_groups)))}
        media_ids = rows["media_ids"].to_pylist()
        media = self._media.by_tower([media_ids[first_row[group_id]] for group_id in group_ids])
        return TrainBatch(
            prompts=[
                PromptInputs(token_ids=prompt_tokens[first_row[group_id]], media=each)
                for group_id, each in zip(group_ids, media, strict=True)
            ],
            groups=np.array([number[group_id] for group_id in row_groups], np.int32),
            completion_token_ids=unpack_present(rows["completion_token_ids"]),
            rollout_logprobs=unpack_present(rows["rollout_logprobs"]),
            routed_experts=routing_from_arrow(rows),
            rewards=rows["reward"].to_numpy().astype(np.float32),
            temperature=self._service.config.rollout.temperature,
            stale_tokens=stale_tokens(rows),
            stale_policy="reweight" if self._service.config.staleness_policy == "reweight" else "mask",
        )

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


def stale_tokens(rows: pa.Table) -> list[np.ndarray] | None:
    """Return which tokens of each row the queue marked as too old; None under the policies that let none through."""
    if "stale_tokens" not in rows.column_names:
        return None
    return [np.array(row, bool) for row in rows["stale_tokens"].to_pylist()]
