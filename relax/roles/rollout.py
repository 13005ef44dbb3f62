"""The rollout role: takes prompts, adopts the newest weights, generates groups, scores them, puts rollouts.

It does not decide how far it may run ahead: the queue hands out a prompt only when the staleness bound allows it.
A group that cannot be scored or has a non-finite number costs that prompt only, as a row error; when prompt after
prompt is refused, it is no longer the prompts' fault and the role fails.
"""

from __future__ import annotations

import time
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import structlog

from flight.client import Lease
from flight.errors import FlightQueueError, LeaseLostError
from modalities.base import EncodingProfile
from modalities.media import MediaTable
from modalities.packing import pack_list, unpack_present
from modalities.registry import load_modalities
from modalities.routing import routing_groups, routing_to_arrow
from relax.control.scale import WORKERS_KEY
from relax.data.media import TABLE, MediaReader
from relax.errors import HopelessError
from relax.models.spec import ThinkerSpec
from relax.records import INSTANT, SAMPLE_COLUMNS
from relax.rewards.scorer import Scorer
from relax.roles.abort import abort_when_gone_back
from relax.roles.adopting import EngineWeights
from relax.roles.answers import (
    Answers,
    check_group,
    enough_of,
    reward_input,
    score_columns,
    with_scores,
)
from relax.roles.held_out import check_version, serve_held_out, with_version
from relax.roles.interrupting import interrupted_when
from relax.roles.partial import Begun, PartialRollouts
from relax.roles.service import Service
from relax.rollout.engine import Completion, GenerateRequest, RolloutEngine

REPEATED = (
    "prompt_index",
    "source",
    "epoch",
    "modality",
    "prompt_text",
    "prompt_token_ids",
    "reference_answer",
    "media_paths",
    "media_ids",
)
"""Columns of a prompt that each of its rollouts repeats."""


LOG = structlog.get_logger("relax.rollout")

MAX_REFUSED_IN_A_ROW = 64
"""Training prompts refused one after another, after which the engine or the reward is taken to be broken."""


@dataclass(frozen=True, kw_only=True)
class Stream:
    """One kind of work: where prompts come from, where rollouts go, and how they are sampled."""

    prompts: str
    rollouts: str
    num_samples: int
    temperature: float
    policy_version: int | None = None
    """Weights that every token must be of; None: whatever the engine has."""
    oversample: int = 0
    """Completions asked for beyond `num_samples`."""
    is_partial: bool = False
    """Whether what is unfinished is interrupted at an update, and gone on with."""


HELD_OUT = Stream(prompts="eval_prompts", rollouts="eval_rollouts", num_samples=1, temperature=0.0)


