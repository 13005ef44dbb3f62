"""The rollout role of agents: a prompt becomes `group_size` episodes, an episode a row. It trains nothing.

A row has all that follows its first prompt in `completion_token_ids`, answers and observations, a `loss_mask` that
tells them apart, and the ids of all media; those that were observed are put into `media` before it. An episode without
a reward, because its environment or program failed, is a failed reward: see `rollout.reward.on_failure`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from flight.client import Lease
from modalities.base import EncodingProfile
from modalities.media import MediaTable
from modalities.packing import pack_list, unpack_present
from modalities.registry import load_modalities
from relax.agents.driver import EpisodeDriver
from relax.agents.environment import Medium, Task
from relax.agents.episode import Episode, Sampling, Start
from relax.agents.programs import ProgramDriver
from relax.agents.registry import load_environment
from relax.agents.turns import TurnEncoder
from relax.data.media import TABLE, MediaWriter
from relax.records import STRINGS
from relax.rewards.scorer import Score, Scorer
from relax.roles.answers import Answers, check_group, reward_input, with_scores
from relax.roles.held_out import check_version
from relax.roles.partial import Begun
from relax.roles.rollout import RolloutWorker, Stream
from relax.roles.service import Service
from relax.rollout.engine import Completion, GenerateRequest, RolloutEngine, refused

FACTS = ("uid", "prompt_text", "reference_answer", "modality", "messages", "media_paths")
LARGEST = 3.4e38
"""Rewards travel as 32-bit floats."""


class EpisodeWorker(RolloutWorker):
    """Answers leases of prompts with episodes."""

    def __init__(self, service: Service, engine: RolloutEngine, scorer: Scorer) -> None:
        super().__init__(service, engine, scorer)
        config = service.config
        profile = EncodingProfile.from_pretrained(service.model_dir)
        modalities = load_modalities(profile, config.modalities.limits, config.modalities.extra)
        self._agent = config.rollout.agent
        self._turns = TurnEncoder(service.model_dir, modalities)
        self._writer = MediaWriter(
            service.queue,
            MediaTable(modalities, config.media.keep),
            writer="",
        )
        self._driver = self._make_driver(engine)
        self._episodes: dict[tuple[str, int], Episode] = {}
        """The episodes of the lease in hand, by prompt and sample."""

    def close(self) -> None:
        """End the endpoint of programs, the engine and the reward's processes."""
        if isinstance(self._driver, ProgramDriver):
            self._driver.close()
        super().close()

    def _make_driver(self, engine: RolloutEngine) -> EpisodeDriver | ProgramDriver:
        if self._agent.environment is None:
            return ProgramDriver(engine, self._turns, self._agent)
        environment = load_environment(self._agent.environment, self._agent.options)
        return EpisodeDriver(engine, environment, self._turns, self._agent)

    def _completions(self, stream: Stream, lease: Lease, begun: Mapping[str, Begun]) -> list[Completion]:
        """Return the episodes of a lease's prompts as completions; none is ever gone on with."""
        sampling = Sampling(
            max_new_tokens=self._service.config.rollout.max_new_tokens,
            temperature=stream.temperature,
            seed=self._service.config.seed,
        )
        self._episodes = {}
        starts = self._starts(lease.table, stream)
        episodes = self._driver.run(starts, sampling, beat=lambda: self._renew(stream, lease))
        for episode in episodes:
            self._episodes[episode.start.uid, episode.start.sample_index] = episode
        self._put_metrics(stream, episodes)
        return [completion_of(episode) for episode in episodes]

    def _starts(self, prompts: pa.Table, stream: Stream) -> list[Start]:
        media_ids = prompts["media_ids"].to_pylist()
        media = self._media.by_tower(media_ids)
        files = self._files(media_ids)
        tokens = unpack_present(prompts["prompt_token_ids"])
        starts = []
        for row, facts in enumerate(prompts.select(FACTS).to_pylist()):
            task = Task(
                **{**facts, "media_paths": tuple(facts["media_paths"] or ())},
                media=tuple(files[each] for each in media_ids[row] or () if each in files),
            )
            for sample in range(stream.num_samples):
                starts.append(
                    Start(
                        task=replace(task, seed=self._seed(f"{task.uid}/{sample}")),
                        token_ids=tokens[row],
                        media=media[row],
                        media_ids=media_ids[row] or (),
                        sample_index=sample,
                    )
                )
        return starts

    def _files(self, media_ids: list[list[str] | None]) -> dict[str, Medium]:
        """Return the prompts' media as files, where the table keeps files."""
        wanted = sorted({each for row in media_ids for each in row or ()})
        if self._service.config.media.keep != "bytes" or not wanted:
            return {}
        rows = self._service.queue.read(TABLE, columns=["modality", "data"], uids=wanted)
        return {row["uid"]: Medium(row["modality"], row["data"]) for row in rows.to_pylist()}

    def _scored(self, stream: Stream, lease: Lease, completions: list[Completion]) -> Answers:
        """Sort the groups of a lease, with the rewards of their episodes."""
        by_uid: dict[str, list[Completion]] = defaultdict(list)
        for completion in completions:
            by_uid[completion.uid].append(completion)
        facts = lease.table.select(["uid", "modality", "prompt_text", "reference_answer"]).to_pylist()
        answers, prompts = Answers(), []
        for row, prompt in enumerate(facts):
            group = by_uid[prompt["uid"]]
            if any(each.finish_reason == "abort" for each in group):
                answers.aborted[prompt["uid"]] = group
            elif reason := (
                self._without_tokens(group)
                or check_group(group, stream.num_samples)
                or check_version(group, stream.policy_version)
            ):
                answers.failed[prompt["uid"]] = reason
            else:
                answers.rows.append(row)
                answers.groups.append(group)
                prompts += [prompt] * len(group)
        scores = self._scores(stream, lease, prompts, [each for group in answers.groups for each in group])
        uids = [prompt["uid"] for prompt in facts]
        return with_scores(answers, scores, uids, self._service.config.rollout.reward)

    def _scores(
        self, stream: Stream, lease: Lease, prompts: list[dict], completions: list[Completion]
    ) -> list[Score]:
        """Return the rewards of episodes, in order; one whose environment failed has none."""
        episodes = [self._episode(completion) for completion in completions]
        if self._agent.reward == "environment":
            return [environment_score(episode) for episode in episodes]
        samples = [
            reward_input(prompt, replace(completion, text=episode.answer))
            for prompt, completion, episode in zip(prompts, completions, episodes, strict=True)
        ]
        beat_s = self._service.config.queue.lease_s / 4
        scores = self._scorer.score(samples, beat=lambda: self._renew(stream, lease), beat_s=beat_s)
        return [
            replace(score, reward=0.0, error=episode.error) if episode.error else score
            for score, episode in zip(scores, episodes, strict=True)
        ]

    def _rows(self, prompts: pa.Table, answers: Answers, stream: Stream, elapsed_s: float) -> pa.Table:
        """Return the rows of table `rollouts` with what agents have besides."""
        rows = super()._rows(prompts, answers, stream, elapsed_s)
        episodes = [self._episode(completion) for group in answers.groups for completion in group]
        traces = [episode.transcript.trace() for episode in episodes]
        own = {
            "prompt_token_ids": pack_list(
                [[episode.transcript.prompt_token_ids] for episode in episodes], pa.int32()
            ),
            "media_ids": pa.array([trace.media_ids for trace in traces], STRINGS),
            "loss_mask": pa.array([trace.loss_mask for trace in traces], pa.list_(pa.bool_())),
            "num_turns": pa.array([episode.transcript.num_turns for episode in episodes], pa.int32()),
        }
        columns = dict(zip(rows.column_names, rows.columns, strict=True))
        return pa.table(columns | own)

    def _send(self, stream: Stream, rows: pa.Table) -> None:
        """Put the media that were observed and are not there yet, then the rows."""
        wanted = {each for row in rows["media_ids"].to_pylist() for each in row or ()}
        items = [item for episode in self._episodes.values() for item in episode.transcript.items]
        self._writer.put(
            stream.rollouts,
            rows,
            [item for item in items if item.media_id in wanted],
            deadline_s=self._service.config.queue.lease_s,
        )

    def _put_metrics(self, stream: Stream, episodes: list[Episode]) -> None:
        if stream.rollouts == "rollouts":
            version = self._engine.policy_version
            self._service.put_metrics(version, version, agent_metrics(episodes))

    def _without_tokens(self, group: list[Completion]) -> str:
        """Return the failure of an episode that came to no turn, or ''."""
        for completion in group:
            error = self._episode(completion).error
            if error and not len(completion.token_ids):
                return f"completion {completion.sample_index}: {error}"
        return ""

    def _episode(self, completion: Completion) -> Episode:
        return self._episodes[completion.uid, completion.sample_index]


