"""The rollout role of agents against a real queue and control plane; only the engine is a fake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from flight.client import QueueClient
from modalities.base import EncodingProfile, MediaLimits
from modalities.media import MediaItem, MediaTable, media_id
from modalities.registry import load_modalities
from modalities.routing import routing_columns
from relax.agents.config import AgentConfig
from relax.agents.turns import TurnEncoder
from relax.config import MediaConfig, RolloutConfig, RunConfig
from relax.control.hub import ControlHub
from relax.control.member import ControlMember
from relax.data.media import MediaReader, MediaWriter
from relax.data.prompts import Prompt, prompts_to_arrow
from relax.records import AGENT_COLUMNS, RunShape, table_specs
from relax.rewards.config import RewardConfig
from relax.rewards.scorer import Scorer
from relax.roles.rollout import RolloutWorker, Stream, make_worker
from relax.roles.service import Service
from relax.roles.turn_rows import TurnRows, in_whole
from tests.kit.agents import TalkingEngine, saying
from tests.kit.media import picture_bytes
from tests.kit.server import queue_server

GROUP_SIZE = 2
TRAINING = Stream(prompts="prompts", rollouts="rollouts", num_samples=GROUP_SIZE, temperature=1.0)
ALL = [
    "uid",
    "group_id",
    "prompt_token_ids",
    "completion_token_ids",
    "rollout_logprobs",
    "media_ids",
    "reward",
]
ALL += ["reward_error", "completion_text", "finish_reason", "routed_experts", "routed_experts_shape"]
ALL += [column.name for column in AGENT_COLUMNS]

Script = Callable


class Place:
    """A rollout service of agents, and what a test looks at."""

    def __init__(self, home: Path, open_with: ExitStack, agent: AgentConfig, reward: RewardConfig) -> None:
        self.model_dir = home / "model"
        self.modalities = load_modalities(EncodingProfile.from_pretrained(self.model_dir), MediaLimits())
        self.turns = TurnEncoder(self.model_dir, self.modalities)
        self.media = MediaTable(self.modalities, "bytes")
        rollout = RolloutConfig(agent=agent, reward=reward, max_new_tokens=8)
        config = RunConfig(
            group_size=GROUP_SIZE, prompts_per_step=4, rollout=rollout, media=MediaConfig(keep="bytes")
        )
        shape = RunShape(
            prompts_per_step=100,
            group_size=GROUP_SIZE,
            max_staleness=4,
            reward_labels=reward.labels,
            agents=True,
        )
        uri, _ = open_with.enter_context(queue_server())
        self.queue = open_with.enter_context(QueueClient(uri, identity="rollout-0"))
        for spec in table_specs(shape, self.media.columns(), routing_columns()).values():
            self.queue.create_table(spec)
        self.queue.announce("rollouts", 0)
        hub = open_with.enter_context(ControlHub())
        control = open_with.enter_context(ControlMember(hub.uri, "rollout", 0))
        self.service = Service(
            role="rollout",
            index=0,
            config=config,
            run_dir=home,
            model_dir=self.model_dir,
            queue=self.queue,
            control=control,
        )

    def put_prompts(self, count: int) -> None:
        """Put prompts with the same picture, whose right answer is red."""
        data, modality = picture_bytes(seed=7), self.modalities["image"]
        encoded = modality.encode(modality.decode(data))
        item = MediaItem(media_id=media_id(modality, data), modality="image", data=data, encoded=encoded)
        content = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
        chat = self.turns.chat.encode([{"role": "user", "content": content}])
        pad = self.turns.chat.token_id("<|image_pad|>")
        ids = np.repeat(chat, np.where(chat == pad, modality.num_tokens(encoded), 1))
        prompts = [
            Prompt(
                index=index,
                place="rows.jsonl",
                modality="image",
                messages="[]",
                prompt_text="<image>What is it?",
                token_ids=ids,
                reference_answer="red",
                media_paths=("1.png",),
                media=(item,),
            )
            for index in range(count)
        ]
        uids = pa.array([f"0-{index}" for index in range(count)])
        rows = prompts_to_arrow(prompts).append_column("uid", uids).append_column("group_id", uids)
        rows = rows.append_column("epoch", pa.array([0] * count, pa.int32()))
        MediaWriter(self.queue, self.media, writer="preprocess").put("prompts", rows, [item], deadline_s=10.0)

    def work(self, script: Script) -> tuple[RolloutWorker, TalkingEngine]:
        """Serve what waits once, on an engine that says what the script says."""
        engine = saying(self.turns, script)
        worker = make_worker(self.service, engine, Scorer(self.service.config.rollout.reward))
        try:
            assert worker.serve(TRAINING, 8, deadline_s=5.0)
        finally:
            worker.close()
        return worker, engine

    def rows(self) -> pa.Table:
        """Return the rollouts that are there, by uid."""
        return self.queue.read("rollouts", columns=ALL[2:]).sort_by("uid")


@pytest.fixture
def place(job_home: Path) -> Iterator[Callable[..., Place]]:
    """Factory of places: `place(reward="rewards")` with the test's environment."""
    with ExitStack() as open_with:

        def make(rewards: RewardConfig | None = None, **agent) -> Place:
            config = AgentConfig(environment="tests.kit.agents:Shower", call_limit_s=10.0, **agent)
            return Place(job_home, open_with, config, rewards or RewardConfig())

        yield make


