"""The rollout role: takes prompts, adopts the newest weights, generates groups, scores them, puts rollouts.

It does not decide how far it may run ahead: the queue hands out a prompt only when the staleness bound allows it.
A group that cannot be scored or has a non-finite number costs that prompt only, as a row error.
"""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
from flight.client import Lease

from modalities.base import EncodingProfile
from modalities.packing import pack_list, unpack_list
from modalities.registry import load_modalities
from modalities.routing import routing_to_arrow
from relax.data.prompts import media_from_arrow
from relax.models.spec import ThinkerSpec
from relax.records import INSTANT, SAMPLE_COLUMNS
from relax.roles.service import Service
from relax.rollout.engine import Completion, GenerateRequest, RolloutEngine
from relax.rollout.rewards import Reward, RewardInput, load_reward

COPIED = (
    "prompt_index",
    "epoch",
    "modality",
    "prompt_text",
    "prompt_token_ids",
    "reference_answer",
    "media_paths",
)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a lease of prompts is answered."""

    table: str
    num_samples: int
    temperature: float
    greedy: bool


def run(service: Service) -> None:
    """Serve prompts until the role has to leave."""
    from relax.rollout.torch_engine import TorchEngine

    config = service.config
    engine = TorchEngine(service.model_dir, num_threads=config.rollout.num_threads)
    worker = RolloutWorker(service, engine, load_reward(config.rollout.reward))
    train = Sampling(
        table="rollouts", num_samples=config.group_size, temperature=config.rollout.temperature, greedy=False
    )
    evaluate = Sampling(table="eval_rollouts", num_samples=1, temperature=0.0, greedy=True)
    service.report(state="ready")
    max_prompts = -(-config.prompts_per_step // config.rollout.num_workers)
    while not service.leaving:
        service.wait_while_paused()
        if not worker.adopt_newest():
            continue
        lease = service.queue.take(
            "eval_prompts",
            "rollout",
            max_rows=config.evaluation.max_prompts,
            lease_s=config.queue.lease_s,
            deadline_s=0.0,
        )
        if lease.status == "rows":
            worker.answer("eval_prompts", lease, evaluate)
            continue
        lease = service.queue.take(
            "prompts",
            "rollout",
            max_rows=max_prompts,
            policy_version=engine.policy_version,
            lease_s=config.queue.lease_s,
            deadline_s=0.25,
        )
        if lease.status == "rows":
            worker.answer("prompts", lease, train)
        elif lease.status == "outdated":
            worker.wait_for_version(lease.policy_version)
    engine.close()


class RolloutWorker:
    """Answers leases of prompts with one engine and one reward."""

    def __init__(self, service: Service, engine: RolloutEngine, reward: Reward) -> None:
        self._service = service
        self._engine = engine
        self._reward = reward
        config = service.config
        profile = EncodingProfile.from_pretrained(service.model_dir)
        self._num_experts = ThinkerSpec.from_pretrained(service.model_dir).num_experts
        self._modalities = load_modalities(profile, config.modalities.limits, config.modalities.extra)

    def adopt_newest(self) -> bool:
        """Adopt the newest published weights; return whether the engine has any."""
        newest = self._service.control.policy_version
        if newest is None:
            self._service.control.wait_for(
                lambda: self._service.control.policy_version is not None, deadline_s=1.0
            )
            return False
        if newest.version > self._engine.policy_version:
            try:
                self._engine.adopt(newest.path, newest.version)
            except FileNotFoundError:  # replaced by a newer snapshot meanwhile: look again
                return False
        return True

    def wait_for_version(self, version: int) -> None:
        """Wait a moment until the control plane has told of `version`."""
        control = self._service.control
        control.wait_for(
            lambda: (
                (control.policy_version is not None and control.policy_version.version >= version)
                or self._service.leaving
            ),
            deadline_s=1.0,
        )

    def answer(self, source: str, lease: Lease, sampling: Sampling) -> None:
        """Generate, score and put all groups of a lease, then ack its prompts (or drop those that failed)."""
        service = self._service
        prompts = lease.table
        requests = self._requests(prompts, sampling)
        started = time.monotonic()
        completions = self._engine.generate(requests)
        elapsed_s = time.monotonic() - started
        by_uid: dict[str, list[Completion]] = {}
        for completion in completions:
            by_uid.setdefault(completion.uid, []).append(completion)
        good_rows: list[int] = []
        good: list[list[Completion]] = []
        rewards: list[float] = []
        failed: dict[str, str] = {}
        texts = prompts.select(["uid", "modality", "prompt_text", "reference_answer"]).to_pylist()
        for row, prompt in enumerate(texts):
            group = by_uid.get(prompt["uid"], [])
            if any(completion.finish_reason == "abort" for completion in group):
                continue  # the lease is given back below; another worker answers the prompt
            reason, scores = self._score(prompt, group, sampling.num_samples)
            if reason:
                failed[prompt["uid"]] = reason
                continue
            good_rows.append(row)
            good.append(group)
            rewards.extend(scores)
        if good:
            service.queue.put(
                sampling.table,
                self._rows(prompts.take(pa.array(good_rows)), good, rewards, sampling, elapsed_s),
                writer="rollout",
            )
            service.queue.ack(
                source, "rollout", lease_id=lease.lease_id, uids=[texts[row]["uid"] for row in good_rows]
            )
        for uid, reason in failed.items():
            service.put_row_error(uid, f"{source} row {uid}", reason)
            service.queue.nack(
                source, "rollout", lease_id=lease.lease_id, uids=[uid], reason=reason, requeue=False
            )
        left = {prompt["uid"] for prompt in texts} - set(failed) - {texts[row]["uid"] for row in good_rows}
        if left:
            service.queue.nack(
                source, "rollout", lease_id=lease.lease_id, uids=sorted(left), reason="generation was aborted"
            )

    def _requests(self, prompts: pa.Table, sampling: Sampling) -> list[GenerateRequest]:
        media = media_from_arrow(prompts, self._modalities)
        tokens = unpack_list(prompts["prompt_token_ids"])
        return [
            GenerateRequest(
                uid=uid,
                token_ids=tokens[row],
                media=media[row],
                num_samples=sampling.num_samples,
                seed=self._seed(uid),
                max_new_tokens=self._service.config.rollout.max_new_tokens,
                temperature=sampling.temperature,
                greedy=sampling.greedy,
            )
            for row, uid in enumerate(prompts["uid"].to_pylist())
        ]

    def _seed(self, uid: str) -> int:
        return zlib.crc32(f"{self._service.config.seed}/{uid}".encode())

    def _score(self, prompt: dict, group: list[Completion], num_samples: int) -> tuple[str, list[float]]:
        """Return (why the group is refused or "", one reward a completion)."""
        refusal = next((completion.error for completion in group if completion.error), "")
        if refusal:
            return refusal, []
        if len(group) != num_samples:
            return f"the engine must return {num_samples} completions, got {len(group)}", []
        scores = []
        for completion in group:
            if not np.isfinite(completion.logprobs).all():
                return (
                    f"completion {completion.sample_index}: logprobs must be finite, got {completion.logprobs}",
                    [],
                )
            result = self._reward(
                RewardInput(
                    prompt_text=prompt["prompt_text"],
                    completion_text=completion.text,
                    reference_answer=prompt["reference_answer"],
                    finish_reason=completion.finish_reason,
                    modality=prompt["modality"],
                    num_completion_tokens=len(completion.token_ids),
                )
            )
            if result.error:
                return f"completion {completion.sample_index}: reward failed: {result.error}", []
            scores.append(result.reward)
        return "", scores

    def _rows(
        self,
        prompts: pa.Table,
        groups: list[list[Completion]],
        rewards: list[float],
        sampling: Sampling,
        elapsed_s: float,
    ) -> pa.Table:
        """Return the rows of table `rollouts`: the prompt's columns repeated, then what was sampled."""
        completions = [completion for group in groups for completion in group]
        count = len(completions)
        repeated = prompts.take(pa.array(np.repeat(np.arange(len(groups)), sampling.num_samples)))
        uids = repeated["uid"].to_pylist()
        versions = [completion.token_policy_versions for completion in completions]
        adopted = self._engine.policy_version
        columns = {name: repeated[name] for name in COPIED} | {
            "uid": [
                f"{uid}/{completion.sample_index}" for uid, completion in zip(uids, completions, strict=True)
            ],
            "group_id": uids,
            "completion_token_ids": pack_list([[each.token_ids] for each in completions], pa.int32()),
            "completion_text": [completion.text for completion in completions],
            "rollout_logprobs": pack_list([[each.logprobs] for each in completions], pa.float32()),
            "token_policy_versions": pack_list([[each] for each in versions], pa.int32()),
            "policy_version_start": [int(each[0]) if len(each) else adopted for each in versions],
            "policy_version_end": [int(each[-1]) if len(each) else adopted for each in versions],
            "reward": pa.array(rewards, pa.float32()),
            "finish_reason": [completion.finish_reason for completion in completions],
            "temperature": pa.array([sampling.temperature] * count, pa.float32()),
            "seed": pa.array([self._seed(uid) for uid in uids], pa.int64()),
            "rollout_worker": [self._service.name] * count,
            "generate_s": pa.array([elapsed_s] * count, pa.float32()),
            "created_at": pa.array([datetime.now(UTC)] * count, INSTANT),
        }
        fields = {column.name: column.type for column in SAMPLE_COLUMNS}
        columns = {
            name: value
            if isinstance(value, pa.Array | pa.ChunkedArray)
            else pa.array(value, fields.get(name, pa.string()))
            for name, value in columns.items()
        }
        if sampling.table == "rollouts" and completions[0].routed_experts is not None:
            tables = [completion.routed_experts for completion in completions]
            columns |= routing_to_arrow(tables, self._num_experts)
        return pa.table(columns)
