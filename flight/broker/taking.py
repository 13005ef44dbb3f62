"""Handing out rows: under the lock they are leased and found, after it their values are gathered and marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from flight.broker.core import BrokerCore, Wait
from flight.data.projection import Places, project
from flight.schema import StalenessPolicy, TableSpec
from flight.state.leases import Lease, Row
from flight.state.ledger import TakeRequest, TakeStatus
from flight.state.marks import Computed, Marks, token_source


@dataclass(frozen=True, kw_only=True)
class TakeAnswer:
    """`table` holds row_id, uid, group_id, attempt and the columns asked for; no rows unless status is "rows".

    For the staleness consumer it also holds `staleness` and, under "mask" and "reweight", `stale_tokens`;
    `max_staleness` and `policy` say by which bound, and are None for others.
    """

    status: TakeStatus
    policy_version: int
    lease_id: str
    table: pa.Table
    max_staleness: int | None = None
    policy: StalenessPolicy | None = None


@dataclass(frozen=True, kw_only=True)
class LeasedRows:
    """Rows of a lease and where their values lie; valid whatever happens to the table."""

    spec: TableSpec
    rows: Sequence[Row]
    attempts: Sequence[int]
    places: Places
    marks: Marks | None
    owners: Mapping[int, str] | None = None
    """Where storage servers are, if there are any."""

    def table(self, computed: Computed = ()) -> pa.Table:
        """Gather the values; `computed` columns come behind the key columns."""
        marked = self.marks.columns() if self.marks is not None else ()
        return project(
            self.spec,
            self.rows,
            self.places,
            attempts=self.attempts,
            computed=[*computed, *marked],
            owners=self.owners,
        )


class BrokerTaking(BrokerCore):
    """The verb that leases rows."""

    def take(
        self,
        name: str,
        request: TakeRequest,
        columns: Sequence[str] | None,
        wait: Wait,
        *,
        is_direct: bool = False,
    ) -> TakeAnswer:
        """Lease rows; waits until there are at least `min_rows`, the end is reached, or the deadline passes.

        With `is_direct` the caller fetches itself what lies with storage servers.
        """
        with self._locked():
            chosen = self._ledger.table(name).spec.columns_for(request.consumer, columns)
            while (taken := self._ledger.take(name, request, self.clock())) is None:
                self._after(name, has_changed=False)
                if not self._wait(name, wait):
                    break
            self._after(name)
            status: TakeStatus = "empty" if taken is None else taken.status
            lease = taken.lease if taken is not None else None
            rows = lease.rows() if lease is not None else []
            attempts = lease.attempts() if lease is not None else []
            version = self._ledger.policy_version(name)
            leased = self._locate_leased(name, chosen, request.consumer, lease, (rows, attempts))
        table = self._whole(name, leased.table(), is_direct=is_direct)
        if status == "rows" and not table.num_rows:  # All of them were lost on the way; there may be others.
            return self.take(name, request, columns, wait)
        marks = leased.marks
        return TakeAnswer(
            status=status,
            policy_version=version,
            lease_id=lease.lease_id if lease is not None else "",
            table=table,
            max_staleness=marks.max_staleness if marks is not None else None,
            policy=marks.policy if marks is not None else None,
        )

    def _locate_leased(
        self,
        name: str,
        columns: Sequence[str],
        consumer: str,
        lease: Lease | None,
        held: tuple[Sequence[Row], Sequence[int]],
    ) -> LeasedRows:
        """Find (rows, attempts) that a consumer holds, and what marks their age if its takes count as training."""
        spec = self._ledger.table(name).spec
        chosen, attempts = held
        gate = self._ledger.gates.get(name)
        marks = None
        if gate is not None and gate.spec.consumer == consumer:
            source = token_source(spec)
            marks = Marks(
                policy=gate.spec.policy,
                trains_for=lease.version if lease is not None else gate.policy_version,
                max_staleness=gate.max_staleness
                if lease is None or lease.max_staleness is None
                else lease.max_staleness,
                start_versions=[row.version for row in chosen],
                source=source,
                source_type=spec.columns_by_name[source].type if source else pa.null(),
                places=self._locate(name, [source], chosen)[source] if source else [],
            )
        return LeasedRows(
            spec=spec,
            rows=chosen,
            attempts=attempts,
            places=self._locate(name, columns, chosen),
            marks=marks,
            owners=self._owners.locations,
        )
