"""The preprocess role: rows of the sources to prompts, and their media once each.

Which row comes next is `relax.data.order`'s matter; back-pressure is the queue's: a full `prompts` table makes the put
wait. A broken row is put to `row_errors` once and left out from then on. A service that is started again goes on where
the last one stood (`relax.roles.position`). Of answers it knows nothing, but that with a
curriculum it takes their rewards from `rollouts`, as a consumer of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from flight.errors import DeadlineExceededError, JournalFullError
from modalities.base import EncodingProfile
from modalities.media import MediaItem, MediaTable
from modalities.registry import load_modalities
from relax.data.config import SourceConfig
from relax.data.curriculum import Curriculum
from relax.data.errors import PositionError, RowError
from relax.data.manifest import Manifest
from relax.data.media import MediaWriter
from relax.data.order import Draw, PromptOrder, SourceSize
from relax.data.prompts import Prompt, PromptBuilder, prompts_to_arrow
from relax.errors import HopelessError, ServiceError
from relax.records import NUM_EVAL_PROMPTS_METRIC, REWARD_READS, eval_uid, reward_reader
from relax.roles.held_out import with_version
from relax.roles.position import PositionBook
from relax.roles.service import Service

CHUNK_PROMPTS = 8
"""Prompts in one put: small enough that the first batch reaches the rollouts soon."""

CHUNK_MEDIA_BYTES = 64 << 20
"""Media in one put: what waits for its prompts must never fill the table."""

PUT_DEADLINE_S = 0.5
REPORT_EVERY_CHUNKS = 30


@dataclass(frozen=True)
class Chunk:
    """Rows of prompts that are put together, and the media that they refer to."""

    rows: pa.Table
    media: tuple[MediaItem, ...]
    following: dict[str, Any]
    """Position of the order after them."""


def run(service: Service) -> None:
    """Feed prompts, and held-out prompts whenever an evaluation is asked for, until the role has to leave."""
    config = service.config
    stage = PreprocessStage(service)
    sources = stage.open(config.data.train_sources())
    if not sources:
        raise ServiceError("preprocess: data.manifest must be set by the program, got nothing")
    book = PositionBook(service.queue, service.name)
    position = book.read()
    rewards = RewardReader(service, sources) if config.data.curriculum.enabled else None
    try:
        order = prompt_order(service, sources, position.order)
        if rewards is not None and position.curriculum is not None:
            rewards.curriculum.restore(position.curriculum)
    except PositionError as error:
        raise HopelessError(f"preprocess: {error}") from error
    feed = stage.chunks(sources, order, rewards.curriculum if rewards else None)
    pending: Chunk | None = None
    num_chunks = 0
    service.report(state="ready")
    while not service.leaving:
        service.wait_while_paused()
        evaluated = stage.put_evaluation(position.evaluation)
        if evaluated != position.evaluation:
            position = replace(position, evaluation=evaluated)
            book.write(position)
        if rewards is not None:
            rewards.collect()
        if pending is None:
            with service.clock.part("encode"):
                pending = next(feed)
        if pending is not None:
            if not stage.put("prompts", pending):
                continue
            curriculum = rewards.curriculum.state() if rewards else None
            position = replace(position, order=pending.following, curriculum=curriculum)
            book.write(position)
        pending = None
        num_chunks += 1
        if num_chunks % REPORT_EVERY_CHUNKS == 0:
            service.put_times(num_chunks)


def prompt_order(
    service: Service, sources: Sequence[Manifest], position: dict[str, Any] | None = None
) -> PromptOrder:
    """Return this worker's share of the run's order, from `position` on, or from its beginning.

    Raises:
        PositionError: the position is of another order.
    """
    config = service.config
    weights = config.data.train_sources()
    sizes = [SourceSize(each.name, len(each), weights[each.name].weight) for each in sources]
    share = (service.index, config.data.num_workers)
    shuffle = config.data.shuffle
    if position is None:
        return PromptOrder(sizes, seed=config.seed, shuffle=shuffle, share=share)
    return PromptOrder.from_position(position, sizes, seed=config.seed, shuffle=shuffle, share=share)


class RewardReader:
    """Tells a curriculum the mean reward of every group of rollouts, whichever worker prepared its prompt."""

    def __init__(self, service: Service, sources: Sequence[Manifest]) -> None:
        self._service = service
        sizes = {each.name: len(each) for each in sources}
        self.curriculum = Curriculum(service.config.data.curriculum, sizes, seed=service.config.seed)

    def collect(self) -> None:
        """Take and ack all whole groups that wait, without waiting for more."""
        service, lease = self._service, None
        num_rows = service.config.prompts_per_step * service.config.group_size
        while True:
            lease = service.queue.take(
                "rollouts", reward_reader(service.index), max_rows=num_rows, deadline_s=0.0, ack=lease
            )
            if lease.status != "rows":
                return
            groups = lease.table.select(REWARD_READS).group_by(["source", "prompt_index"])
            for group in groups.aggregate([("reward", "mean")]).to_pylist():
                self.curriculum.observe(group["source"], group["prompt_index"], group["reward_mean"])


class PreprocessStage:
    """Turns rows of sources into chunks of prompts."""

    def __init__(self, service: Service) -> None:
        self._service = service
        config = service.config
        profile = EncodingProfile.from_pretrained(service.model_dir)
        self._modalities = load_modalities(profile, config.modalities.limits, config.modalities.extra)
        self._builder = PromptBuilder(
            service.model_dir,
            self._modalities,
            max_prompt_tokens=config.data.max_prompt_tokens,
            max_prompt_chars=config.data.max_prompt_chars,
            cache_bytes=config.data.cache_bytes,
        )
        media = MediaTable(self._modalities, config.media.keep)
        self._writer = MediaWriter(service.queue, media, writer="preprocess")
        self._held_out: list[Manifest] | None = None

    def open(self, sources: Mapping[str, SourceConfig]) -> list[Manifest]:
        """Open sources whose rows may use every modality of the run."""
        limit = self._service.config.data.max_prompt_chars
        return [
            Manifest(source, self._modalities, max_prompt_chars=limit, name=name)
            for name, source in sources.items()
        ]

    def put(self, table: str, chunk: Chunk) -> bool:
        """Put prompts and media; False when there was no room for a moment, so that the caller looks at the phase."""
        try:
            with self._service.clock.part("put"):
                self._writer.put(table, chunk.rows, chunk.media, deadline_s=PUT_DEADLINE_S)
        except (DeadlineExceededError, JournalFullError):
            return False
        return True

    def chunks(
        self, sources: Sequence[Manifest], order: PromptOrder, curriculum: Curriculum | None = None
    ) -> Iterator[Chunk | None]:
        """Yield the prompts of an order for ever, in chunks; None for draws without a usable row.

        Raises:
            HopelessError: not one row of a source can be used.
        """
        broken: list[set[int]] = [set() for _ in sources]
        while True:
            drawn: list[tuple[Draw, Prompt]] = []
            # After so many draws the caller looks at the phase, whatever came of them.
            for _ in range(CHUNK_PROMPTS):
                draw = next(order)
                source = sources[draw.source]
                if draw.row in broken[draw.source]:
                    continue
                if curriculum is not None and not curriculum.admits(source.name, draw.row, draw.number):
                    continue
                prompt = self._build(source, draw.row)
                if isinstance(prompt, Prompt):
                    drawn.append((draw, prompt))
                else:
                    broken[draw.source].add(draw.row)
                    _check_usable(source, len(broken[draw.source]), prompt)
                if _is_full([prompt for _, prompt in drawn]):
                    break
            names = [f"-{each.name}" if len(sources) > 1 else "" for each in sources]
            uids = [f"{draw.epoch}-{draw.row}{names[draw.source]}" for draw, _ in drawn]
            epochs = [draw.epoch for draw, _ in drawn]
            yield self._chunk([prompt for _, prompt in drawn], uids, epochs, order.position())

    def put_evaluation(self, evaluated: int) -> int:
        """Put the held-out prompts if a newer evaluation is asked for; return the newest one answered."""
        config = self._service.config
        asked = self._service.control.get("evaluate") or {"request": 0}
        request = int(asked["request"])
        if self._service.index or request <= evaluated or not config.data.eval:
            return evaluated
        if self._held_out is None:
            self._held_out = self.open(config.data.eval)
        number = num_prompts = 0
        for held_out in self._held_out:
            size = min(len(held_out), config.evaluation.max_prompts)
            for start in range(0, size, CHUNK_PROMPTS):
                rows = range(start, min(start + CHUNK_PROMPTS, size))
                built = [(number + row, self._build(held_out, row)) for row in rows]
                usable = [(each, prompt) for each, prompt in built if isinstance(prompt, Prompt)]
                uids = [eval_uid(request, each) for each, _ in usable]
                made = self._chunk([prompt for _, prompt in usable], uids, [0] * len(usable), {})
                if made is not None:
                    made = replace(made, rows=with_version(made.rows, asked["policy_version"]))
                while made is not None and not self.put("eval_prompts", made):
                    if self._service.leaving:
                        return request
                num_prompts += len(usable)
            number += size
        self._service.put_metrics(request, asked["policy_version"], {NUM_EVAL_PROMPTS_METRIC: num_prompts})
        return request

    def _build(self, manifest: Manifest, line: int) -> Prompt | RowError:
        record = manifest[line]
        built = record if isinstance(record, RowError) else self._builder.build(record)
        if isinstance(built, RowError):
            # Two sources may have the same file name; the uid tells their rows apart.
            self._service.put_row_error(f"{manifest.path}:{line}", built.place, built.reason)
        return built

    def _chunk(
        self, prompts: Sequence[Prompt], uids: list[str], epochs: list[int], following: dict[str, Any]
    ) -> Chunk | None:
        if not prompts:
            return None
        rows = (
            prompts_to_arrow(prompts)
            .append_column("uid", pa.array(uids, pa.string()))
            .append_column("group_id", pa.array(uids, pa.string()))
            .append_column("epoch", pa.array(epochs, pa.int32()))
        )
        return Chunk(rows, tuple(item for prompt in prompts for item in prompt.media), following)


def _check_usable(source: Manifest, num_broken: int, last_error: RowError) -> None:
    if num_broken == len(source):
        raise HopelessError(
            f"preprocess: {source.path} must have a usable row, got {num_broken} broken ones; "
            f"the last: {last_error}"
        )


def _is_full(prompts: Sequence[Prompt]) -> bool:
    return sum(item.nbytes for prompt in prompts for item in prompt.media) >= CHUNK_MEDIA_BYTES
