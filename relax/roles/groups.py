"""Whole groups for a training batch, without those that teach nothing if the algorithm says so. It trains nothing.

With `algorithm.sampling.dynamic` groups of equal rewards are skipped as they come and others are taken in their place,
`max_refills` times at most; a batch that is short then is trained on as it is, and one without any group that teaches
is made of what came last, so that a solved task ends its steps instead of waiting for ever.

A skipped group does not count against the staleness bound, so that other prompts are admitted for it (an acked one
would, until the next policy version, and an on-policy run would wait for itself). Its rows get the actor's columns all
the same, with `optimizer_step` 0, and so are recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flight.client import Lease
from modalities.packing import pack_list
from relax.algorithms.sampling import informative_rows
from relax.roles.service import Service

TAKE_DEADLINE_S = 0.5
SKIP_REASON = "all rewards of the group are equal"


@dataclass(frozen=True, kw_only=True)
class Harvest:
    """Rows to train on, and the leases that hold them."""

    table: pa.Table
    lease_ids: tuple[str, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)


class GroupCollector:
    """Takes groups for the actor."""

    def __init__(
        self, service: Service, columns: list[str], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._service = service
        self._columns = columns
        self._now = now

    def collect(self, policy_version: int) -> Harvest | None:
        """Wait for a training batch; None when the role has to leave or nothing more will come."""
        config = self._service.config
        missing = config.prompts_per_step * config.group_size
        if not config.algorithm.sampling.dynamic:
            lease = self._take(policy_version, missing, [])
            return None if lease is None else Harvest(table=lease.table, lease_ids=(lease.lease_id,))
        kept: list[pa.Table] = []
        lease_ids: list[str] = []
        rewards: list[float] = []
        num_refills = num_dropped = 0
        last = config.algorithm.sampling.max_refills
        for num_refills in range(last + 1):
            lease = self._take(policy_version, missing, lease_ids)
            if lease is None:
                break
            rows = self._informative(lease.table, keep_all=num_refills == last and not kept)
            rewards += lease.table["reward"].to_pylist()
            num_dropped += (lease.table.num_rows - rows.num_rows) // config.group_size
            self._skip(policy_version, lease, rows)
            if rows.num_rows:
                kept.append(rows)
                lease_ids.append(lease.lease_id)
                missing -= rows.num_rows
            if missing <= 0:
                break
        if not kept:
            return None
        metrics = {
            "sampling/reward_mean": float(np.mean(rewards)),
            "sampling/num_groups_dropped": float(num_dropped),
            "sampling/num_refills": float(num_refills),
            "sampling/num_groups_missing": float(missing // config.group_size),
        }
        return Harvest(table=pa.concat_tables(kept), lease_ids=tuple(lease_ids), metrics=metrics)

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
        return None

    def _informative(self, rows: pa.Table, *, keep_all: bool) -> pa.Table:
        """Return the rows of groups whose rewards differ; with `keep_all` all of them if there are none such."""
        teaches = informative_rows(rows["reward"].to_numpy(), rows["group_id"].to_pylist())
        return rows if keep_all and not teaches.any() else rows.filter(pa.array(teaches))

    def _skip(self, policy_version: int, lease: Lease, kept: pa.Table) -> None:
        """Let go of a lease's rows that are not kept: recorded as not trained on, and replaced by the entrance."""
        skipped = lease.table.filter(pc.invert(pc.is_in(lease.table["uid"], value_set=kept["uid"])))
        if not skipped.num_rows:
            return
        queue = self._service.queue
        queue.put("rollouts", untrained_columns(policy_version, skipped), writer="actor")
        uids = skipped["uid"].to_pylist()
        queue.nack("rollouts", "actor", lease_id=lease.lease_id, uids=uids, reason=SKIP_REASON, requeue=False)


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
