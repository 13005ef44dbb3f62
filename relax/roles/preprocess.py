"""The preprocess role: manifest rows to prompts, and their media once each. It knows nothing of answers' quality.

Rows go epoch by epoch in an order that the seed decides; back-pressure is the queue's: a full `prompts` table makes
the put wait. A broken row is put to `row_errors` once and left out from then on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from flight.errors import DeadlineExceededError
from modalities.base import EncodingProfile
from modalities.media import MediaItem, MediaTable
from modalities.registry import load_modalities
from relax.data.errors import RowError
from relax.data.manifest import Manifest
from relax.data.media import MediaWriter
from relax.data.prompts import Prompt, PromptBuilder, prompts_to_arrow
from relax.errors import ServiceError
from relax.records import NUM_EVAL_PROMPTS_METRIC, eval_uid
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


def run(service: Service) -> None:
    """Feed prompts, and held-out prompts whenever an evaluation is asked for, until the role has to leave."""
    config = service.config
    stage = PreprocessStage(service)
    if config.data.manifest is None:
        raise ServiceError("preprocess: data.manifest must be set by the program, got nothing")
    feed = stage.chunks(stage.manifest(config.data.manifest), num_workers=config.data.num_workers)
    pending: Chunk | None = None
    evaluated = num_chunks = 0
    service.report(state="ready")
    while not service.leaving:
        service.wait_while_paused()
        evaluated = stage.put_evaluation(evaluated)
        if pending is None:
            with service.clock.part("encode"):
                pending = next(feed)
        if pending is not None and not stage.put("prompts", pending):
            continue
        pending = None
        num_chunks += 1
        if num_chunks % REPORT_EVERY_CHUNKS == 0:
            service.put_times(num_chunks)


class PreprocessStage:
    """Turns manifest rows into chunks of prompts."""

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
        media = MediaTable(self._modalities, config.media.keep)  # type: ignore[arg-type]
        self._writer = MediaWriter(service.queue, media, writer="preprocess")
        self._held_out: Manifest | None = None

    def manifest(self, path: str) -> Manifest:
        """Open a manifest whose rows may use every modality of the run."""
        return Manifest(path, self._modalities, max_prompt_chars=self._service.config.data.max_prompt_chars)

    def put(self, table: str, chunk: Chunk) -> bool:
        """Put prompts and media; False when a table stayed full for a moment, so that the caller looks at the phase."""
        try:
            with self._service.clock.part("put"):
                self._writer.put(table, chunk.rows, chunk.media, deadline_s=PUT_DEADLINE_S)
        except DeadlineExceededError:
            return False
        return True

    def chunks(self, manifest: Manifest, num_workers: int) -> Iterator[Chunk | None]:
        """Yield this worker's share of each epoch for ever, in chunks; None for a share without a usable row.

        Raises:
            ServiceError: not one row of the manifest can be used.
        """
        index, seed = self._service.index, self._service.config.seed
        broken: set[int] = set()
        last_error: RowError | None = None
        epoch = 0
        while True:
            order = np.random.default_rng([seed, epoch]).permutation(len(manifest))[index::num_workers]
            usable = [int(line) for line in order if int(line) not in broken]
            if len(broken) == len(manifest):
                raise ServiceError(
                    f"preprocess: {manifest.path} must have a usable row, got {len(broken)} broken ones; "
                    f"the last: {last_error}"
                )
            prompts: list[Prompt] = []
            for count, line in enumerate(usable, start=1):
                prompt = self._build(manifest, line)
                if isinstance(prompt, RowError):
                    broken.add(line)
                    last_error = prompt
                else:
                    prompts.append(prompt)
                if _is_full(prompts) or count % CHUNK_PROMPTS == 0:
                    # Nothing to put is a moment for the caller to look at the phase.
                    yield self._chunk(prompts, epoch, [f"{epoch}-{each.index}" for each in prompts])
                    prompts = []
            # Without a row: other workers may have some, and the next epoch gives this one others.
            yield self._chunk(prompts, epoch, [f"{epoch}-{each.index}" for each in prompts])
            epoch += 1

    def put_evaluation(self, evaluated: int) -> int:
        """Put the held-out prompts if a newer evaluation is asked for; return the newest one answered."""
        config = self._service.config
        asked = self._service.control.get("evaluate") or {"request": 0}
        request = int(asked["request"])
        if self._service.index or request <= evaluated or config.data.eval_manifest is None:
            return evaluated
        if self._held_out is None:
            self._held_out = self.manifest(config.data.eval_manifest)
        lines = range(min(len(self._held_out), config.evaluation.max_prompts))
        built = (self._build(self._held_out, line) for line in lines)
        prompts = [prompt for prompt in built if isinstance(prompt, Prompt)]
        for start in range(0, len(prompts), CHUNK_PROMPTS):
            chunk = prompts[start : start + CHUNK_PROMPTS]
            made = self._chunk(chunk, 0, [eval_uid(request, prompt.index) for prompt in chunk])
            while made is not None and not self.put("eval_prompts", made):
                if self._service.leaving:
                    return request
        self._service.put_metrics(request, asked["policy_version"], {NUM_EVAL_PROMPTS_METRIC: len(prompts)})
        return request

    def _build(self, manifest: Manifest, line: int) -> Prompt | RowError:
        record = manifest[line]
        built = record if isinstance(record, RowError) else self._builder.build(record)
        if isinstance(built, RowError):
            # Two manifests may have the same file name; the uid tells their rows apart.
            self._service.put_row_error(f"{manifest.path}:{line}", built.place, built.reason)
        return built

    def _chunk(self, prompts: Sequence[Prompt], epoch: int, uids: list[str]) -> Chunk | None:
        if not prompts:
            return None
        rows = (
            prompts_to_arrow(prompts)
            .append_column("uid", pa.array(uids, pa.string()))
            .append_column("group_id", pa.array(uids, pa.string()))
            .append_column("epoch", pa.array([epoch] * len(prompts), pa.int32()))
        )
        return Chunk(rows, tuple(item for prompt in prompts for item in prompt.media))


def _is_full(prompts: Sequence[Prompt]) -> bool:
    return sum(item.nbytes for prompt in prompts for item in prompt.media) >= CHUNK_MEDIA_BYTES
