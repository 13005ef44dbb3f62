"""Table `partial_rollouts`: completions on which somebody is to go on. It holds no rows and opens no socket.

    rollout --interrupted: put--> partial_rollouts --read by group_id--> rollout, any of them
       \\--give back--> prompts (the prompt waits again, in its old place) --take--/

A row is one completion, finished or not, of a prompt whose group is not whole. It leaves when a later row of the same
completion is there, or the prompt is answered or given up.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from flight.schema import Column, ConsumerSpec, TableSpec

PARTIAL_TABLE = "partial_rollouts"
PARTIAL_GRACE_S = 3600.0
"""Seconds after which a row goes whose prompt nobody has taken up: it is then answered from the beginning."""
GENERATIONS = 4
"""Rows of each completion that there is room for: old ones leave after the new ones have come."""

_COLUMNS = (
    ("sample_index", pa.int32(), "number within the group, from 0", "", ""),
    ("num_continuations", pa.int32(), "interruptions so far, this one included", "", ""),
    ("completion_token_ids", pa.list_(pa.int32()), "tokens so far", "", "[num_completion_tokens]"),
    ("completion_text", pa.string(), "they as text; of finished ones", "", ""),
    ("rollout_logprobs", pa.list_(pa.float32()), "as in rollouts", "nats", "[num_completion_tokens]"),
    (
        "token_policy_versions",
        pa.list_(pa.int32()),
        "weights that sampled each token",
        "policy versions",
        "[num_completion_tokens]",
    ),
    (
        "finish_reason",
        pa.string(),
        "abort: to be gone on with; stop or length: it waits for its group",
        "",
        "",
    ),
    ("rollout_worker", pa.string(), "service that put the row", "", ""),
)
PARTIAL_COLUMNS = tuple(
    Column(name=name, type=kind, meaning=meaning, unit=unit, shape=shape, writer="rollout")
    for name, kind, meaning, unit, shape in _COLUMNS
)


def partial_table(max_completions: int, capacity_bytes: int, routing_columns: Sequence[Column]) -> TableSpec:
    """Return the table; `max_completions` is how many may be unfinished at once."""
    return TableSpec(
        name=PARTIAL_TABLE,
        columns=(*PARTIAL_COLUMNS, *routing_columns),
        consumers=(ConsumerSpec(name="rollout", columns=(), sampler="keyed"),),
        capacity_rows=GENERATIONS * max_completions,
        capacity_bytes=capacity_bytes,
        max_age_s=PARTIAL_GRACE_S,
    )
