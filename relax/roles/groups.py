"""Whole groups for a training batch, without those that teach nothing if the algorithm says so. It trains nothing.

As a rule the queue plans the step: it chooses the groups and shares them out evenly over the trainer's data parallel
ranks. With `algorithm.sampling.dynamic` groups of equal rewards are skipped as they come and others are taken in their
place, `max_refills` times at most; a batch that is short then is trained on as it is, and one without any group that
teaches is made of what came last, so that a solved task ends its steps instead of waiting for ever. Each data parallel
rank gets a group at least, one that teaches nothing if it has to be.

A skipped group does not count against the staleness bound, so that other prompts are admitted for it (an acked one
would, until the next policy version, and an on-policy run would wait for itself). Its rows get the actor's columns all
the same, with `optimizer_step` 0, and so are recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flight.client import Lease
from modalities.packing import pack_list
from relax.algorithms.sampling import informative_rows
from relax.errors import ServiceError
from relax.roles.service import Service

TAKE_DEADLINE_S = 0.5
"""Longest wait for rows at a time; between two waits the role looks whether it has to leave."""
BALANCE = ("prompt_token_ids", "completion_token_ids")
"""Columns whose lengths make the size of a row."""
SKIP_REASON = "all rewards of the group are equal"


@dataclass(frozen=True, kw_only=True)
class Harvest:
    """Rows to train on, and the leases that hold them.

    table: data parallel rank after rank, groups whole. counts: rows of each rank.
    """

    table: pa.Table
    lease_ids: tuple[str, ...]
    counts: tuple[int, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)


class GroupCollector:
    """Takes groups for the actor.

    Args:
        service: The actor's.
        columns: What the rows are to have.
        num_ranks: Data parallel ranks that share the rows.
        waiting: Called again and again while there is nothing to train on, so that others know.
        now: Seconds.
    """

    def __init__(
        self,
        service: Service,
        columns: list[str],
        *,
        num_ranks: int = 1,
        waiting: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service = service
        self._columns = columns
        self._num_ranks = num_ranks
        self._waiting = waiting
        self._now = now

    def collect(self, policy_version: int) -> Harvest | None:
        """Wait for the batch of step `policy_version + 1`; None when the role has to leave or nothing more will come.

        Raises:
            ServiceError: the step has been trained already.
        """
        if self._service.config.algorithm.sampling.dynamic:
            return self._collect_informative(policy_version)
        return self._planned(policy_version)

    def _planned(self, policy_version: int) -> Harvest | None:
        service, config = self._service, self._service.config
        while not service.leaving:
            with service.clock.part("wait"):
                plan = service.queue.plan(
                    "rollouts",
                    "actor",
                    step=policy_version + 1,
                    num_ranks=self._num_ranks,
                    max_rows=config.prompts_per_step * config.group_size,
                    policy_version=policy_version,
                    balance=BALANCE,
                    keep_groups=True,
                    lease_s=config.queue.lease_s,
                    deadline_s=TAKE_DEADLINE_S,
                )
            if plan.status == "rows":
                parts = [
                    service.queue.fetch("rollouts", plan.plan_id, rank, columns=self._columns)
                    for rank in range(self._num_ranks)
                ]
                counts = tuple(part.num_rows for part in parts)
                return Harvest(table=pa.concat_tables(parts), lease_ids=(plan.plan_id,), counts=counts)
            if plan.status == "sealed":
                return None
            if plan.status == "finished":
                raise ServiceError(
                    f"actor: step {policy_version + 1} must be new to the queue, got one that was trained and acked"
                )
            self._waiting()
        return None

    def _collect_informative(self, policy_version: int) -> Harvest | None:
        config = self._service.config
        missing = config.prompts_per_step * config.group_size
        kept: list[pa.Table] = []
        lease_ids: list[str] = []
        rewards: list[float] = []
        num_refills = num_dropped = num_groups = 0
        last = config.algorithm.sampling.max_refills
        for num_refills in range(last + 1):
            lease = self._take(policy_version, missing, lease_ids)
            if lease is None:
                break
            # Every rank has to have a group, and a task that is solved its steps.
            num_least = self._num_ranks - num_groups if num_refills == last else 0
            rows = self._informative(lease.table, num_least, keep_all=num_least > 0 and not kept)
            rewards += lease.table["reward"].to_pylist()
            num_dropped += (lease.table.num_rows - rows.num_rows) // config.group_size
            self._skip(policy_version, lease, rows)
            if rows.num_rows:
                kept.append(rows)
                lease_ids.append(lease.lease_id)
                missing -= rows.num_rows
                num_groups += rows.num_rows // config.group_size
            if missing <= 0:
                break
        if num_groups < self._num_ranks:
            return None
        metrics = {
            "sampling/reward_mean": float(np.mean(rewards)),
            "sampling/num_groups_dropped": float(num_dropped),
            "sampling/num_refills": float(num_refills),
            "sampling/num_groups_missing": float(missing // config.group_size),
        }
        table, counts = shared_out(pa.concat_tables(kept), self._num_ranks)
        return Harvest(table=table, lease_ids=tuple(lease_ids), counts=counts, metrics=metrics)

    def _take(self, policy_version: int, num_rows: int, held: list[str]) -> Lease | None:
        """Wait for exactly that many rows, fewer only at the table's end; keep the leases `held` alive meanwhile."""
        service, lease_s = self._service, self._service.config.queue.lease_s
        renewed = self._now()
        while not service.leaving:
            if held and self._now() - renewed > lease_s / 4:
                for lease_id in held:
                    service.queue.renew("rollouts", "actor", lease_id, lease_s)
                renewed = self._now()
            with service.clock.part("wait"):
                lease = service.queue.take(
                    "rollouts",
                    "actor",
                    max_rows=num_rows,
                    min_rows=num_rows,
                    columns=self._columns,
                    policy_version=policy_version,
                    lease_s=lease_s,
                    deadline_s=TAKE_DEADLINE_S,
                )
            if lease.status == "rows":
                return lease
            if lease.status == "sealed":
                return None
            self._waiting()
        return None

    def _informative(self, rows: pa.Table, num_least: int, *, keep_all: bool) -> pa.Table:
        """Return the rows of groups whose rewards differ, and of so many others that there are `num_least` groups.

        With `keep_all`, all rows if there is no group whose rewards differ.
        """
        group_ids = rows["group_id"].to_pylist()
        teaches = informative_rows(rows["reward"].to_numpy(), group_ids)
        if keep_all and not teaches.any():
            return rows
        chosen = {group_id for group_id, keep in zip(group_ids, teaches, strict=True) if keep}
        others = [group_id for group_id in dict.fromkeys(group_ids) if group_id not in chosen]
        chosen |= set(others[: max(0, num_least - len(chosen))])
        return rows.filter(pa.array([group_id in chosen for group_id in group_ids]))

    def _skip(self, policy_version: int, lease: Lease, kept: pa.Table) -> None:
        """Let go of a lease's rows that are not kept: recorded as not trained on, and replaced by the entrance."""
        skipped = lease.table.filter(pc.invert(pc.is_in(lease.table["uid"], value_set=kept["uid"])))
        if not skipped.num_rows:
            return
        queue = self._service.queue
        untrained = untrained_columns(policy_version, skipped)
        for name in self._service.config.served.actor_writes():
            untrained = untrained.append_column(name, untrained["advantages"])
        queue.put("rollouts", untrained, writer="actor")
        uids = skipped["uid"].to_pylist()
        queue.nack("rollouts", "actor", lease_id=lease.lease_id, uids=uids, reason=SKIP_REASON, requeue=False)


