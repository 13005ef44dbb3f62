"""The two tables that a training run ties together, in miniature: groups of 2 rows, 4 rows a policy version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from flight.schema import Column, ConsumerSpec, StalenessPolicy, StalenessSpec, TableSpec, TicketSpec
from flight.state.ledger import Ledger
from flight.table import PutOutcome

GROUP = 2
BATCH = 4
MAX_ATTEMPTS = 3
TOKENS, TRAINED = 1, 2
"""Parts of a rollouts row: the rollout's and the actor's."""


def prompts_spec(**changes) -> TableSpec:
    """Prompts, each a permit for one group of rollouts."""
    values = {
        "name": "prompts",
        "columns": (Column(name="text", type=pa.string(), meaning="the question", writer="preprocess"),),
        "consumers": (
            ConsumerSpec(name="rollout", columns=("text",)),
            ConsumerSpec(name="actor", columns=("text",), sampler="keyed"),
        ),
        "tickets": TicketSpec(table="rollouts", rows_per_ticket=GROUP),
        "max_attempts": MAX_ATTEMPTS,
    }
    return TableSpec(**values | changes)


def rollouts_spec(max_staleness: int = 0, policy: StalenessPolicy = "pace", **changes) -> TableSpec:
    """Rollouts in groups, trained by the actor and then recorded."""
    values = {
        "name": "rollouts",
        "columns": (
            Column(
                name="policy_version_start",
                type=pa.int64(),
                meaning="weights that wrote it",
                writer="rollout",
            ),
            Column(
                name="completion_token_ids",
                type=pa.list_(pa.int32()),
                meaning="the answer",
                unit="tokens",
                shape="[num_tokens]",
                writer="rollout",
            ),
            Column(
                name="media", type=pa.binary(), meaning="a picture, if any", writer="rollout", nullable=True
            ),
            Column(name="advantage", type=pa.float32(), meaning="advantage", writer="actor"),
        ),
        "consumers": (
            ConsumerSpec(
                name="actor", columns=("policy_version_start", "completion_token_ids"), sampler="groups"
            ),
            ConsumerSpec(name="recorder", columns=("completion_token_ids", "advantage")),
        ),
        "group_size": GROUP,
        "staleness": StalenessSpec(
            max_staleness=max_staleness, rows_per_version=BATCH, consumer="actor", policy=policy
        ),
        "capacity_rows": 64,
        "max_attempts": MAX_ATTEMPTS,
    }
    return TableSpec(**values | changes)


def graded_spec(max_staleness: int = 0, policy: StalenessPolicy = "pace", **changes) -> TableSpec:
    """Rollouts with rewards and versions of tokens; groups whose rewards are all equal are skipped."""
    plain = rollouts_spec(max_staleness, policy)
    versions = Column(
        name="token_policy_versions",
        type=pa.list_(pa.int32()),
        meaning="weights that wrote each token",
        unit="policy versions",
        shape="[num_tokens]",
        writer="rollout",
        nullable=True,
    )
    reward = Column(
        name="reward", type=pa.float32(), meaning="how good it is", writer="rollout", nullable=True
    )
    actor, *others = plain.consumers
    grader = replace(actor, columns=(*actor.columns, "reward"), skip_equal="reward")
    values = {"columns": (*plain.columns, versions, reward), "consumers": (grader, *others)}
    return rollouts_spec(max_staleness, policy, **values | changes)


def make_ledger(
    max_staleness: int,
    policy: StalenessPolicy = "pace",
    max_attempts: int = MAX_ATTEMPTS,
    *,
    is_graded: bool = False,
) -> Ledger:
    """Return both tables as pure state."""
    ledger = Ledger()
    ledger.create(prompts_spec(max_attempts=max_attempts))
    make_rollouts = graded_spec if is_graded else rollouts_spec
    ledger.create(make_rollouts(max_staleness, policy, max_attempts=max_attempts))
    return ledger


def put_prompts(ledger: Ledger, uids: Sequence[str]) -> None:
    """Put prompts whose group is their uid."""
    ledger.put("prompts", uids, uids, 1, None)


def put_rollouts(
    ledger: Ledger,
    group_id: str,
    version: int,
    indices: Sequence[int] = range(GROUP),
    rewards: Sequence[float | None] | None = None,
) -> PutOutcome:
    """Put the rollout's part of rows of one group, with rewards if the table has them."""
    uids = [f"{group_id}/{index}" for index in indices]
    labels = None if rewards is None else {"reward": rewards}
    return ledger.put("rollouts", uids, [group_id] * len(uids), TOKENS, [version] * len(uids), labels)


def fill_rollouts(ledger: Ledger, uids: Sequence[str], group_ids: Sequence[str]) -> PutOutcome:
    """Put the actor's part of rows that are there."""
    return ledger.put("rollouts", uids, group_ids, TRAINED, None)
