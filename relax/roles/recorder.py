"""The recorder role: an ordinary consumer that writes what was trained on to Parquet. It computes nothing.

A row is acked once it is on disk, so a recorder that dies loses none; the next one takes up what it left. With
`media.record` it does the same for the rows of table `media`, which stay there until it has.
"""

from __future__ import annotations

from contextlib import suppress

from flight.client import Lease
from flight.errors import LeaseLostError
from modalities.routing import joined_routing, routing_names
from relax.data.media import TABLE
from relax.observe.media_recorder import MediaRecorder
from relax.observe.recorder import RolloutRecorder
from relax.records import AGENT_COLUMNS, RECORDED, reward_columns
from relax.roles.service import Service

MEDIA_ROWS = 64
"""Rows of media in one file."""


def run(service: Service) -> None:
    """Record until the table is sealed and empty, or the role has to leave."""
    rewards = [column.name for column in reward_columns(service.config.rollout.reward.labels)]
    if service.config.rollout.agent.is_on:
        rewards += [column.name for column in AGENT_COLUMNS]
    served = service.config.served.names()
    columns = [
        *RECORDED,
        *served,
        *rewards,
        *routing_names(service.queue.describe("rollouts").columns_by_name),
    ]
    media = _MediaRows(service) if service.config.media.record else None
    written: Lease | None = None
    with (
        RolloutRecorder(service.run_dir / "rollouts") as recorder,
        service.queue.open_take("rollouts", "recorder", columns=columns) as takes,
    ):
        service.report(state="ready")
        while not service.stopping:
            try:
                lease = takes.take(
                    max_rows=4096, lease_s=service.config.queue.lease_s, deadline_s=0.5, ack=written
                )
            except LeaseLostError:  # its rows come again, and are in the record already
                written = None
                continue
            written = lease
            if lease.status == "rows":
                recorder.write(joined_routing(lease.table))
            is_over = lease.status == "sealed" or (lease.status != "rows" and service.leaving)
            if media is not None:
                while media.record() and not service.stopping:
                    pass
            if is_over:
                break
        if written is not None:
            with suppress(LeaseLostError):
                takes.ack(written)


class _MediaRows:
    """Rows of table `media` on their way to disk."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._columns = list(service.queue.describe(TABLE).columns_by_name)
        self._recorder = MediaRecorder(service.run_dir / "media")

    def record(self) -> bool:
        """Write what is there, up to a file's worth; return whether there was any."""
        queue = self._service.queue
        lease_s = self._service.config.queue.lease_s
        lease = queue.take(
            TABLE, "recorder", max_rows=MEDIA_ROWS, columns=self._columns, lease_s=lease_s, deadline_s=0.0
        )
        if lease.status != "rows":
            return False
        self._recorder.write(lease.table)
        with suppress(LeaseLostError):
            queue.ack(TABLE, "recorder", lease_id=lease.lease_id)
        return True
