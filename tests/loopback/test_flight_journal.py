"""Servers with a journal that are killed at work, fill their disk, and move: real processes, real signals."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from contextlib import ExitStack, suppress

import pyarrow as pa
import pytest

from flight.client import QueueClient
from flight.errors import InvalidRequestError
from flight.journal.fsck import fsck
from flight.schema import Column, ConsumerSpec, TableSpec
from tests.kit.queues import prompts_spec, rollouts_spec
from tests.kit.server import REPOSITORY, queue_server

POLICIES = ("none", "interval", "batch")
ROWS_EACH = 240


def table(fsync: str) -> TableSpec:
    """Return a table named after its policy."""
    column = Column(name="x", type=pa.string(), meaning="a value")
    reader = ConsumerSpec(name="reader", columns=("x",))
    return TableSpec(name=fsync, columns=(column,), consumers=(reader,), max_attempts=100, fsync=fsync)


def lines(path) -> list[str]:
    """Return the uids that a worker noted."""
    return path.read_text().split() if path.exists() else []


@pytest.mark.slow
def test_nothing_acknowledged_is_lost_when_the_server_is_killed_at_work(tmp_path):
    """Two producers and two consumers a policy, five SIGKILLs of the server in between: each row is acked once."""
    journal = ("--journal", str(tmp_path / "journal"))
    config = tmp_path / "tables.yaml"
    config.write_text(
        "server: {journal: {directory: %s, checkpoint_decisions: 60, segment_bytes: 32 KiB}}\n"
        "tables: {other: {columns: {x: {type: string, meaning: m}}, consumers: {reader: {columns: [x]}}}}\n"
        % (tmp_path / "journal")
    )
    with ExitStack() as stack:
        server = stack.enter_context(ExitStack())
        uri, process = server.enter_context(queue_server(*journal, "--config", str(config)))
        port = uri.rpartition(":")[2]
        with QueueClient(uri, identity="test", deadline_s=20.0) as client:
            for policy in POLICIES:
                client.create_table(table(policy))
                client.seal(policy, 2 * ROWS_EACH)
        workers = []
        for policy in POLICIES:
            for verb in ("produce", "consume"):
                for number in range(2):
                    name = f"{policy}-{verb}-{number}"
                    command = [verb, uri, policy, name, str(ROWS_EACH), str(tmp_path / name)]
                    worker = subprocess.Popen(
                        [sys.executable, "-m", "tests.kit.journal_worker", *command], cwd=REPOSITORY
                    )
                    stack.callback(worker.kill)
                    workers.append(worker)
        num_kills = 0
        while any(worker.poll() is None for worker in workers):
            done = sum(
                len(lines(tmp_path / f"{policy}-produce-{k}")) for policy in POLICIES for k in range(2)
            )
            if num_kills < 5 and done >= (num_kills + 1) * ROWS_EACH:
                process.kill()
                process.wait()
                num_kills += 1
                server.close()
                uri, process = server.enter_context(
                    queue_server("--port", port, *journal, "--config", str(config))
                )
            with suppress(subprocess.TimeoutExpired):
                workers[0].wait(0.02)
        assert [worker.returncode for worker in workers] == [0] * len(workers)
        with QueueClient(uri, identity="test", deadline_s=20.0) as client:
            stats, done = client.stats(), client.journal()
        assert num_kills == 5
        assert done["recovered_decisions"] < 2000
    for policy in POLICIES:
        expected = {f"{policy}-produce-{k}-{number}" for k in range(2) for number in range(ROWS_EACH)}
        put = Counter(uid for k in range(2) for uid in lines(tmp_path / f"{policy}-produce-{k}"))
        acked = Counter(uid for k in range(2) for uid in lines(tmp_path / f"{policy}-consume-{k}"))
        assert set(put) == expected
        assert set(acked) == expected, "an acknowledged row was lost"
        assert set(acked.values()) == {1}, "an acknowledged ack was lost"
        reader = stats[policy]["consumers"]["reader"]
        assert (stats[policy]["put"], stats[policy]["rows"]) == (len(expected), 0)
        assert (reader["acked"], reader["dead"]) == (len(expected), 0)
    report = fsck(tmp_path / "journal")
    assert (report.is_sound, report.damaged) == (True, [])


def test_killed_server_remembers_tables_versions_bounds_and_acks(tmp_path):
    """What a run ties together is there again; the same tables may be declared, a lease is void, an ack stays."""
    journal = ("--journal", str(tmp_path / "journal"))
    with queue_server(*journal) as (uri, process), QueueClient(uri, identity="t", deadline_s=10.0) as client:
        client.create_table(prompts_spec())
        client.create_table(rollouts_spec(max_staleness=2))
        client.put("prompts", pa.table({"uid": ["a", "b"], "text": ["x", "y"]}))
        first = client.take("prompts", "rollout", max_rows=1)
        rows = {
            "uid": ["a/0", "a/1"],
            "group_id": ["a", "a"],
            "policy_version_start": pa.array([0, 0], pa.int64()),
            "completion_token_ids": pa.array([[1], [2, 3]], pa.list_(pa.int32())),
        }
        client.put("rollouts", pa.table(rows), writer="rollout")
        assert client.ack("prompts", "rollout", lease_id=first.lease_id) == 1
        client.take("prompts", "rollout", max_rows=1)
        client.announce("rollouts", 2)
        client.set_max_staleness("rollouts", 3)
        process.kill()
        process.wait()
    with queue_server(*journal) as (uri, process), QueueClient(uri, identity="t", deadline_s=10.0) as client:
        client.create_table(prompts_spec())
        stats = client.stats("rollouts")["staleness"]
        assert (stats["policy_version"], stats["max_staleness"], stats["waiting"]) == (2, 3, 2)
        assert stats["in_flight"] == 0
        assert client.ack("prompts", "rollout", lease_id=first.lease_id) == 1
        again = client.take("prompts", "rollout", max_rows=2, policy_version=2)
        assert again.table.to_pydict()["uid"] == ["b"]
        assert again.table.to_pydict()["attempt"] == [2]
        assert client.put("rollouts", pa.table(rows), writer="rollout").num_duplicates == 2
        assert client.read("rollouts").column("completion_token_ids").to_pylist() == [[1], [2, 3]]
        (tmp_path / "file").write_bytes(b"".join(client.snapshot()))
    cli = [sys.executable, "-m", "flight"]
    moved = str(tmp_path / "moved")
    for command in (["restore", str(tmp_path / "file"), moved], ["fsck", moved]):
        answer = subprocess.run([*cli, *command], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
        assert answer.returncode == 0, answer.stderr
    with (
        queue_server("--journal", moved) as (uri, _),
        QueueClient(uri, identity="t", deadline_s=10.0) as client,
    ):
        assert client.stats("rollouts")["staleness"]["waiting"] == 2
        assert client.take("prompts", "rollout", max_rows=2, policy_version=2).table.to_pydict()[
            "attempt"
        ] == [3]


@pytest.mark.parametrize("is_durable", [False, True])
def test_server_killed_between_prepare_and_commit_goes_back_to_what_the_trainer_has(tmp_path, is_durable):
    """The trainer's own files decide: a whole one is committed and gone back to, else the one before is."""
    journal = ("--journal", str(tmp_path / "journal"))
    files = tmp_path / "trainer"
    files.mkdir()

    def train(client: QueueClient) -> list[str]:
        lease = client.take("batch", "reader", max_rows=2, deadline_s=5.0)
        client.ack("batch", "reader", lease_id=lease.lease_id)
        return lease.table.column("uid").to_pylist()

    with queue_server(*journal) as (uri, process), QueueClient(uri, identity="t", deadline_s=10.0) as client:
        client.create_table(table("batch"))
        uids = [f"u{number}" for number in range(8)]
        client.put("batch", pa.table({"uid": uids, "x": uids}))
        assert train(client) == uids[:2]
        client.checkpoint_prepare("step 1")
        (files / "step 1").write_text("weights")
        client.checkpoint_commit("step 1")
        assert train(client) == uids[2:4]
        client.checkpoint_prepare("step 2")
        if is_durable:
            (files / "step 2").write_text("weights")
        train(client)
        process.kill()
        process.wait()
    with queue_server(*journal) as (uri, process), QueueClient(uri, identity="t", deadline_s=10.0) as client:
        assert [each["status"] for each in client.checkpoints()] == ["committed", "prepared"]
        for each in client.checkpoints():
            if (files / each["checkpoint_id"]).exists():
                client.checkpoint_commit(each["checkpoint_id"])
            else:
                assert client.checkpoint_release(each["checkpoint_id"])
        last = client.checkpoints()[-1]["checkpoint_id"]
        assert client.checkpoint_rewind(last) > 0
        process.kill()
        process.wait()
    left = uids[4:] if is_durable else uids[2:]
    with queue_server(*journal) as (uri, _), QueueClient(uri, identity="t", deadline_s=10.0) as client:
        assert [row for _ in range(len(left) // 2) for row in train(client)] == left
        assert client.stats("batch")["consumers"]["reader"]["acked"] == len(uids)
        kept = [each["checkpoint_id"] for each in client.checkpoints()]
        assert kept == (["step 1", "step 2"] if is_durable else ["step 1"])


def test_server_without_a_journal_keeps_no_checkpoints():
    """It says what is missing."""
    with queue_server() as (uri, _), QueueClient(uri, identity="t", deadline_s=10.0) as client:
        assert client.journal() is None
        with pytest.raises(InvalidRequestError, match="start it with --journal"):
            client.checkpoint_prepare("one")