def run(service: Service) -> None:
    """Serve prompts until the role has to leave."""
    config = service.config
    training = Stream(
        prompts="prompts",
        rollouts="rollouts",
        num_samples=config.group_size,
        temperature=config.rollout.temperature,
        oversample=config.rollout.oversample,
        is_partial=config.rollout.partial.enabled,
    )
    serves_held_out = not config.evaluation.num_workers
    engine = make_engine(service)
    worker = make_worker(service, engine, Scorer(config.rollout.reward))
    service.report(state="ready")
    with abort_when_gone_back(service, engine):
        while not service.leaving:
            service.wait_while_paused()
            service.follow()
            if not worker.weights.adopt_newest():
                continue
            if serves_held_out and serve_held_out(
                worker, HELD_OUT, config.evaluation.max_prompts, deadline_s=0.0
            ):
                continue
            num_workers = service.control.get(WORKERS_KEY, config.rollout.num_workers)
            worker.serve(training, -(-config.prompts_per_step // num_workers), deadline_s=0.25)
    worker.close()


def make_worker(service: Service, engine: RolloutEngine, scorer: Scorer) -> RolloutWorker:
    """Return what answers prompts: with a completion each sample, or with an episode of several turns."""
    if not service.config.rollout.agent.is_on:
        return RolloutWorker(service, engine, scorer)
    from relax.roles.episodes import EpisodeWorker

    return EpisodeWorker(service, engine, scorer)


def make_engine(service: Service, index: int | None = None) -> RolloutEngine:
    """Return the engine that the configuration names, at policy version 0. Blocks until it can generate.

    `index` is its number among those of the run; absent: the service's.
    """
    config, index = service.config, service.index if index is None else index
    options = config.rollout
    if options.engine == "torch":
        from relax.rollout.torch_engine import TorchEngine

        return TorchEngine(service.model_dir, num_threads=options.num_threads)
    from relax.rollout.sglang_engine import SGLangEngine
    from relax.rollout.sglang_server import Launch

    launch = Launch(
        model_dir=service.model_dir,
        run_dir=service.run_dir,
        dtype=options.sglang.dtype,
        num_threads=options.num_threads,
        seed=config.seed,
        first_index=index * options.num_engines,
    )
    urls = options.engine_urls[index :: options.num_workers]
    return SGLangEngine(options.sglang, launch, num_servers=options.num_engines, urls=urls)


class RolloutWorker:
    """Answers leases of prompts with one engine and one scorer."""

    def __init__(self, service: Service, engine: RolloutEngine, scorer: Scorer) -> None:
        self._service = service
        self._engine = engine
        self._scorer = scorer
        profile = EncodingProfile.from_pretrained(service.model_dir)
        options, media = service.config.modalities, service.config.media
        modalities = load_modalities(profile, options.limits, options.extra)
        self._media = MediaReader(
            lambda ids: service.queue.read(TABLE, uids=ids),
            MediaTable(modalities, media.keep),
            max_bytes=media.cache_bytes,
        )
        self._layer_groups = routing_groups(service.queue.describe("rollouts").columns_by_name)
        self._num_experts = ThinkerSpec.from_pretrained(service.model_dir).num_experts
        self._partial = PartialRollouts(service, self._layer_groups, self._num_experts)
        self._refused_in_a_row = 0
        self.weights = EngineWeights(service, engine)

    def close(self) -> None:
        """End the engine and the reward's processes."""
        self._engine.close()
        self._scorer.close()

    def serve(self, stream: Stream, max_prompts: int, *, deadline_s: float) -> bool:
        """Take prompts and answer them; return whether there were any. Blocks up to `deadline_s` for the first."""
        lease = self.take(stream, max_prompts, deadline_s=deadline_s)
        if lease.status != "rows":
            return False
        self.answer(stream, lease)
        return True

    def adopt_version(self, version: int) -> bool:
        """Adopt one published version; return whether it is there still."""
        return self.weights.adopt_version(version)

    def take(self, stream: Stream, max_prompts: int, *, deadline_s: float) -> Lease:
        """Take prompts; blocks up to `deadline_s` for the first."""
        service = self._service
        with service.clock.part("wait"):
            lease = service.queue.take(
                stream.prompts,
                "rollout",
                max_rows=max_prompts,
                policy_version=self._engine.policy_version,
                lease_s=service.config.queue.lease_s,
                deadline_s=deadline_s,
            )
            if lease.status == "outdated":
                self.weights.wait_for(lease.policy_version)
        return lease

    def answer(self, stream: Stream, lease: Lease, *, policy_version: int | None = None) -> None:
        """Answer the prompts of a lease, with a version every token by its weights."""
        self._answer(replace(stream, policy_version=policy_version), lease)
        self._service.put_times(self._engine.policy_version, self._partial.report())

    def refuse(self, stream: Stream, lease: Lease, reason: str) -> None:
        """Refuse all prompts of a lease."""
        self._refuse(stream, lease, dict.fromkeys(lease.table["uid"].to_pylist(), reason), {})

    def _answer(self, stream: Stream, lease: Lease) -> None:
        """Generate, score and put all groups of a lease; ack what was put, skip what failed, return the rest.

        Nothing is put when the run has gone back meanwhile: its weights are not the run's any more.
        """
        service, prompts = self._service, lease.table
        begun = self._partial.read(prompts, self._engine.policy_version) if stream.is_partial else {}
        started = time.monotonic()
        with service.clock.part("generate"), self._interruptions(stream, lease):
            completions = self._completions(stream, lease, begun)
        if service.has_gone_back:
            return
        elapsed_s = time.monotonic() - started
        with service.clock.part("score"):
            answers = self._scored(stream, lease, completions)
        with service.clock.part("put"):
            self._put(stream, lease, answers, elapsed_s, begun)
            self._give_back(stream, lease, answers, begun)
        if stream.rollouts == "rollouts":
            self._check_refusals(answers)

    @contextmanager
    def _interruptions(self, stream: Stream, lease: Lease) -> Iterator[None]:
        """Have generation inside the block interrupted when it should be."""
        if not stream.is_partial:
            yield
            return

        config = self._service.config
        with interrupted_when(
            self._engine,
            lambda: self.weights.is_behind,
            timeout_s=config.rollout.partial.straggler_timeout_s,
            beat=lambda: self._renew(stream, lease),
            beat_s=config.queue.lease_s / 4,
        ):
            yield

    def _check_refusals(self, answers: Answers) -> None:
        """Count refusals in a row.

        Raises:
            HopelessError: there were so many that no prompt is likely to be answered ever.
        """
        self._refused_in_a_row = 0 if answers.rows else self._refused_in_a_row + len(answers.failed)
        if self._refused_in_a_row >= MAX_REFUSED_IN_A_ROW:
            raise HopelessError(
                f"rollout: prompts must be answered and scored, got {self._refused_in_a_row} refused "
                f"one after another; the last: {list(answers.failed.values())[-1]}"
            )

    def _put(
        self, stream: Stream, lease: Lease, answers: Answers, elapsed_s: float, begun: Mapping[str, Begun]
    ) -> None:
        queue, clock = self._service.queue, self._service.clock
        if answers.rows:
            with clock.part("pack"):
                chosen = lease.table.take(pa.array(answers.rows))
                rows = with_version(self._rows(chosen, answers, stream, elapsed_s), stream.policy_version)
            with clock.part("put"), _lease_may_be_lost():
                self._send(stream, rows)
                self._partial.forget(begun, chosen["uid"].to_pylist())
                queue.ack(stream.prompts, "rollout", lease_id=lease.lease_id, uids=chosen["uid"].to_pylist())
        self._refuse(stream, lease, answers.failed, begun)

    def _refuse(
        self, stream: Stream, lease: Lease, reasons: Mapping[str, str], begun: Mapping[str, Begun]
    ) -> None:
        """Skip prompts for good, and say why."""
        queue = self._service.queue
        self._partial.forget(begun, reasons)
        for uid, reason in reasons.items():
            self._service.put_row_error(uid, f"{stream.prompts} row {uid}", reason)
            with _lease_may_be_lost():
                queue.nack(
                    stream.prompts,
                    "rollout",
                    lease_id=lease.lease_id,
                    uids=[uid],
                    reason=reason,
                    requeue=False,
                )

    def _give_back(self, stream: Stream, lease: Lease, answers: Answers, begun: Mapping[str, Begun]) -> None:
        """Give back the prompts of groups that were interrupted, with what there is of them as rows."""
        groups, queue = answers.aborted, self._service.queue
        if not groups:
            return
        if not stream.is_partial:
            self._nack(stream, lease, list(groups), None)
            return
        newest = self.weights.newest()
        version = self._engine.policy_version if newest is None else newest.version
        verdicts = self._partial.judge(groups, begun, version)
        try:
            queue.renew(stream.prompts, "rollout", lease.lease_id, self._service.config.queue.lease_s)
        except LeaseLostError as error:  # others have the prompts, with what was begun before
            LOG.warning("lease lost", reason=str(error))
            return
        self._partial.keep(groups, begun, verdicts.kept)
        for start in sorted(set(verdicts.kept.values())):
            self._nack(stream, lease, [uid for uid, own in verdicts.kept.items() if own == start], start)
        if verdicts.anew:
            self._nack(stream, lease, list(verdicts.anew), version)
        self._partial.forget(begun, [*verdicts.kept, *verdicts.anew])
        self._refuse(stream, lease, verdicts.dropped, begun)

    def _nack(self, stream: Stream, lease: Lease, uids: list[str], start_version: int | None) -> None:
        with _lease_may_be_lost():
            self._service.queue.nack(
                stream.prompts,
                "rollout",
                lease_id=lease.lease_id,
                uids=uids,
                reason="generation was aborted",
                policy_version=start_version,
            )

    def _completions(self, stream: Stream, lease: Lease, begun: Mapping[str, Begun]) -> list[Completion]:
        """Return what the engine makes of a lease's prompts. Blocks until all is there, or was aborted."""
        return self._engine.generate(self._requests(lease.table, stream, begun))

    def _send(self, stream: Stream, rows: pa.Table) -> None:
        """Put rollouts."""
        self._service.queue.put(stream.rollouts, rows, writer="rollout")

    def _requests(
        self, prompts: pa.Table, stream: Stream, begun: Mapping[str, Begun]
    ) -> list[GenerateRequest]:
        media = self._media.by_tower(prompts["media_ids"].to_pylist())
        tokens = unpack_present(prompts["prompt_token_ids"])
        return [
            GenerateRequest(
                uid=uid,
                token_ids=tokens[row],
                media=media[row],
                num_samples=stream.num_samples + stream.oversample,
                seed=self._seed(uid),
                max_new_tokens=self._service.config.rollout.max_new_tokens,
                temperature=stream.temperature,
                greedy=stream.temperature == 0,
                begun=begun[uid].completions if uid in begun else (),
                num_wanted=stream.num_samples if stream.oversample else 0,
            )
            for row, uid in enumerate(prompts["uid"].to_pylist())
        ]

    def _seed(self, uid: str) -> int:
        return zlib.crc32(f"{self._service.config.seed}/{uid}".encode())

    def _scored(self, stream: Stream, lease: Lease, completions: list[Completion]) -> Answers:
        """Sort the groups of a lease: whole ones with their scores, those that failed, those that were aborted."""
        by_uid: dict[str, list[Completion]] = defaultdict(list)
        for completion in completions:
            by_uid[completion.uid].append(completion)
        facts = lease.table.select(["uid", "modality", "prompt_text", "reference_answer"]).to_pylist()
        answers, samples = Answers(), []
        for row, prompt in enumerate(facts):
            group, surplus = enough_of(by_uid[prompt["uid"]], stream.num_samples)
            self._partial.count_surplus(surplus)
            if any(completion.finish_reason == "abort" for completion in group):
                answers.aborted[prompt["uid"]] = group
            elif reason := check_group(group, stream.num_samples) or check_version(
                group, stream.policy_version
            ):
                answers.failed[prompt["uid"]] = reason
            else:
                answers.rows.append(row)
                answers.groups.append(group)
                samples += [reward_input(prompt, completion) for completion in group]
        beat_s = self._service.config.queue.lease_s / 4
        scores = self._scorer.score(samples, beat=lambda: self._renew(stream, lease), beat_s=beat_s)
        return with_scores(
            answers, scores, [prompt["uid"] for prompt in facts], self._service.config.rollout.reward
        )

    def _renew(self, stream: Stream, lease: Lease) -> None:
        """Keep the lease while rewards take their time; one that is lost already is found out by the put."""
        with suppress(FlightQueueError):
            self._service.queue.renew(
                stream.prompts, "rollout", lease.lease_id, self._service.config.queue.lease_s
            )

    def _rows(self, prompts: pa.Table, answers: Answers, stream: Stream, elapsed_s: float) -> pa.Table:
        """Return the rows of table `rollouts`: the prompt's columns repeated, then what was sampled."""
        completions = [completion for group in answers.groups for completion in group]
        count = len(completions)
        repeated = prompts.take(pa.array(np.repeat(np.arange(len(answers.groups)), stream.num_samples)))
        uids = repeated["uid"].to_pylist()
        versions = [completion.token_policy_versions for completion in completions]
        sampled = {
            "completion_token_ids": pack_list([[each.token_ids] for each in completions], pa.int32()),
            "completion_text": [each.text for each in completions],
            "rollout_logprobs": pack_list([[each.logprobs] for each in completions], pa.float32()),
            "token_policy_versions": pack_list([[each] for each in versions], pa.int32()),
            "policy_version_start": [int(each[0]) for each in versions],
            "policy_version_end": [int(each[-1]) for each in versions],
            "reward": [score.reward for score in answers.scores],
            "finish_reason": [each.finish_reason for each in completions],
            "temperature": [stream.temperature] * count,
            "seed": [self._seed(uid) for uid in uids],
            "rollout_worker": [self._service.name] * count,
            "generate_s": [elapsed_s] * count,
            "created_at": pa.array([datetime.now(UTC)] * count, INSTANT),
        }
        types = {column.name: column.type for column in SAMPLE_COLUMNS}
        columns = {name: repeated[name] for name in REPEATED}
        columns["uid"] = pa.array(
            [f"{uid}/{each.sample_index}" for uid, each in zip(uids, completions, strict=True)]
        )
        columns["group_id"] = pa.array(uids)
        for name, values in sampled.items():
            columns[name] = values if isinstance(values, pa.Array) else pa.array(values, types[name])
        columns |= score_columns(answers.scores, self._service.config.rollout.reward)
        columns |= routing_to_arrow(
            [each.routed_experts for each in completions], self._num_experts, self._layer_groups
        )
        return pa.table(columns)


@contextmanager
def _lease_may_be_lost() -> Iterator[None]:
    """Let it pass that a lease was lost: its prompts come again, and rows that are put again change nothing."""
    try:
        yield
    except LeaseLostError as error:
        LOG.warning("lease lost", reason=str(error))
