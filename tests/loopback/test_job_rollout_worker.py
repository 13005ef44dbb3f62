"""The rollout role against a real queue and control plane; only the engine is a fake."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from flight.client import QueueClient
from modalities.base import MediaLimits
from modalities.media import MediaTable
from modalities.registry import load_modalities
from modalities.routing import routing_columns
from relax.config import RolloutConfig, RunConfig
from relax.control.course import COURSE_KEY, Course, fence_key
from relax.control.hub import ControlHub
from relax.control.member import ControlMember
from relax.data.prompts import Prompt, prompts_to_arrow
from relax.errors import HopelessError
from relax.records import EVALUATED_VERSION, RunShape, table_specs
from relax.rewards.config import RewardConfig, RewardPart
from relax.rewards.scorer import Scorer
from relax.roles.held_out import serve_held_out, with_version
from relax.roles.rollout import MAX_REFUSED_IN_A_ROW, RolloutWorker, Stream
from relax.roles.service import Service
from relax.rollout.engine import Completion, GenerateRequest, refused
from tests.kit.engine import FakeEngine, Script
from tests.kit.job import PLUGINS
from tests.kit.media import PROFILE
from tests.kit.server import queue_server

GROUP_SIZE = 2
TRAINING = Stream(prompts="prompts", rollouts="rollouts", num_samples=GROUP_SIZE, temperature=1.0)
HELD_OUT = Stream(prompts="eval_prompts", rollouts="eval_rollouts", num_samples=GROUP_SIZE, temperature=0.0)
MODALITIES = load_modalities(PROFILE, MediaLimits())


@pytest.fixture
def hub() -> Iterator[ControlHub]:
    """A control plane of its own."""
    with ControlHub() as own:
        yield own


@pytest.fixture
def service(
    job_home: Path,
    tmp_path: Path,
    hub: ControlHub,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Service]:
    """A rollout service with the tables of a run, on a server of its own; its reward is the parameter, if any."""
    monkeypatch.syspath_prepend(str(PLUGINS))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PLUGINS), os.environ.get("PYTHONPATH", "")]))
    rollout = RolloutConfig(reward=getattr(request, "param", RewardConfig()))
    config = RunConfig(group_size=GROUP_SIZE, prompts_per_step=4, rollout=rollout)
    shape = RunShape(
        prompts_per_step=100,
        group_size=GROUP_SIZE,
        max_staleness=4,
        reward_labels=config.rollout.reward.labels,
    )
    media = MediaTable(MODALITIES, "arrays").columns()
    with queue_server() as (uri, _), QueueClient(uri, identity="rollout-0") as queue:
        for spec in table_specs(shape, media, routing_columns()).values():
            queue.create_table(spec)
        queue.announce("rollouts", 0)
        with ControlMember(hub.uri, "rollout", 0) as control:
            yield Service(
                role="rollout",
                index=0,
                config=config,
                run_dir=tmp_path,
                model_dir=job_home / "model",
                queue=queue,
                control=control,
            )


def put_prompts(
    service: Service, count: int, table: str = "prompts", prefix: str = "0", version: int = 0
) -> list[str]:
    """Put prompts of words alone and return their uids; held-out ones ask for a version."""
    uids = [f"{prefix}-{index}" for index in range(count)]
    prompts = [
        Prompt(
            index=index,
            place=f"rows.jsonl:{index + 1}",
            modality="text",
            messages="[]",
            prompt_text="red?",
            token_ids=np.array([1, 2], np.int32),
            reference_answer="red",
            media_paths=(),
            media=(),
        )
        for index in range(count)
    ]
    rows = prompts_to_arrow(prompts)
    if table == "eval_prompts":
        rows = with_version(rows, version)
    rows = rows.append_column("uid", pa.array(uids)).append_column("group_id", pa.array(uids))
    service.queue.put(
        table, rows.append_column("epoch", pa.array([0] * count, pa.int32())), writer="preprocess"
    )
    return uids


def answer(request: GenerateRequest, index: int, **changes) -> Completion:
    """Return a completion without fault, but for `changes`."""
    whole = Completion(
        uid=request.uid,
        sample_index=index,
        token_ids=np.array([7, 8], np.int32),
        logprobs=np.array([-0.5, -0.25], np.float32),
        token_policy_versions=np.zeros(2, np.int32),
        routed_experts=None,
        finish_reason="stop",
        text="red",
    )
    return dataclasses.replace(whole, **changes)


def spoiling(uid: str, **changes) -> Script:
    """Return a script whose last sample for `uid` has a fault."""

    def script(request: GenerateRequest) -> list[Completion]:
        faults = changes if request.uid == uid else {}
        return [answer(request, 0), answer(request, 1, **faults)]

    return script


def make_worker(service: Service, script: Script) -> RolloutWorker:
    return RolloutWorker(service, FakeEngine(script), Scorer(service.config.rollout.reward))


def errors_of(service: Service) -> list[dict]:
    return service.queue.read("row_errors").select(["uid", "stage", "place", "reason"]).to_pylist()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"logprobs": np.array([-0.5, math.nan], np.float32)},
            "completion 1: logprobs must be finite, got [-0.5, nan]",
        ),
        (
            {"logprobs": np.array([-0.5, -math.inf], np.float32)},
            "completion 1: logprobs must be finite, got [-0.5, -inf]",
        ),
        (
            {"logprobs": np.array([-0.5], np.float32)},
            "completion 1: every token must have a logprob and a policy version, got 2 tokens, 1 logprobs, "
            "2 policy versions",
        ),
        (
            {"token_ids": np.zeros(0, np.int32)},
            "completion 1: must hold at least one token, got none",
        ),
    ],
)
def test_fault_of_the_engine_costs_its_group(service, changes, reason):
    """NaN and the like: one named row error, no row of that group, the other groups go on."""
    uids = put_prompts(service, 3)
    worker = make_worker(service, spoiling(uids[1], **changes))
    assert worker.serve(TRAINING, 3, deadline_s=5.0)
    rows = service.queue.read("rollouts")
    assert sorted(set(rows["group_id"].to_pylist())) == [uids[0], uids[2]]
    assert rows["reward"].to_pylist() == [1.0] * 4
    assert errors_of(service) == [
        {"uid": "rollout/0-1", "stage": "rollout", "place": "prompts row 0-1", "reason": reason}
    ]
    assert service.queue.stats("prompts")["consumers"]["rollout"]["ready"] == 0


def test_prompt_that_the_engine_refuses_is_a_row_error(service):
    """A single completion stands for the refused group."""
    uids = put_prompts(service, 2, table="eval_prompts", prefix="eval1")

    def script(request: GenerateRequest) -> list[Completion]:
        if request.uid == uids[0]:
            return [refused(request, "prompt must fit, got too many tokens")]
        return [answer(request, 0), answer(request, 1)]

    assert serve_held_out(make_worker(service, script), HELD_OUT, 2, deadline_s=5.0)
    assert service.queue.read("eval_rollouts").num_rows == GROUP_SIZE
    (error,) = errors_of(service)
    assert (error["uid"], error["place"]) == ("rollout/eval1-0", "eval_prompts row eval1-0")
    assert error["reason"] == "completion 0: refused by the engine: prompt must fit, got too many tokens"


def test_aborted_prompt_is_given_back(service):
    """It is nobody's fault: no row error, and the prompt waits again."""
    uids = put_prompts(service, 1)
    worker = make_worker(service, spoiling(uids[0], finish_reason="abort"))
    assert worker.serve(TRAINING, 1, deadline_s=5.0)
    assert errors_of(service) == []
    assert service.queue.read("rollouts").num_rows == 0
    assert service.queue.stats("prompts")["consumers"]["rollout"]["ready"] == 1


