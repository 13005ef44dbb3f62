"""Many processes, some of which are killed: what was acked is what was put, once for each consumer."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack, suppress

import pyarrow as pa
import pytest

from flight.client import QueueClient
from flight.schema import Column, ConsumerSpec, TableSpec
from tests.kit.server import REPOSITORY, queue_server

NUM_PRODUCERS = 16
ROWS_EACH = 32
MEMBERS = ("train", "train", "train", "record", "record", "record", "watch", "watch")
NUM_KILLS = 6
NUM_ROWS = NUM_PRODUCERS * ROWS_EACH


def start(*arguments: str) -> subprocess.Popen[bytes]:
    """Start a worker."""
    return subprocess.Popen([sys.executable, "-m", "tests.kit.queue_worker", *arguments], cwd=REPOSITORY)


@pytest.mark.slow
def test_what_was_acked_is_what_was_put_although_processes_die(tmp_path):
    """16 producers, 8 consumers of three names, SIGKILL of both at work: nothing is lost, nothing comes twice."""
    chance = random.Random(1)
    with ExitStack() as stack:
        uri, _ = stack.enter_context(queue_server())
        client = stack.enter_context(QueueClient(uri, identity="test", deadline_s=20.0))
        column = Column(name="x", type=pa.string(), meaning="a value")
        consumers = tuple(ConsumerSpec(name=name, columns=("x",)) for name in dict.fromkeys(MEMBERS))
        client.create_table(
            TableSpec(name="rows", columns=(column,), consumers=consumers, capacity_rows=96, max_attempts=100)
        )
        client.seal("rows", NUM_ROWS)
        commands = [
            ("consume", uri, "rows", consumer, str(tmp_path / f"{consumer}-{index}"))
            for index, consumer in enumerate(MEMBERS)
        ] + [("produce", uri, "rows", str(index), str(ROWS_EACH)) for index in range(NUM_PRODUCERS)]
        running = {command: start(*command) for command in commands}
        stack.callback(lambda: [process.kill() for process in running.values()])
        num_killed = Counter()
        while any(process.poll() is None for process in running.values()):
            done = client.stats("rows")["retired"] / NUM_ROWS
            verb = ("produce", "consume")[num_killed.total() % 2]
            alive = [each for each in commands if each[0] == verb and running[each].poll() is None]
            if alive and num_killed.total() < NUM_KILLS and done >= (num_killed.total() + 1) * 0.1:
                victim = chance.choice(alive)
                running[victim].kill()
                running[victim].wait(10.0)
                num_killed[verb] += 1
                running[victim] = start(*victim)
            with suppress(subprocess.TimeoutExpired):
                running[commands[0]].wait(0.02)
        assert {process.returncode for process in running.values()} == {0}
        stats = client.stats("rows")
    everything = {f"p{index}-{number}" for index in range(NUM_PRODUCERS) for number in range(ROWS_EACH)}
    assert num_killed == {"produce": NUM_KILLS // 2, "consume": NUM_KILLS // 2}
    assert (stats["put"], stats["retired"], stats["rows"], stats["bytes"]) == (NUM_ROWS, NUM_ROWS, 0, 0)
    for consumer in dict.fromkeys(MEMBERS):
        lines = [
            line.split() for path in tmp_path.glob(f"{consumer}-*") for line in path.read_text().splitlines()
        ]
        acked = Counter(uid for verb, *uids in lines if verb == "acked" for uid in uids)
        taken = {uid for verb, *uids in lines if verb == "taken" for uid in uids}
        assert stats["consumers"][consumer]["acked"] == NUM_ROWS
        assert stats["consumers"][consumer]["dead"] == 0
        assert set(acked.values()) == {1}, "finished twice"
        assert taken == everything, "a row came that was not put, or one did not come"
        # What a killed member took may have been acked without a note of it; the server's count has it.
        unnoted = everything - set(acked)
        assert len(unnoted) <= num_killed["consume"] * 4
