"""Forward-only scoring of rows as a service: whole groups in, a column a token out. What is computed is the role's.

    take (a consumer of its own) -> weights that are new enough -> score -> put the columns -> ack

A service that dies between its put and its ack gets the rows again; a column that is there already is not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from flight.client import Lease
from flight.errors import LeaseLostError
from relax.control.messages import PolicyVersion
from relax.errors import ServiceError
from relax.roles.groups import TAKE_DEADLINE_S, Harvest
from relax.roles.service import Service
from relax.roles.training_batch import TrainingBatches
from relax.run.snapshots import weights_dir
from relax.train.batch import TrainBatch
from relax.train.row_scorer import RowScorer

Columns = Mapping[str, pa.Array]


def make_scorer(service: Service, *, replays_routing: bool) -> RowScorer:
    """Return the scorer of a service, with the weights that the run began with."""
    config = service.config
    return RowScorer(
        service.model_dir,
        config.actor,
        config.algorithm,
        seed=config.seed,
        replays_routing=replays_routing,
    )


class RowService:
    """Takes groups of table `rollouts` for the consumer that has the role's name, and puts what is made of them."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._max_rows = service.config.prompts_per_step * service.config.group_size

    def serve(self, make: Callable[[pa.Table], Columns | None], policy_version: int = 0) -> bool:
        """Take what waits, a training batch at most, and put what `make` returns; return whether there was any.

        Blocks for a moment. `make` returns None when the role has to leave first. `policy_version` is for the metrics.
        """
        service = self._service
        with service.clock.part("wait"):
            lease = service.queue.take(
                "rollouts",
                service.role,
                max_rows=self._max_rows,
                lease_s=service.config.queue.lease_s,
                deadline_s=TAKE_DEADLINE_S,
            )
        if lease.status != "rows":
            return False
        with service.clock.part("score"):
            columns = make(lease.table)
        if columns is None:
            return False
        with service.clock.part("put"):
            self._put(lease, columns)
        service.put_times(policy_version)
        return True

    def _put(self, lease: Lease, columns: Columns) -> None:
        queue, role = self._service.queue, self._service.role
        queue.put("rollouts", pa.table({"uid": lease.table["uid"], **columns}), writer=role)
        with suppress(LeaseLostError):  # the rows come again, and what is put again changes nothing
            queue.ack("rollouts", role, lease_id=lease.lease_id)


class RowReader:
    """Makes batches for a scorer out of rows, with the media and the experts that it needs."""

    def __init__(self, service: Service, scorer: RowScorer, *, replays_routing: bool) -> None:
        layers = scorer.policy.routed_layers if replays_routing else ()
        self._batches = TrainingBatches(service, scorer.world, layers)

    def read(self, rows: pa.Table) -> TrainBatch:
        """Return rows of whole groups as a batch."""
        return self._batches.read(Harvest(table=rows, lease_ids=(), counts=(rows.num_rows,)))


class WeightFollower:
    """Keeps a scorer at the weights that the run has published.

    Which version: the newest there is when rows are scored, and never one before that which sampled their last token.
    On policy this is the one that their step begins with, as all older rows have been trained on by then.
    """

    def __init__(self, service: Service, scorer: RowScorer) -> None:
        self._service = service
        self._scorer = scorer
        self._adopted: tuple[int, int] | None = None

    def newest(self) -> PolicyVersion | None:
        """Return the newest weights of the present incarnation; None before there are any."""
        newest = self._service.control.policy_version
        return newest if newest and newest.incarnation == self._service.course.incarnation else None

    def wait_for(self, version: int) -> bool:
        """Wait until weights of `version` or later are published; False when the role has to leave first."""

        def is_there() -> bool:
            newest = self.newest()
            return newest is not None and newest.version >= version

        control = self._service.control
        while not (is_there() or self._service.leaving):
            control.wait_for(lambda: is_there() or self._service.leaving, deadline_s=1.0)
        return is_there()

    def adopt_newest(self, at_least: int = 0) -> bool:
        """Adopt the newest weights, of `at_least` or later; False when the role has to leave first. Blocks."""
        while self.wait_for(at_least):
            newest = self.newest()
            if newest is not None and self.adopt(newest.version, newest.path):
                return True
        return False

    def adopt_for(self, rows: pa.Table) -> bool:
        """Adopt weights for these rows, see above; False when the role has to leave first."""
        return self.adopt_newest(pc.max(rows["policy_version_end"]).as_py())

    def adopt(self, version: int, path: Path | None = None) -> bool:
        """Adopt one version of the present incarnation; return whether it is there still.

        Raises:
            ServiceError: the snapshot is of another version.
        """
        course = self._service.course
        if self._adopted == (course.incarnation, version):
            return True
        path = path or weights_dir(self._service.run_dir) / course.snapshot_name(version)
        try:
            with self._service.clock.part("adopt"):
                found = self._scorer.adopt(path)
        except FileNotFoundError:  # replaced by a newer one meanwhile
            return False
        if found != version:
            raise ServiceError(
                f"{self._service.name}: {path} must hold policy version {version}, got {found}"
            )
        self._adopted = course.incarnation, version
        return True