CRASHING = [RewardPart(name="bad_rewards:leaves", label="judge"), RewardPart(name="exact_match", weight=0.5)]
CRASH = "judge: must not end its process, got exit code 0"


@pytest.mark.parametrize("service", [RewardConfig(parts=CRASHING, retries=1, workers=1)], indirect=True)
def test_reward_that_crashes_costs_its_group(service):
    """The process of the plug-in ends, the role's does not: one row error, and the other group's parts are recorded."""
    uids = put_prompts(service, 2)
    worker = make_worker(service, spoiling(uids[0], text="leave"))
    assert worker.serve(TRAINING, 2, deadline_s=5.0)
    rows = service.queue.read("rollouts").select(["reward", "reward_judge", "reward_exact_match"]).to_pylist()
    assert rows == [{"reward": 1.5, "reward_judge": 1.0, "reward_exact_match": 1.0}] * 2
    (error,) = errors_of(service)
    assert (error["place"], error["reason"]) == ("prompts row 0-0", f"completion 1: reward failed: {CRASH}")
    worker.close()


@pytest.mark.parametrize(
    "service",
    [RewardConfig(parts=CRASHING, retries=0, workers=1, on_failure="use_value", failed_reward=-1.0)],
    indirect=True,
)
def test_reward_that_crashes_can_cost_its_row_alone(service):
    """The row is marked with the reason and gets the configured value; no row error."""
    uids = put_prompts(service, 1)
    worker = make_worker(service, spoiling(uids[0], text="leave"))
    assert worker.serve(TRAINING, 1, deadline_s=5.0)
    names = ["reward", "reward_judge", "reward_exact_match", "reward_error"]
    assert service.queue.read("rollouts").select(names).to_pylist() == [
        dict(zip(names, (1.5, 1.0, 1.0, None), strict=True)),
        dict(zip(names, (-1.0, None, 0.0, CRASH), strict=True)),
    ]
    assert errors_of(service) == []
    worker.close()