def completion_of(episode: Episode) -> Completion:
    """Return a whole episode as one completion, observed tokens included."""
    request = GenerateRequest(uid=episode.start.uid, token_ids=episode.transcript.prompt_token_ids)
    if episode.refusal or not episode.transcript.num_turns:
        nothing = refused(request, episode.refusal)
        reason = "abort" if episode.finish_reason == "abort" and not episode.refusal else "refused"
        return replace(nothing, sample_index=episode.start.sample_index, finish_reason=reason)  # type: ignore[arg-type]  # both are finish reasons
    trace = episode.transcript.trace()
    return Completion(
        uid=episode.start.uid,
        sample_index=episode.start.sample_index,
        token_ids=trace.token_ids,
        logprobs=trace.logprobs,
        token_policy_versions=trace.token_policy_versions,
        routed_experts=trace.routed_experts,
        finish_reason=episode.finish_reason or "stop",
        text=episode.text,
    )


def environment_score(episode: Episode) -> Score:
    """Return what the environment gave, or why it gave nothing."""
    if not episode.error and not abs(episode.reward) <= LARGEST:
        return Score(reward=0.0, error=f"the reward must be finite in 32 bits, got {episode.reward}")
    return Score(reward=0.0 if episode.error else episode.reward, error=episode.error)


def agent_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return means over episodes: turns, tokens, how they ended, and what their environments told."""
    values: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        values["num_turns"].append(episode.transcript.num_turns)
        values["num_tokens"].append(episode.transcript.num_tokens)
        values["length_fraction"].append(episode.finish_reason == "length")
        values["failed_fraction"].append(bool(episode.error))
        for name, value in episode.info.items():
            values[name].append(value)
    return {f"agent/{name}": float(np.mean(each)) for name, each in values.items()}
