"""The recorder role: an ordinary consumer that writes what was trained on to Parquet. It computes nothing.

A row is acked once it is on disk, so a recorder that dies loses none; the next one takes up what it left.
"""

from __future__ import annotations

from modalities.routing import ROUTING_COLUMNS
from relax.observe.recorder import RolloutRecorder
from relax.records import RECORDED
from relax.roles.service import Service


def run(service: Service) -> None:
    """Record until the table is sealed and empty, or the role has to leave."""
    columns = [*RECORDED, *(column.name for column in ROUTING_COLUMNS)]
    with RolloutRecorder(service.run_dir / "rollouts") as recorder:
        service.report(state="ready")
        while not service.stopping:
            lease = service.queue.take(
                "rollouts",
                "recorder",
                max_rows=4096,
                columns=columns,
                lease_s=service.config.queue.lease_s,
                deadline_s=0.5,
            )
            if lease.status == "rows":
                recorder.write(lease.table)
                service.queue.ack("rollouts", "recorder", lease_id=lease.lease_id)
            elif lease.status == "sealed" or service.leaving:
                break