def look_then(answers: dict[str, str]) -> Script:
    """Look once, then say the sample's answer."""
    return lambda request, _: answers.get(request.uid, "red") if len(request.media["image"]) > 1 else "look"


def test_episode_is_a_row_that_the_trainer_reads_as_it_was_sampled(place) -> None:
    """Tokens, mask and media cross the queue; the trainer's form has the engine's tokens and their values go back."""
    here = place()
    here.put_prompts(1)
    _, engine = here.work(look_then({}))
    rows = here.rows()
    assert rows["uid"].to_pylist() == ["0-0/0", "0-0/1"]
    assert rows["reward"].to_pylist() == [1.25, 1.25]
    assert rows["completion_text"].to_pylist() == ["look\nred"] * 2
    assert rows["num_turns"].to_pylist() == [2, 2]
    sampled = np.concatenate((engine.tokens("look"), engine.tokens("red")))
    for row in rows.to_pylist():
        mask, tokens = np.array(row["loss_mask"]), np.array(row["completion_token_ids"])
        np.testing.assert_array_equal(tokens[mask], sampled)
        assert (np.array(row["rollout_logprobs"])[~mask] == 0).all()
        assert row["routed_experts_shape"][0] == len(row["prompt_token_ids"]) + len(tokens) - 1
    reader = MediaReader(lambda ids: here.queue.read("media", uids=ids), here.media, max_bytes=1 << 20)
    media = reader.by_tower(rows["media_ids"].to_pylist())
    assert [len(each["image"]) for each in media] == [2, 2]
    np.testing.assert_array_equal(
        media[0]["image"][1]["patches"], engine.requests[-1].media["image"][1]["patches"]
    )
    turns = TurnRows.of(rows)
    assert turns.prompt_of_row.tolist() == [0, 0]
    np.testing.assert_array_equal(turns.rows[0].prompt_token_ids, engine.requests[-1].token_ids)
    np.testing.assert_array_equal(turns.rows[0].completion_token_ids, sampled)
    back = in_whole(rows, [np.ones(len(sampled), np.float32)] * 2)
    np.testing.assert_array_equal(back[0] == 1, rows["loss_mask"][0].as_py())


def test_environment_that_raises_costs_its_group_and_not_the_run(place) -> None:
    """As a reward that fails does: the prompt is a row error with the reason."""
    here = place()
    here.put_prompts(2)
    here.work(lambda request, sample: "raise" if request.uid == "0-0/0" and sample else "red")
    assert here.rows()["uid"].to_pylist() == ["0-1/0", "0-1/1"]
    (error,) = here.queue.read("row_errors").to_pylist()
    assert error["reason"] == (
        "completion 1: reward failed: environment: step: RuntimeError: the world broke"
    )


def test_environment_that_raises_marks_its_row_where_a_value_stands_for_it(place) -> None:
    """With `on_failure=use_value`."""
    here = place(RewardConfig(on_failure="use_value", failed_reward=-1.0))
    here.put_prompts(1)
    here.work(lambda _, sample: "raise" if sample else "red")
    rows = here.rows()
    assert rows["reward"].to_pylist() == [1.0, -1.0]
    assert rows["reward_error"].to_pylist() == [None, "environment: step: RuntimeError: the world broke"]


def test_last_answer_is_what_the_parts_of_the_reward_see(place) -> None:
    """With `reward=rewards`; what the environment gave is not used."""
    here = place(reward="rewards")
    here.put_prompts(1)
    here.work(look_then({"0-0/1": "blue"}))
    assert here.rows()["reward"].to_pylist() == [1.0, 1.0]


def test_aborted_episodes_are_asked_again(place) -> None:
    """The prompt goes back whole."""
    here = place()
    here.put_prompts(1)
    here.work(lambda *_: "look!")
    assert here.rows().num_rows == 0
    again = here.queue.take("prompts", "rollout", max_rows=4, policy_version=0, deadline_s=5.0)
    assert again.table["uid"].to_pylist() == ["0-0"]
