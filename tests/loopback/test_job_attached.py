"""A run on a queue server that was there before it, with an encoder of the user's, two versions off policy.

Its table of media holds files, which are recorded, and its routes have a column a layer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from flight.client import QueueClient
from relax.errors import ConfigError
from relax.run.attachment import check_server
from tests.kit.job import ENTRY, REPOSITORY, Job, half_written, start_job
from tests.kit.queues import prompts_spec
from tests.kit.server import queue_server

MAX_STALENESS = 2
TABLES = [
    "eval_prompts",
    "eval_rollouts",
    "media",
    "metrics",
    "positions",
    "prompts",
    "rollouts",
    "row_errors",
]


@dataclass(frozen=True)
class AttachedRun:
    """An attached run, and what others saw of its server meanwhile and afterwards."""

    job: Job
    exit_code: int
    listing: str
    second_job: subprocess.CompletedProcess[str]
    tables_afterwards: list[str]


def depth_manifest(home: Path, job_home: Path) -> Path:
    """Write depth maps, and a manifest with a row for each beside pictures."""
    toy = (job_home / "toy" / "train.jsonl").read_text().replace('"train/', f'"{job_home}/toy/train/')
    lines = [each for each in toy.splitlines() if "image" in each][:4]
    for number in range(6):
        millimetres = np.linspace(300, 4000 + 900 * number, 48 * 48).reshape(48, 48).astype(np.uint16)
        Image.fromarray(millimetres).save(home / f"{number}.png")
        message = {"role": "user", "content": "<depth>What colour is the shape?"}
        lines.append(json.dumps({"messages": [message], "depths": [f"{number}.png"], "answer": "red"}))
    manifest = home / "depth.jsonl"
    manifest.write_text("".join(f"{each}\n" for each in lines))
    return manifest


@pytest.fixture(scope="module")
def attached_run(job_home, tmp_path_factory) -> AttachedRun:
    home = tmp_path_factory.mktemp("attached")
    manifest = depth_manifest(home, job_home)
    with queue_server() as (uri, server):
        words = (f"queue.uri={uri}", f"data.manifest={manifest}", f"model.path={job_home}/model")
        extra = (
            "modalities.extra=[depth_modality.depth:Depth]",
            f"max_staleness={MAX_STALENESS}",
            "num_steps=100000",
            *("media.keep=bytes", "media.record=true", "rollout.layers_per_column=1"),
        )
        with start_job(home, *words, *extra) as job:
            job.until_step(5)
            listing = _run([sys.executable, "-m", "flight", "ls", "--uri", uri], REPOSITORY, None).stdout
            program, environment = ENTRY
            second_job = _run([*program, *words, "name=second"], home, environment)
            job.interrupt()
            exit_code = job.wait()
        assert server.poll() is None
        with QueueClient(uri, identity="test") as client:
            tables = client.list_tables()
        return AttachedRun(job, exit_code, listing, second_job, tables)


def _run(command: list[str], cwd: Path, env: dict[str, str] | None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=env or dict(os.environ), capture_output=True, text=True, timeout=30
    )


@pytest.mark.slow
def test_attached_run_can_be_watched_and_leaves_the_server_clean(attached_run):
    """Its tables are listed while it runs and dropped when it is done; the server goes on."""
    assert attached_run.exit_code == 0, attached_run.job.describe()
    words = [line.split()[0] for line in attached_run.listing.splitlines() if line.strip()]
    assert set(words) >= set(TABLES), attached_run.listing
    assert attached_run.tables_afterwards == []
    assert half_written(attached_run.job.run_dir) == []


@pytest.mark.slow
def test_second_run_on_the_same_server_is_refused(attached_run):
    """At once, with the tables and the way out; nothing of the first run is touched."""
    refused = attached_run.second_job
    assert refused.returncode == 2, refused
    assert f"must hold no table of another run, got {', '.join(TABLES)};" in refused.stderr
    assert "overwrite=true" in refused.stderr
    assert not (attached_run.job.run_dir.parent / "second").exists()


@pytest.mark.slow
def test_run_trains_on_a_modality_of_the_user(attached_run):
    """Depth maps go through every stage as pictures do."""
    rollouts = pd.read_parquet(attached_run.job.run_dir / "rollouts")
    assert set(rollouts["modality"]) == {"image", "depth"}
    assert not (attached_run.job.run_dir / "row_errors.parquet").exists()


@pytest.mark.slow
def test_run_records_each_file_once_and_names_it_in_every_rollout(attached_run):
    """Its ids name the files of the manifest, bit for bit; the routes of all layers are in one column."""
    rollouts = pd.read_parquet(attached_run.job.run_dir / "rollouts")
    media = pd.read_parquet(attached_run.job.run_dir / "media").set_index("media_id")
    assert media.index.is_unique
    by_path = {
        paths[0]: ids[0] for paths, ids in zip(rollouts["media_paths"], rollouts["media_ids"], strict=True)
    }
    assert len(set(by_path.values())) == len(by_path) == 10
    home = attached_run.job.run_dir.parents[1]
    for path, media_id in by_path.items():
        assert media.loc[media_id, "data"] == (home / path).read_bytes()
    assert {len(ids) for ids in rollouts["media_ids"]} == {1}
    assert not [
        name
        for name in rollouts.columns
        if name.startswith("routed_experts_") and name != "routed_experts_shape"
    ]
    assert rollouts["routed_experts"].notna().all()


@pytest.mark.slow
def test_run_off_policy_keeps_within_the_bound(attached_run):
    """No row is older than K versions, ages are what the versions say, and work has overlapped."""
    rollouts = pd.read_parquet(attached_run.job.run_dir / "rollouts")
    assert rollouts["staleness"].between(0, MAX_STALENESS).all()
    ages = rollouts["trained_policy_version"] - rollouts["policy_version_start"]
    assert (rollouts["staleness"] == ages).all()
    assert (rollouts["policy_version_end"] >= rollouts["policy_version_start"]).all()
    assert rollouts["staleness"].max() > 0
    assert rollouts["uid"].is_unique


def test_tables_that_a_failed_run_left_are_dropped_on_demand():
    """Only tables of the run's own names count, and only overwrite=true drops them."""
    with queue_server() as (uri, _), QueueClient(uri, identity="test") as client:
        client.create_table(prompts_spec(tickets=None))
        client.create_table(prompts_spec(name="mine", tickets=None))
        with pytest.raises(
            ConfigError, match=r"^queue\.uri: grpc://\S+ must hold no table of another run, got prompts;"
        ):
            check_server(uri, TABLES, overwrite=False)
        check_server(uri, ["others"], overwrite=False)
        assert client.list_tables() == ["mine", "prompts"]
        check_server(uri, TABLES, overwrite=True)
        assert client.list_tables() == ["mine"]


def test_server_that_does_not_answer_is_a_wrong_configuration():
    """The key and the address, instead of a traceback."""
    with pytest.raises(
        ConfigError, match=r"^queue\.uri: list_tables: a server must answer at grpc://127\.0\.0\.1:1"
    ):
        check_server("grpc://127.0.0.1:1", TABLES, overwrite=False)
