"""The rows of one training step as each rank of the trainer needs them: collected once, fetched once, shared out.

    all ranks        tokens, logprobs and rewards of the whole batch    rank 0 fetches, everybody gets it
    ranks of a row   the experts of their own rows, in the layers of    fetched once for each stage that has those rows
                     their own stage
    the first stage  the media of their own prompts                     likewise; later stages never see a pixel

Rank 0 alone asks the queue for rows and tells the others which they are, so that all train the same; what it says also
ends the step loop of all ranks at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from modalities.base import EncodingProfile
from modalities.media import MediaTable
from modalities.packing import unpack_present
from modalities.registry import load_modalities
from modalities.routing import routing_from_arrow, routing_names
from relax.data.media import TABLE, MediaReader
from relax.errors import ServiceError
from relax.models.inputs import PromptInputs
from relax.records import ACTOR_READS
from relax.roles.given_columns import given_scores
from relax.roles.groups import TAKE_DEADLINE_S, GroupCollector, Harvest
from relax.roles.partial import older_tokens
from relax.roles.service import Service
from relax.roles.turn_rows import TurnRows, agent_reads, stale_tokens
from relax.train.batch import TrainBatch
from relax.train.ranks import World

WAITING: dict[str, Any] = {"status": "waiting"}


class TrainingBatches:
    """One rank's way to its training batches.

    Args:
        service: The actor's, of this rank.
        world: The rank's place.
        routed_layers: Layers of this stage that have experts, rising.
        idle: Called by all ranks together, again and again, while there is nothing to train on.
    """

    def __init__(
        self,
        service: Service,
        world: World,
        routed_layers: Sequence[int],
        idle: Callable[[], None] = lambda: None,
    ) -> None:
        self._service = service
        self._world = world
        self._idle = idle
        self._layers = list(routed_layers)
        config = service.config
        profile = EncodingProfile.from_pretrained(service.model_dir)
        modalities = load_modalities(profile, config.modalities.limits, config.modalities.extra)
        self._media = MediaReader(
            lambda ids: self._shared(lambda: self._fetch_media(ids), stage=True),
            MediaTable(modalities, config.media.keep),
            max_bytes=config.media.cache_bytes,
        )
        self._routing_names: list[str] = []
        if (config.actor.routing_replay or config.actor.routing_metrics) and self._layers:
            columns = service.queue.describe("rollouts").columns_by_name
            self._routing_names = routing_names(columns, (self._layers[0], self._layers[-1] + 1))
        self._groups = GroupCollector(
            service,
            [
                *ACTOR_READS,
                *config.served.actor_reads(),
                *self._versions(),
                *agent_reads(config.rollout.agent),
                *(self._routing_names if world.size == 1 else ()),
            ],
            num_ranks=world.layout.data_parallel,
            waiting=self._wait,
        )

    def collect(self, policy_version: int) -> Harvest | None:
        """Wait for a training batch of whole groups; None when the role has to leave or nothing more will come.

        All ranks must call it; all get the rows with the columns of `ACTOR_READS` and the queue's own.
        """
        world = self._world
        harvest = self._collect(policy_version) if world.rank == 0 else None
        if world.size == 1:
            return harvest
        told = world.tell(_summary(harvest))
        while told == WAITING:
            self._idle()
            told = world.tell()
        if told["status"] == "leave":
            return None
        return Harvest(
            table=self._shared(lambda: _rows(harvest), stage=False),
            lease_ids=tuple(told["lease_ids"]),
            counts=tuple(told["counts"]),
            metrics=told["metrics"],
        )

    def _wait(self) -> None:
        """Tell the other ranks that there is nothing yet."""
        self._world.tell(WAITING)
        self._idle()

    def read(self, harvest: Harvest, policy_version: int | None = None) -> TrainBatch:
        """Return the rows for the trainer, with experts and media as far as this rank needs them.

        All ranks must call it. `policy_version` is that of the weights that the step begins with; given, proximal
        logprobs that are too far behind it are left out.
        """
        if self._service.config.rollout.agent.is_on:
            return self._read_turns(harvest)
        rows, part, config = harvest.table, self._world.place.dp_rank, self._service.config
        first = sum(harvest.counts[:part])
        own = np.arange(first, first + harvest.counts[part])
        row_groups = rows["group_id"].to_pylist()
        group_ids = list(dict.fromkeys(row_groups))
        number = {group_id: index for index, group_id in enumerate(group_ids)}
        groups = np.array([number[group_id] for group_id in row_groups], np.int32)
        first_rows = [row_groups.index(group_id) for group_id in group_ids]
        prompt_tokens = unpack_present(rows["prompt_token_ids"])
        media = self._prompt_media(rows, first_rows, np.unique(groups[own]).tolist())
        return TrainBatch(
            prompts=[
                PromptInputs(token_ids=prompt_tokens[row], media=each)
                for row, each in zip(first_rows, media, strict=True)
            ],
            groups=groups,
            completion_token_ids=unpack_present(rows["completion_token_ids"]),
            rollout_logprobs=unpack_present(rows["rollout_logprobs"]),
            routed_experts=self._routing(rows, own),
            rewards=rows["reward"].to_numpy().astype(np.float32),
            temperature=config.rollout.temperature,
            stale_tokens=left_out(rows) if self._versions() else stale_tokens(rows),
            stale_policy="reweight" if config.staleness_policy == "reweight" else "mask",
            rows=own,
            given=given_scores(rows, policy_version, config.roles.max_proximal_lag),
        )

    def _versions(self) -> list[str]:
        """Return the column by which tokens of older policies are told, if they are left out."""
        return ["token_policy_versions"] if self._service.config.rollout.partial.train_on == "newest" else []

    def _read_turns(self, harvest: Harvest) -> TrainBatch:
        """Return rows of several turns: each has a prompt of its own, unless it shares all of it with others."""
        rows, part, config = harvest.table, self._world.place.dp_rank, self._service.config
        first = sum(harvest.counts[:part])
        own = np.arange(first, first + harvest.counts[part])
        turns = TurnRows.of(rows)
        own_prompts = np.unique(turns.prompt_of_row[own]).tolist()
        media = self._prompt_media(rows, turns.first_rows, own_prompts)
        return turns.batch(
            media,
            routed_experts=self._routing(rows, own),
            rewards=rows["reward"].to_numpy().astype(np.float32),
            temperature=config.rollout.temperature,
            stale_policy="reweight" if config.staleness_policy == "reweight" else "mask",
            rows=own,
        )

    def _collect(self, policy_version: int) -> Harvest | None:
        """Wait while the phase is `pause`, then for rows; on rank 0."""
        service = self._service
        while service.control.phase == "pause":
            service.control.wait_for(lambda: service.control.phase != "pause", deadline_s=TAKE_DEADLINE_S)
            self._world.tell(WAITING)
        return self._groups.collect(policy_version)

    def _prompt_media(
        self, rows: pa.Table, first_rows: list[int], own_groups: list[int]
    ) -> list[dict[str, Any]]:
        """Return the media of each group; none of those that others train, and none past the first stage."""
        found: list[dict[str, Any]] = [{} for _ in first_rows]
        if self._world.is_first_stage:
            media_ids = rows["media_ids"].to_pylist()
            own = self._media.by_tower([media_ids[first_rows[group]] for group in own_groups])
            for group, media in zip(own_groups, own, strict=True):
                found[group] = media
        return found

    def _routing(self, rows: pa.Table, own: np.ndarray) -> list[np.ndarray | None]:
        """Return the experts of the own rows in this stage's layers; None for all other rows."""
        routing: list[np.ndarray | None] = [None] * rows.num_rows
        if not self._routing_names:
            return routing
        uids = rows["uid"].take(pa.array(own)).to_pylist()
        fetched = (
            rows if self._world.size == 1 else self._shared(lambda: self._fetch_routing(uids), stage=True)
        )
        first, end = self._layers[0], self._layers[-1] + 1
        chosen = [layer - first for layer in self._layers]
        found = dict(zip(fetched["uid"].to_pylist(), routing_from_arrow(fetched, (first, end)), strict=True))
        missing = [uid for uid in uids if uid not in found]
        if missing:
            raise ServiceError(f"actor: table 'rollouts' must keep leased rows, got none for {missing[:3]}")
        for row, uid in zip(own.tolist(), uids, strict=True):
            experts = found[uid]
            if experts is not None and len(chosen) < end - first:
                experts = experts[:, chosen]
            routing[row] = experts
        return routing

    def _fetch_routing(self, uids: list[str]) -> pa.Table:
        with self._service.clock.part("fetch"):
            return self._service.queue.read("rollouts", columns=self._routing_names, uids=uids)

    def _fetch_media(self, ids: Sequence[str]) -> pa.Table:
        with self._service.clock.part("fetch"):
            return self._service.queue.read(TABLE, uids=ids)

    def _shared(self, fetch: Callable[[], pa.Table], *, stage: bool) -> pa.Table:
        """Return a table that one rank fetches: rank 0, or with `stage` the leader of each stage group."""
        world = self._world
        if len(world.stage_ranks if stage else range(world.size)) == 1:
            return fetch()
        is_source = world.leads_stage if stage else world.rank == 0
        data = _to_bytes(fetch()) if is_source else None
        return _from_bytes(world.broadcast(data, stage=stage))


def left_out(rows: pa.Table) -> list[np.ndarray]:
    """Return which tokens of each row are not trained on: too old, or not of the newest policy of the row."""
    older = older_tokens(rows)
    stale = stale_tokens(rows)
    return older if stale is None else [old | marked for old, marked in zip(older, stale, strict=True)]


def _summary(harvest: Harvest | None) -> dict[str, Any]:
    """Return what rank 0 says of its rows, without them."""
    if harvest is None:
        return {"status": "leave"}
    return {
        "status": "rows",
        "lease_ids": list(harvest.lease_ids),
        "counts": list(harvest.counts),
        "metrics": dict(harvest.metrics),
    }


def _rows(harvest: Harvest | None) -> pa.Table:
    if harvest is None:
        raise ValueError("training batch: rank 0 must have the rows, got none")
    return harvest.table


def _to_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def _from_bytes(data: bytes) -> pa.Table:
    with pa.ipc.open_stream(pa.BufferReader(data)) as reader:
        return reader.read_all()
