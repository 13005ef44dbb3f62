"""Columns of other services on their way to the trainer, and how old the policy of the proximal logprobs may be."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from modalities.packing import pack_list, unpack_present
from relax.train.given import GivenScores

PER_TOKEN = ("ref_logprobs", "proximal_logprobs", "values", "raw_advantages")
VERSION = "proximal_policy_version"


def given_scores(rows: pa.Table, policy_version: int | None = None, max_proximal_lag: int = 0) -> GivenScores:
    """Return what other services have written of these rows.

    Args:
        rows: Of table `rollouts`.
        policy_version: Weights that the step begins with; None: proximal logprobs count whatever theirs were.
        max_proximal_lag: Versions that the oldest proximal logprobs may be behind; beyond, none count, so that the
            trainer computes all of them alike.
    """
    found = {name: unpack_present(rows[name]) for name in PER_TOKEN if name in rows.column_names}
    lag = proximal_lag(rows, policy_version)
    if lag is not None and lag > max_proximal_lag:
        del found["proximal_logprobs"]
    return GivenScores(**found)


def proximal_lag(rows: pa.Table, policy_version: int | None) -> int | None:
    """Return how many versions the oldest proximal logprobs are behind `policy_version`; None where there are none."""
    if VERSION not in rows.column_names or policy_version is None:
        return None
    return policy_version - pc.min(rows[VERSION]).as_py()


def packed(rows: list[np.ndarray]) -> pa.Array:
    """Return one float32 array for each row as a column."""
    return pack_list([[row] for row in rows], pa.float32())
