"""Held-out prompts, answered by exactly the weights that their round asks for.

    take -> the version that the prompts name -> its snapshot -> generate -> put, each row with that version

Who serves them adopts other weights for it, older ones as a rule, and takes the newest again before it goes on with
training prompts. Weights that are gone cost the prompts: they are refused, and the round says what it lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flight.client import Lease
from relax.records import EVALUATED_VERSION
from relax.rollout.engine import Completion

Stream = TypeVar("Stream", contravariant=True)
"""What a worker calls the kind of its work."""


class PinnedWorker(Protocol[Stream]):
    """A worker that can be held to a policy version; `relax.roles.rollout.RolloutWorker` is one."""

    def take(self, stream: Stream, max_prompts: int, *, deadline_s: float) -> Lease:
        """Take prompts; blocks up to `deadline_s` for the first."""

    def adopt_version(self, version: int) -> bool:
        """Adopt one published version; return whether it is there still."""

    def answer(self, stream: Stream, lease: Lease, *, policy_version: int | None = None) -> None:
        """Answer the prompts of a lease, every token by the weights of that version."""

    def refuse(self, stream: Stream, lease: Lease, reason: str) -> None:
        """Refuse all prompts of a lease."""


def serve_held_out(
    worker: PinnedWorker[Stream], stream: Stream, max_prompts: int, *, deadline_s: float
) -> bool:
    """Take held-out prompts and answer them; return whether there were any. Blocks up to `deadline_s` for the first."""
    lease = worker.take(stream, max_prompts, deadline_s=deadline_s)
    if lease.status != "rows":
        return False
    for version, part in by_version(lease):
        if worker.adopt_version(version):
            worker.answer(stream, part, policy_version=version)
        else:
            worker.refuse(
                stream, part, f"weights of policy version {version} must be there, got none any more"
            )
    return True


def by_version(lease: Lease) -> list[tuple[int, Lease]]:
    """Return a lease's rows for each version that they ask for, the oldest first."""
    asked = lease.table[EVALUATED_VERSION]
    versions = sorted(pc.unique(asked).to_pylist())
    return [(each, replace(lease, table=lease.table.filter(pc.equal(asked, each)))) for each in versions]


def check_version(group: Sequence[Completion], version: int | None) -> str:
    """Return why completions are not of the weights that were asked for, or ''; None asks for none."""
    if version is None:
        return ""
    for completion in group:
        others = np.setdiff1d(completion.token_policy_versions, [version])
        if len(others):
            return (
                f"completion {completion.sample_index}: all tokens must be of policy version {version}, "
                f"got {others.tolist()}"
            )
    return ""


def with_version(rows: pa.Table, version: int | None) -> pa.Table:
    """Return rows with the version that they answer for; those of a stream that asks for none as they are."""
    if version is None:
        return rows
    return rows.append_column(EVALUATED_VERSION, pa.array([version] * rows.num_rows, pa.int64()))