def shared_out(rows: pa.Table, num_ranks: int) -> tuple[pa.Table, tuple[int, ...]]:
    """Return the rows rank after rank, groups whole and about as many tokens for each, and the number of rows of each.

    There must be as many groups as ranks at least; each rank gets one.
    """
    if num_ranks == 1:
        return rows, (rows.num_rows,)
    rows_of: dict[str, list[int]] = {}
    for row, group_id in enumerate(rows["group_id"].to_pylist()):
        rows_of.setdefault(group_id, []).append(row)
    lengths = np.sum([pc.list_value_length(rows[name]).to_numpy() for name in BALANCE], axis=0)
    sizes = {group_id: int(lengths[its_rows].sum()) for group_id, its_rows in rows_of.items()}
    order: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for group_id in sorted(sizes, key=lambda group_id: -sizes[group_id]):
        rank = loads.index(min(loads))
        order[rank] += rows_of[group_id]
        loads[rank] += sizes[group_id]
    return rows.take(pa.array(list(chain.from_iterable(order)))), tuple(map(len, order))


def untrained_columns(policy_version: int, rows: pa.Table) -> pa.Table:
    """Return the actor's columns of rows that were looked at and not trained on: no advantage, the rest unknown."""
    lengths = [len(logprobs) for logprobs in rows["rollout_logprobs"].to_pylist()]
    return pa.table(
        {
            "uid": rows["uid"],
            "advantages": pack_list([[np.zeros(n, np.float32)] for n in lengths], pa.float32()),
            "trainer_logprobs": pack_list([[np.full(n, np.nan, np.float32)] for n in lengths], pa.float32()),
            "importance_ratio": pa.array(np.full(len(lengths), np.nan, np.float32)),
            "trained_policy_version": pa.array([policy_version] * len(lengths), pa.int64()),
            "optimizer_step": pa.array([0] * len(lengths), pa.int64()),
            "staleness": pc.subtract(policy_version, rows["policy_version_start"]).cast(pa.int32()),
        }
    )
