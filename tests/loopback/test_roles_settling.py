"""What roles keep in the queue, and what they do when a lease is lost: over a real queue."""

from __future__ import annotations

import pyarrow as pa
import pytest

from flight.client import Lease, QueueClient
from flight.schema import Column, ConsumerSpec, StalenessSpec, TableSpec
from relax.errors import ServiceError
from relax.records import RunShape, table_specs
from relax.roles.position import Position, PositionBook
from relax.roles.settling import settle

SHAPE = RunShape(prompts_per_step=2, group_size=2, max_staleness=1)


@pytest.fixture
def rollouts(client: QueueClient) -> QueueClient:
    """A table like `rollouts` in small: four rows in two groups, and more of another version."""
    version = Column(name="policy_version_start", type=pa.int64(), meaning="weights", writer="rollout")
    client.create_table(
        TableSpec(
            name="rollouts",
            columns=(version,),
            consumers=(ConsumerSpec(name="actor", columns=("policy_version_start",), sampler="groups"),),
            group_size=2,
            staleness=StalenessSpec(max_staleness=1, rows_per_version=4, consumer="actor", policy="pace"),
        )
    )
    put(client, "ab", version=0)
    return client


def put(client: QueueClient, groups: str, version: int) -> None:
    uids = [f"{group}/{index}" for group in groups for index in range(2)]
    table = {"uid": uids, "group_id": [uid[0] for uid in uids], "policy_version_start": [version] * len(uids)}
    client.put("rollouts", pa.table(table), writer="rollout")


def take(client: QueueClient, num_rows: int = 4) -> Lease:
    return client.take(
        "rollouts", "actor", max_rows=num_rows, min_rows=num_rows, policy_version=0, lease_s=600.0
    )


def test_rows_of_a_step_are_acked_though_their_lease_was_lost(rollouts):
    """They come again to the actor, which knows them; others that wait are left alone."""
    lease = take(rollouts)
    put(rollouts, "cd", version=0)
    assert rollouts.void("test") == 4
    settle(rollouts, [lease.lease_id], lease.table["uid"].to_pylist(), step=1)
    stats = rollouts.stats("rollouts")["consumers"]["actor"]
    assert (stats["acked"], stats["ready"], stats["leased"]) == (4, 4, 0)


def test_step_whose_rows_went_to_another_fails(rollouts):
    """Nothing is acked in their place, and what came is given back."""
    lease = take(rollouts)
    uids = lease.table["uid"].to_pylist()
    assert rollouts.void("test") == 4
    rollouts.nack("rollouts", "actor", lease_id=take(rollouts, 2).lease_id, reason="skipped", requeue=False)
    put(rollouts, "c", version=0)
    with pytest.raises(
        ServiceError, match=r"^actor: the 4 rows of step 1 whose lease was lost must come again"
    ):
        settle(rollouts, [lease.lease_id], uids, step=1)
    stats = rollouts.stats("rollouts")["consumers"]["actor"]
    assert (stats["acked"], stats["ready"], stats["leased"]) == (0, 4, 0)


MEANS = {"toy": {"rows": [0, 7], "means": [0.25, 1.0]}}


def test_position_is_found_again_by_the_next_process(client):
    """The last one that was written; each service has its own, and there is one row for each."""
    client.create_table(table_specs(SHAPE, (), ())["positions"])
    book = PositionBook(client, "preprocess-0")
    assert book.read() == Position()
    for place in (8, 16):
        book.write(Position(order={"next": place, "order": "a"}, curriculum=MEANS, evaluation=1))
    PositionBook(client, "preprocess-1").write(Position(order={"next": 9, "order": "a"}))
    after = PositionBook(client, "preprocess-0")
    assert after.read() == Position(order={"next": 16, "order": "a"}, curriculum=MEANS, evaluation=1)
    after.write(Position(evaluation=3))
    assert PositionBook(client, "preprocess-0").read() == Position(evaluation=3)
    assert client.stats("positions")["rows"] == 2