def test_engine_that_never_answers_rightly_is_an_error(service):
    """After so many refusals one after another the role fails with the last reason; one good group begins anew."""
    uids = put_prompts(service, 2 * MAX_REFUSED_IN_A_ROW)
    good = uids[MAX_REFUSED_IN_A_ROW - 1]

    def script(request: GenerateRequest) -> list[Completion]:
        faults = {} if request.uid == good else {"logprobs": np.full(2, math.nan, np.float32)}
        return [answer(request, 0, **faults), answer(request, 1)]

    worker = make_worker(service, script)
    for _ in range(MAX_REFUSED_IN_A_ROW // 4 + MAX_REFUSED_IN_A_ROW // 4 - 1):
        assert worker.serve(TRAINING, 4, deadline_s=5.0)
    with pytest.raises(HopelessError) as caught:
        worker.serve(TRAINING, 4, deadline_s=5.0)
    assert str(caught.value) == (
        "rollout: prompts must be answered and scored, got 64 refused one after another; the last: "
        "completion 0: logprobs must be finite, got [nan, nan]"
    )


def test_answers_to_an_earlier_incarnation_are_dropped(service, hub):
    """The run goes back while the engine generates: nothing is put, and the worker says that it has followed."""
    service.begin()
    uids = put_prompts(service, 1)

    def script(request: GenerateRequest) -> list[Completion]:
        hub.set(COURSE_KEY, Course(1, 0).to_value())
        assert service.control.wait_for(lambda: service.has_gone_back, 5.0)
        return [answer(request, 0), answer(request, 1)]

    worker = make_worker(service, script)
    assert worker.serve(TRAINING, 1, deadline_s=5.0)
    assert service.queue.read("rollouts").num_rows == 0
    assert service.queue.stats("prompts")["consumers"]["rollout"]["leased"] == len(uids)
    assert hub.get(fence_key("rollout/0")) == 0
    service.follow()
    assert hub.get(fence_key("rollout/0")) == 1


def test_worker_adopts_the_version_that_the_run_went_back_to(service, hub):
    """Not the newest of before, and none before the actor has announced it."""
    worker = make_worker(service, lambda request: [])
    with ControlMember(hub.uri, "actor", 0) as actor:
        actor.announce_policy_version(5, "/w/5")
        service.control.wait_for(lambda: service.control.policy_version is not None, 5.0)
        assert worker.weights.adopt_newest()
        hub.set(COURSE_KEY, Course(1, 3).to_value())
        assert service.control.wait_for(lambda: service.has_gone_back, 5.0)
        service.follow()
        assert not worker.weights.adopt_newest()
        actor.announce_policy_version(3, "/w/3-1", incarnation=1)
        service.control.wait_for(lambda: service.control.policy_version.incarnation == 1, 5.0)
        assert worker.weights.adopt_newest()
    assert worker._engine.policy_version == 3


def test_lease_that_is_lost_costs_the_worker_nothing(service):
    """Its prompts come again, and what is put again changes nothing."""
    uids = put_prompts(service, 1)

    def script(request: GenerateRequest) -> list[Completion]:
        service.queue.void("rollout-0")
        return [answer(request, 0), answer(request, 1)]

    worker = make_worker(service, script)
    assert worker.serve(TRAINING, 1, deadline_s=5.0)
    assert service.queue.stats("prompts")["consumers"]["rollout"]["ready"] == len(uids)
    worker = make_worker(service, spoiling("nobody"))
    assert worker.serve(TRAINING, 1, deadline_s=5.0)
    stats = service.queue.stats()
    assert stats["prompts"]["consumers"]["rollout"]["acked"] == len(uids)
    assert (stats["rollouts"]["put"], stats["rollouts"]["duplicates"]) == (GROUP_SIZE, GROUP_SIZE)


def published(service: Service, *versions: int) -> None:
    """Make directories where the snapshots of these versions would be."""
    for version in versions:
        (service.run_dir / "weights" / f"{version:06d}").mkdir(parents=True)


def held_out_worker(service: Service) -> tuple[RolloutWorker, FakeEngine]:
    """Return a worker whose engine tags tokens with the version that it has, and misses snapshots that are gone."""

    class FakeEngineWithFiles(FakeEngine):
        """A fake: adopting takes the version if its directory is there."""

        def adopt(self, snapshot_dir: Path | str, policy_version: int) -> None:
            """Take the version, or say that it is gone."""
            if not Path(snapshot_dir).is_dir():
                raise FileNotFoundError(snapshot_dir)
            self.policy_version = policy_version

    def script(request: GenerateRequest) -> list[Completion]:
        versions = np.full(2, engine.policy_version, np.int32)
        return [answer(request, index, token_policy_versions=versions) for index in range(GROUP_SIZE)]

    engine = FakeEngineWithFiles(script)
    return RolloutWorker(service, engine, Scorer(service.config.rollout.reward)), engine


def test_held_out_prompts_are_answered_by_the_version_that_they_ask_for(service, hub):
    """Two rounds in one lease, older than the newest weights; then the worker goes back to the newest."""
    published(service, 0, 2, 4, 9)
    worker, engine = held_out_worker(service)
    with ControlMember(hub.uri, "actor", 0) as actor:
        actor.announce_policy_version(9, service.run_dir / "weights" / "000009")
        assert service.control.wait_for(lambda: service.control.policy_version is not None, 5.0)
        assert worker.weights.adopt_newest()
        put_prompts(service, 2, table="eval_prompts", prefix="eval2", version=4)
        put_prompts(service, 2, table="eval_prompts", prefix="eval1", version=2)
        assert serve_held_out(worker, HELD_OUT, 8, deadline_s=5.0)
        assert not serve_held_out(worker, HELD_OUT, 8, deadline_s=0.0)
        names = [EVALUATED_VERSION, "policy_version_start", "policy_version_end", "token_policy_versions"]
        rows = service.queue.read("eval_rollouts").select(["group_id", *names]).to_pylist()
        asked = {row["group_id"]: {str(row[name]) for name in names[:3]} for row in rows}
        assert asked == {"eval1-0": {"2"}, "eval1-1": {"2"}, "eval2-0": {"4"}, "eval2-1": {"4"}}
        assert worker.weights.adopt_newest()
    assert engine.policy_version == 9
    assert errors_of(service) == []


def test_held_out_prompts_whose_weights_are_gone_are_refused(service):
    """The round is told, and does not wait for them; others are answered."""
    published(service, 3)
    worker, _ = held_out_worker(service)
    put_prompts(service, 1, table="eval_prompts", prefix="eval1", version=2)
    put_prompts(service, 1, table="eval_prompts", prefix="eval2", version=3)
    assert serve_held_out(worker, HELD_OUT, 8, deadline_s=5.0)
    (error,) = errors_of(service)
    assert (error["uid"], error["reason"]) == (
        "rollout/eval1-0",
        "weights of policy version 2 must be there, got none any more",
    )
    assert set(service.queue.read("eval_rollouts")["group_id"].to_pylist()) == {"eval2-0"}
    assert service.queue.stats("eval_prompts")["consumers"]["rollout"]["ready"] == 0


def test_answer_of_another_version_than_asked_is_refused(service):
    """Whatever an engine says of its weights, it is the tokens' own versions that count."""
    published(service, 3)
    worker = make_worker(service, lambda request: [answer(request, 0), answer(request, 1)])
    put_prompts(service, 1, table="eval_prompts", prefix="eval1", version=3)
    assert serve_held_out(worker, HELD_OUT, 8, deadline_s=5.0)
    assert service.queue.read("eval_rollouts").num_rows == 0
    assert [error["reason"] for error in errors_of(service)] == [
        "completion 0: all tokens must be of policy version 3, got [0]"
    ]
