"""Rollouts that are interrupted, with the embedded engine, a real queue and a real control plane."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from flight.client import QueueClient
from modalities.base import MediaLimits
from modalities.media import MediaTable
from modalities.registry import load_modalities
from modalities.routing import routing_columns, routing_from_arrow
from relax.config import RolloutConfig, RunConfig
from relax.control.hub import ControlHub
from relax.control.member import ControlMember
from relax.data.prompts import Prompt, prompts_to_arrow
from relax.models.snapshot import write_snapshot
from relax.models.thinker import checkpoint_views, load_thinker
from relax.partial_records import PARTIAL_TABLE
from relax.records import RunShape, table_specs
from relax.rewards.config import RewardConfig, RewardPart
from relax.rewards.scorer import Scorer
from relax.roles.rollout import RolloutWorker, Stream
from relax.roles.service import Service
from relax.roles.training_batch import left_out
from relax.rollout.partial_config import PartialConfig
from relax.rollout.torch_engine import TorchEngine
from tests.kit.job import PLUGINS
from tests.kit.media import PROFILE

GROUP_SIZE = 2
MAX_NEW_TOKENS = 12
TRAINING = Stream(
    prompts="prompts", rollouts="rollouts", num_samples=GROUP_SIZE, temperature=1.0, is_partial=True
)


class WatchedEngine(TorchEngine):
    """The embedded engine; tells that it was aborted."""

    def __init__(self, model_dir: Path) -> None:
        super().__init__(model_dir)
        self.was_aborted = threading.Event()

    def abort(self) -> None:
        """Abort, and say so."""
        super().abort()
        self.was_aborted.set()

    def at_step(self, number: int, act: Callable[[], None]) -> None:
        """Call `act` after that many forward passes from now, and hold generation until somebody has aborted it."""
        self.was_aborted.clear()
        steps = 0

        def count(*_: object) -> None:
            nonlocal steps
            steps += 1
            if steps == number:
                hook.remove()
                act()
                assert self.was_aborted.wait(20.0)

        hook = self._thinker.hf.lm_head.register_forward_hook(count)


class Run:
    """A queue, a control plane and as many rollout workers as a test asks for."""

    def __init__(
        self, stack: ExitStack, client: QueueClient, job_home: Path, directory: Path, partial: PartialConfig
    ) -> None:
        self._stack = stack
        self._directory = directory
        self.model_dir = job_home / "model"
        rollout = RolloutConfig(
            reward=RewardConfig(parts=[RewardPart(name="my_rewards:half")]),
            partial=partial,
            max_new_tokens=MAX_NEW_TOKENS,
        )
        self.config = RunConfig(group_size=GROUP_SIZE, prompts_per_step=4, max_staleness=2, rollout=rollout)
        shape = RunShape(
            prompts_per_step=4,
            group_size=GROUP_SIZE,
            max_staleness=2,
            reward_labels=rollout.reward.labels,
            max_continuations=partial.max_continuations,
            num_samples=GROUP_SIZE + 2,
        )
        media = MediaTable(load_modalities(PROFILE, MediaLimits()), "arrays").columns()
        self.queue = client
        self.uri = client.uri
        for spec in table_specs(shape, media, routing_columns()).values():
            self.queue.create_table(spec)
        self.queue.announce("rollouts", 0)
        self.hub = stack.enter_context(ControlHub())
        self.actor = stack.enter_context(ControlMember(self.hub.uri, "actor", 0))
        self.actor.announce_policy_version(0, "/none")

    def worker(self, index: int = 0) -> RolloutWorker:
        """Return a rollout worker of its own, at the weights that the run began with."""
        stack = self._stack
        queue = stack.enter_context(QueueClient(self.uri, identity=f"rollout-{index}"))
        control = stack.enter_context(ControlMember(self.hub.uri, "rollout", index))
        service = Service(
            role="rollout",
            index=index,
            config=self.config,
            run_dir=self._directory,
            model_dir=self.model_dir,
            queue=queue,
            control=control,
        )
        worker = RolloutWorker(service, WatchedEngine(self.model_dir), Scorer(self.config.rollout.reward))
        stack.callback(worker.close)
        return worker

    def publish(self, version: int) -> None:
        """Announce other weights."""
        thinker = load_thinker(self.model_dir)
        with torch.no_grad():
            for view in checkpoint_views(thinker).values():
                view.mul_(1 + version / 10)
        path = write_snapshot(self._directory / f"{version:06d}", checkpoint_views(thinker), version)
        self.actor.announce_policy_version(version, path)
        self.queue.announce("rollouts", version)

    def put_prompts(self, count: int = 1) -> list[str]:
        """Put prompts of words alone and return their uids."""
        uids = [f"0-{index}" for index in range(count)]
        prompts = [
            Prompt(
                index=index,
                place=f"rows.jsonl:{index + 1}",
                modality="text",
                messages="[]",
                prompt_text="red?",
                token_ids=np.array([1, 2, 3 + index], np.int32),
                reference_answer="red",
                media_paths=(),
                media=(),
            )
            for index in range(count)
        ]
        rows = prompts_to_arrow(prompts)
        rows = rows.append_column("uid", pa.array(uids)).append_column("group_id", pa.array(uids))
        rows = rows.append_column("epoch", pa.array([0] * count, pa.int32()))
        self.queue.put("prompts", rows, writer="preprocess")
        return uids

    def partial_rows(self) -> list[dict]:
        return self.queue.read(PARTIAL_TABLE).to_pylist()

    def rollouts(self) -> list[dict]:
        return self.queue.read("rollouts").to_pylist()

    def taker(self) -> dict:
        return self.queue.stats("prompts")["consumers"]["rollout"]


@pytest.fixture
def make_run(
    client: QueueClient, job_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Run]]:
    """Factory of runs by the options of `rollout.partial`."""
    monkeypatch.syspath_prepend(str(PLUGINS))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PLUGINS), os.environ.get("PYTHONPATH", "")]))
    with ExitStack() as stack:
        yield lambda **options: Run(stack, client, job_home, tmp_path, PartialConfig(enabled=True, **options))


def interrupt(run: Run, worker: RolloutWorker, version: int, step: int, stream: Stream = TRAINING) -> None:
    """Serve, with other weights announced after so many forward passes."""
    worker._engine.at_step(step, lambda: run.publish(version))
    assert worker.serve(stream, 4, deadline_s=5.0)


def test_interrupted_rollouts_are_gone_on_with_by_another_worker(make_run):
    """Old tokens are kept with their logprobs, experts and versions; the prompt waits in between, as does its row."""
    run = make_run()
    (uid,) = run.put_prompts()
    interrupt(run, run.worker(0), 1, 5)
    begun = run.partial_rows()
    assert [(row["group_id"], row["sample_index"], row["num_continuations"]) for row in begun] == [
        (uid, 0, 1),
        (uid, 1, 1),
    ]
    assert {tuple(row["token_policy_versions"]) for row in begun} == {(0,) * 5}
    assert run.rollouts() == []
    assert (run.taker()["ready"], run.taker()["leased"]) == (1, 0)

    second = run.worker(1)
    assert second.weights.adopt_newest()
    assert second.serve(TRAINING, 4, deadline_s=5.0)
    rows = run.rollouts()
    assert [row["uid"] for row in rows] == [f"{uid}/0", f"{uid}/1"]
    for row, old in zip(rows, begun, strict=True):
        assert row["completion_token_ids"][:5] == old["completion_token_ids"]
        assert row["rollout_logprobs"][:5] == old["rollout_logprobs"]
        assert row["token_policy_versions"] == [0] * 5 + [1] * (len(row["completion_token_ids"]) - 5)
        assert (row["policy_version_start"], row["policy_version_end"]) == (0, 1)
        assert row["rollout_worker"] == "rollout-1"
        assert row["routed_experts_shape"][0] == 3 + len(row["completion_token_ids"]) - 1
        assert row["routed_experts"][: len(old["routed_experts"])] == old["routed_experts"]
    assert run.partial_rows() == []
    assert (run.taker()["acked"], run.taker()["ready"]) == (1, 0)
    metrics = metrics_of(run)
    assert (metrics["partial/interrupted"], metrics["partial/continued"]) == (2, 2)
    assert metrics["partial/tokens_saved"] == 10


def metrics_of(run: Run) -> dict[str, float]:
    """Return what was counted, added up."""
    sums: dict[str, float] = {}
    for row in run.queue.read("metrics").to_pylist():
        if row["name"].startswith("partial/"):
            sums[row["name"]] = sums.get(row["name"], 0.0) + row["value"]
    return sums


def test_rollout_may_be_interrupted_again_and_again(make_run):
    """Each time the newest row stands for all; three policies are in the end in one row, and their masks differ."""
    run = make_run()
    run.put_prompts(2)
    worker = run.worker()
    interrupt(run, worker, 1, 4)
    assert worker.weights.adopt_newest()
    interrupt(run, worker, 2, 3)
    assert {
        (row["num_continuations"], tuple(row["token_policy_versions"])) for row in run.partial_rows()
    } == {(2, (0, 0, 0, 0, 1, 1))}
    assert worker.weights.adopt_newest()
    assert worker.serve(TRAINING, 4, deadline_s=5.0)
    rows = run.queue.read("rollouts")
    assert rows.num_rows == 2 * GROUP_SIZE
    for versions, mask in zip(rows["token_policy_versions"].to_pylist(), left_out(rows), strict=True):
        assert versions == sorted(versions)
        assert set(versions) == {0, 1, 2}
        assert mask.tolist() == [version < 2 for version in versions]
    assert run.partial_rows() == []


def test_worker_that_dies_loses_what_it_did_last_and_no_more(make_run):
    """Its prompts come again with the rows of before; so do those of one that died before it gave them back."""
    run = make_run()
    run.put_prompts()
    first = run.worker(0)
    interrupt(run, first, 1, 5)
    before = run.partial_rows()
    lease = run.queue.take("prompts", "rollout", max_rows=4, policy_version=1, deadline_s=5.0)
    begun = first._partial.read(lease.table, 1)
    groups = {
        "0-0": [
            replace(
                each,
                token_ids=each.token_ids[:4],
                logprobs=each.logprobs[:4],
                token_policy_versions=each.token_policy_versions[:4],
                routed_experts=each.routed_experts[:6],
            )
            for each in begun["0-0"].completions
        ]
    }
    first._partial.keep(groups, begun, ["0-0"])
    assert len(run.partial_rows()) == 4
    run.queue.void("test")
    second = run.worker(1)
    assert second.weights.adopt_newest()
    assert second.serve(TRAINING, 4, deadline_s=5.0)
    for row, old in zip(run.rollouts(), before, strict=True):
        assert row["token_policy_versions"][:5] == [0] * 4 + [1]
        assert row["completion_token_ids"][:4] == old["completion_token_ids"][:4]
    assert run.partial_rows() == []


@pytest.mark.parametrize("on_limit", ["anew", "drop"])
@pytest.mark.parametrize("limits", [{"max_age_versions": 0}, {"max_continuations": 1}])
def test_what_is_too_old_is_made_anew_or_dropped(make_run, on_limit, limits):
    """By age in versions or by the number of interruptions; either is counted."""
    run = make_run(on_limit=on_limit, **limits)
    run.put_prompts()
    worker = run.worker()
    interrupt(run, worker, 1, 5)
    if "max_continuations" in limits:
        assert worker.weights.adopt_newest()
        interrupt(run, worker, 2, 3)
    assert run.partial_rows() == []
    assert metrics_of(run)["partial/dropped"] == GROUP_SIZE
    errors = run.queue.read("row_errors")["reason"].to_pylist()
    if on_limit == "drop":
        assert (run.taker()["skipped"], run.taker()["ready"]) == (1, 0)
        assert len(errors) == 1
        assert "to be gone on with, got 1" in errors[0] or "after 1 interruptions, got one more" in errors[0]
        return
    assert errors == []
    assert worker.weights.adopt_newest()
    assert worker.serve(TRAINING, 4, deadline_s=5.0)
    newest = run.hub.get("policy_version")["version"]
    assert {row["policy_version_start"] for row in run.rollouts()} == {newest}


def test_what_has_grown_too_old_in_the_queue_is_made_anew(make_run):
    """Two more versions came while it waited."""
    run = make_run(max_age_versions=1)
    run.put_prompts()
    worker = run.worker()
    interrupt(run, worker, 1, 5)
    assert len(run.partial_rows()) == GROUP_SIZE
    run.publish(2)
    worker._service.control.wait_for(lambda: worker.weights.newest().version == 2, 5.0)
    assert worker.weights.adopt_newest()
    assert worker.serve(TRAINING, 4, deadline_s=5.0)
    assert {row["policy_version_start"] for row in run.rollouts()} == {2}
    assert run.partial_rows() == []
    assert metrics_of(run)["partial/dropped"] == GROUP_SIZE


def test_stragglers_go_back_to_the_queue(make_run):
    """A call that takes too long ends; what is gone on with under the same weights is the same in the end."""
    run = make_run(straggler_timeout_s=0.01)
    run.put_prompts(1)
    worker = run.worker()
    worker._engine.at_step(6, lambda: None)
    assert worker.serve(TRAINING, 4, deadline_s=5.0)
    assert {len(row["completion_token_ids"]) for row in run.partial_rows()} <= set(range(1, 7))
    assert len(run.partial_rows()) == GROUP_SIZE
    run.config.rollout.partial.straggler_timeout_s = 0.0
    assert worker.serve(TRAINING, 4, deadline_s=5.0)
    expected = worker._engine.generate([replace_begun(worker, run)])
    assert [row["completion_token_ids"] for row in run.rollouts()] == [
        each.token_ids.tolist() for each in expected
    ]
    assert {row["policy_version_end"] for row in run.rollouts()} == {0}


def replace_begun(worker: RolloutWorker, run: Run):
    """Return the request of the first prompt as if nobody had begun with it."""
    prompt = run.queue.read("rollouts").slice(0, 1)
    prompt = prompt.set_column(prompt.column_names.index("uid"), "uid", prompt["group_id"])
    (request,) = worker._requests(prompt, TRAINING, {})
    return request


def test_service_that_has_to_leave_gives_back_what_it_has(make_run):
    """It does not wait for the end of long answers."""
    run = make_run()
    run.put_prompts()
    worker = run.worker()
    worker._engine.at_step(5, lambda: run.hub.set("phase/rollout", "drain"))
    assert worker.serve(TRAINING, 4, deadline_s=5.0)
    assert {len(row["completion_token_ids"]) for row in run.partial_rows()} == {5}
    assert run.taker()["ready"] == 1


def test_group_that_is_asked_for_more_than_it_needs_stops_early(make_run):
    """Of four samples the two that end first are the group, numbered from 0; the others are counted."""
    run = make_run()
    uids = run.put_prompts(2)
    worker = run.worker()
    stream = replace(TRAINING, oversample=2)
    interrupt(run, worker, 1, 4, stream)
    assert len(run.partial_rows()) == 2 * (GROUP_SIZE + 2)
    assert worker.weights.adopt_newest()
    assert worker.serve(stream, 4, deadline_s=5.0)
    rows = run.queue.read("rollouts")
    assert rows["uid"].to_pylist() == [f"{uid}/{number}" for uid in uids for number in range(GROUP_SIZE)]
    assert set(rows["finish_reason"].to_pylist()) <= {"stop", "length"}
    assert all(routes is not None for routes in routing_from_arrow(rows))
    assert metrics_of(run)["partial/surplus"] == 2 * 2
    assert run.partial_rows() == []
