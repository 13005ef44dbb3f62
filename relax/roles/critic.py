"""The critic role: values of rollouts as a column, and the training of the head that gives them.

    learn from what the actor has trained on up to the newest version -> adopt its weights -> values of what waits

The version of a value is that of the weights below the head and, always the same, the steps that the head has taken;
which one is said in `relax.roles.scoring.WeightFollower`. Rows reach the learner with the actor's columns, which are
there before a version is announced: once it is, the rows of its step are whole.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc
import structlog

from flight.errors import LeaseLostError
from modalities.packing import unpack_present
from relax.errors import ServiceError
from relax.roles.critic_files import head_file, newest_head, retire_heads
from relax.roles.given_columns import packed
from relax.roles.scoring import Columns, RowReader, RowService, WeightFollower, make_scorer
from relax.roles.service import Service
from relax.run.checkpoints import checkpoint_dir
from relax.served_columns import LEARNER
from relax.train.row_scorer import RowScorer
from relax.train.trainer import CRITIC_FILE
from relax.train.value_learner import ValueLearner

LOG = structlog.get_logger("relax.critic")


def run(service: Service) -> None:
    """Give values and learn until the role has to leave."""
    scorer = make_scorer(service, replays_routing=True)
    critic = CriticService(service, scorer)
    rows = RowService(service)
    critic.take_up()
    service.report(state="ready", step=critic.version)
    while not service.leaving:
        service.wait_while_paused()
        if critic.catch_up():
            rows.serve(critic.values, critic.version)


@dataclass
class _Held:
    """Rows of one optimizer step that have come so far, by uid, and the leases that they came in."""

    parts: list[pa.Table] = field(default_factory=list)
    uids: set[str] = field(default_factory=set)
    leases: list[tuple[str, list[str]]] = field(default_factory=list)


class CriticService:
    """A value learner between the queue and the actor's weights."""

    def __init__(self, service: Service, scorer: RowScorer) -> None:
        self._service = service
        self._scorer = scorer
        self._reader = RowReader(service, scorer, replays_routing=True)
        self._weights = WeightFollower(service, scorer)
        self._learner = ValueLearner(scorer, service.config.actor, service.config.algorithm)
        self._held: dict[int, _Held] = defaultdict(_Held)

    @property
    def version(self) -> int:
        """The policy version that its values are of."""
        return self._learner.num_steps

    def take_up(self) -> None:
        """Go on from the newest head of this incarnation, else from the checkpoint, else from a head of zeros."""
        service = self._service
        course, found = service.course, newest_head(service.run_dir, service.course)
        if found is not None:
            self._learner.load(found[1], found[0])
        elif course.step:
            self._learner.load(checkpoint_dir(service.run_dir, course.step) / CRITIC_FILE, course.step)
        else:
            self._save()

    def catch_up(self) -> bool:
        """Learn all that has been trained on, and adopt the newest weights; False when the role has to leave first."""
        return self._catch_up(0)

    def values(self, rows: pa.Table) -> Columns | None:
        """Return values under weights that are new enough for the rows."""
        if not self._catch_up(pc.max(rows["policy_version_end"]).as_py()):
            return None
        values = self._learner.score(self._reader.read(rows)).values
        if values is None:
            raise ServiceError("critic: the head must give values, got none")
        return {"values": packed(values)}

    def _catch_up(self, at_least: int) -> bool:
        """Come to the newest version, waiting for `at_least`, one step of the head after another."""
        if not self._weights.wait_for(at_least):
            return False
        newest = self._weights.newest()
        while newest is not None and self.version < newest.version:
            if self._service.stopping:
                return False
            self._adopt(self.version)
            self._learn(self.version + 1)
            newest = self._weights.newest()
        return self._adopt(self.version)

    def _adopt(self, version: int) -> bool:
        """Adopt the weights of a version, newer ones if they are gone; return whether there are any."""
        if self._weights.adopt(version):
            return True
        LOG.warning("weights gone", version=version, instead="the newest")
        return self._weights.adopt_newest()

    def _learn(self, step: int) -> None:
        """Take the head's step on the rows of an optimizer step, and keep it before they are let go."""
        service = self._service
        self._take()
        held = self._held.pop(step, _Held())
        if not held.parts:
            raise ServiceError(
                f"critic: the rows of step {step} must be there once it is announced, got none"
            )
        rows = pa.concat_tables(held.parts)
        with service.clock.part("train"):
            metrics = self._learner.learn(self._reader.read(rows), unpack_present(rows["returns"]))
        self._save()
        self._ack(held)
        service.put_metrics(step, step, metrics | {"rows": rows.num_rows} | service.clock.report())
        service.report(state="training", step=step)

    def _take(self) -> None:
        """Take all that the actor has trained on; hold it by step, let go what has been learned or never will be."""
        service, queue = self._service, self._service.queue
        while True:
            lease = queue.take(
                "rollouts",
                LEARNER,
                max_rows=service.config.prompts_per_step * service.config.group_size,
                lease_s=service.config.queue.lease_s,
                deadline_s=0.0,
            )
            if lease.status != "rows":
                return
            steps = lease.table["optimizer_step"]
            for step in pc.unique(steps).to_pylist():
                rows = lease.table.filter(pc.equal(steps, step))
                uids = rows["uid"].to_pylist()
                if step <= self.version:  # 0: left out by dynamic sampling
                    self._ack(_Held(leases=[(lease.lease_id, uids)]))
                    continue
                held = self._held[step]
                fresh = [uid not in held.uids for uid in uids]
                held.parts.append(rows.filter(pa.array(fresh)))
                held.uids.update(uids)
                held.leases.append((lease.lease_id, uids))

    def _ack(self, held: _Held) -> None:
        for lease_id, uids in held.leases:
            with suppress(LeaseLostError):  # they come again, and count as learned then
                self._service.queue.ack("rollouts", LEARNER, lease_id=lease_id, uids=uids)

    def _save(self) -> None:
        service = self._service
        self._learner.save(head_file(service.run_dir, service.course, self.version))
        keep = service.config.checkpoint.keep_snapshots
        retire_heads(service.run_dir, service.course, self.version, keep)
