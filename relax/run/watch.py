"""What the driver sees of a run: metrics, row errors and held-out answers, taken from the queue like any consumer.

It feeds the progress display and the metric files, and writes the report at the end. It steers nothing. Metrics and row
errors are acked once they are on disk, so that a driver that is killed loses none.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from flight.client import Lease, QueueClient
from flight.errors import FlightQueueError, LeaseLostError
from modalities.sources import read_bytes
from relax.config import RunConfig
from relax.control.course import Course
from relax.control.hub import ControlHub
from relax.control.scale import OPERATOR
from relax.data.sources import base_dir_of
from relax.observe.metrics import MetricsWriter
from relax.observe.progress import ModalityReward, ProgressDisplay, ProgressState
from relax.observe.recorder import write_table
from relax.records import (
    NUM_EVAL_PROMPTS_METRIC,
    ROW_ERROR_COLUMNS,
    eval_reward_metric,
    mean_rewards,
    split_by,
)
from relax.roles.config import SERVABLE
from relax.run.evaluation import EvaluationRounds, Round
from relax.run.history import History

ROW_ERRORS = pa.schema([(column.name, column.type) for column in ROW_ERROR_COLUMNS])
TRAIN_WINDOW_STEPS = 20
STEPPING_ROLES = ("actor", "rollout", "driver", *SERVABLE)
"""Roles whose metrics are of a policy version; those of the others count something else."""
STATS_EVERY_S = 1.0
WAITING = {"prompts": "rollout", "rollouts": "actor", "eval_prompts": "rollout"}
"""Consumer whose ready rows count as waiting, by table."""


class RunWatch:
    """Collects what the roles report and shows it."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        queue: QueueClient,
        hub: ControlHub,
        evaluations: EvaluationRounds,
        history: History,
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._queue = queue
        self._hub = hub
        self._evaluations = evaluations
        self._history = history
        self._metrics = MetricsWriter(run_dir)
        self._unflushed: list[Lease] = []
        """Leases of metrics that are not on disk yet."""
        self._display = ProgressDisplay(config.progress)  # type: ignore[arg-type]  # checked by RunConfig
        self._display.__enter__()
        self._started = time.monotonic()
        self._row_errors: dict[str, dict[str, str]] = {}
        self._held_out: dict[str, tuple[float, int]] = {}
        self._waiting: dict[str, int] = {}
        self._stats_at = 0.0
        self._note = ""
        self.step = 0

    def note(self, text: str) -> None:
        """Show one line for the operator."""
        self._note = text
        self._show()

    def collect(self) -> None:
        """Take whatever came since the last call, without waiting, and redraw."""
        while (lease := self._take("metrics")) is not None:
            self._receive_metrics(lease.table)
            self._unflushed.append(lease)
        self._ack_flushed()
        while (lease := self._take("row_errors")) is not None:
            self._receive_row_errors(lease.table)
            self._ack("row_errors", lease)
        while (lease := self._take("eval_rollouts")) is not None:
            self._evaluations.receive(lease.table)
            self._ack("eval_rollouts", lease)
        for round_ in self._evaluations.newly_complete():
            self._record(round_)
        if time.monotonic() - self._stats_at > STATS_EVERY_S:
            self._stats_at = time.monotonic()
            self._waiting = {
                table: self._queue.stats(table)["consumers"][consumer]["ready"]
                for table, consumer in WAITING.items()
            }
        self._show()

    def last_rewards(self) -> Mapping[str, float]:
        """Return the newest held-out reward of each modality, or the training one where none was held out."""
        return {name: reward for name, (reward, _) in self._held_out.items()} or self._train_rewards()

    def report(self, outcome: str) -> Path:
        """Close the metrics and write the report; `outcome` says how the run ended."""
        from relax.observe.report import ReportInputs, build_report

        self.close()
        inputs = ReportInputs(
            run_name=self._run_dir.name,
            outcome=outcome,
            config_text=(self._run_dir / "config.yaml").read_text(),
            duration_s=time.monotonic() - self._started,
            max_staleness=self._config.max_staleness,
            rows_per_version=self._config.prompts_per_step * self._config.group_size,
            events=self._history.lines(),
            row_errors=self.row_errors(),
            media_base_dirs={name: base_dir_of(each.path) for name, each in self._config.data.eval.items()},
            read_media=partial(read_bytes, limits=self._config.modalities.limits),
            confine_media=self._config.security,
        )
        return build_report(self._run_dir, inputs)

    def row_errors(self) -> pa.Table:
        """Return the rows that were refused so far: stage, place, reason."""
        return pa.Table.from_pylist(list(self._row_errors.values()), ROW_ERRORS)

    def close(self) -> None:
        """Stop the display and complete the files of metrics; harmless when repeated."""
        self._display.__exit__(None, None, None)
        self._metrics.close()
        with suppress(FlightQueueError):
            self._ack_flushed()

    def show_restart(self, service: str) -> None:
        """Count a restart among the metrics."""
        count = self._history.num_restarts()[service]
        self._metrics.add("driver", self.step, self.step, {f"restarts/{service}": count})

    def take_up(self) -> None:
        """Go on with what the driver of an earlier session left on disk; `go_back` must follow."""
        self._metrics.take_up()
        path = self._run_dir / "row_errors.parquet"
        if path.exists():
            columns = ["uid", *ROW_ERRORS.names]
            for row in pq.read_table(path, columns=columns).to_pylist():
                self._row_errors[row["uid"]] = {name: row[name] for name in ROW_ERRORS.names}
        self._evaluations.take_up(int(path.stem) for path in (self._run_dir / "evaluation").glob("*.parquet"))

    def go_back(self, course: Course) -> None:
        """Forget what was measured and answered after the step that the run has gone back to."""
        self._metrics.go_back(course.step, STEPPING_ROLES)
        for path in (self._run_dir / "evaluation").glob("*.parquet"):
            if int(path.stem) > course.step:
                path.unlink()
        self._evaluations.go_back(course.step, course.incarnation)
        self._unflushed.clear()  # their leases are void
        self.step = course.step

    def _take(self, table: str) -> Lease | None:
        """Lease what waits in `table`, None if nothing does."""
        lease = self._queue.take(table, "driver", max_rows=4096, deadline_s=0.0)
        return lease if lease.status == "rows" else None

    def _ack(self, table: str, lease: Lease) -> None:
        with suppress(LeaseLostError):  # its rows come again, and are known then
            self._queue.ack(table, "driver", lease_id=lease.lease_id)

    def _ack_flushed(self) -> None:
        if not self._metrics.is_closed:
            self._metrics.flush_if_late()
        if self._metrics.is_flushed:
            while self._unflushed:
                self._ack("metrics", self._unflushed[0])
                del self._unflushed[0]

    def _receive_metrics(self, rows: pa.Table) -> None:
        self._metrics.write(rows.select(["step", "policy_version", "role", "name", "value", "time"]))
        for row in rows.select(["role", "name", "step", "value"]).to_pylist():
            if row["role"] == "actor":
                self.step = max(self.step, row["step"])
            if row["name"] == NUM_EVAL_PROMPTS_METRIC:
                self._evaluations.expect(row["step"], int(row["value"]))

    def _receive_row_errors(self, rows: pa.Table) -> None:
        """Keep each refused row once, however many services met it, on disk too."""
        uids = rows["uid"].to_pylist()
        new = [uid not in self._row_errors for uid in uids]
        for uid, facts in zip(uids, rows.select(ROW_ERRORS.names).to_pylist(), strict=True):
            self._row_errors.setdefault(uid, facts)
        self._evaluations.refuse(uid for uid, is_new in zip(uids, new, strict=True) if is_new)
        if any(new):
            known = pa.table({"uid": list(self._row_errors)})
            for name in ROW_ERRORS.names:
                known = known.append_column(name, self.row_errors()[name])
            write_table(known, self._run_dir / "row_errors.parquet")

    def _record(self, round_: Round) -> None:
        """Note the rewards of a complete evaluation and keep its answers on disk."""
        if not round_.answers:
            return
        answers = pa.concat_tables(round_.answers)
        rewards = mean_rewards(answers)
        counts = {name: answers["modality"].to_pylist().count(name) for name in rewards}
        self._held_out = {name: (reward, counts[name]) for name, reward in rewards.items()}
        values = {
            eval_reward_metric(name, modality): reward
            for name, of_set in split_by(answers, "source").items()
            for modality, reward in mean_rewards(of_set).items()
        }
        values["evaluation/behind_versions"] = float(self.step - round_.policy_version)
        self._metrics.add("driver", round_.policy_version, round_.policy_version, values)
        write_table(answers, self._run_dir / "evaluation" / f"{round_.policy_version:06d}.parquet")

    def _train_rewards(self) -> dict[str, float]:
        series = self._metrics.series
        rewards = {}
        for role, name in series.names():
            if role == "actor" and name.startswith("reward/") and name != "reward/mean":
                mean = series.mean(role, name, TRAIN_WINDOW_STEPS)
                if mean is not None:
                    rewards[name.removeprefix("reward/")] = mean
        return rewards

    def _show(self) -> None:
        series, config = self._metrics.series, self._config
        train = self._train_rewards()
        rewards = {
            name: ModalityReward(
                train=train.get(name),
                held_out=self._held_out.get(name, (None, 0))[0],
                num_held_out=self._held_out.get(name, (None, 0))[1],
            )
            for name in sorted(set(train) | set(self._held_out))
        }
        points = series.points("actor", "rows")[-TRAIN_WINDOW_STEPS:]
        span_s = points[-1].time_s - points[0].time_s if len(points) > 1 else 0.0
        mean, most = series.last("actor", "staleness/mean"), series.last("actor", "staleness/max")
        rows_per_version = config.prompts_per_step * config.group_size
        self._display.update(
            ProgressState(
                run_name=self._run_dir.name,
                step=self.step,
                num_steps=config.num_steps,
                policy_version=self.step,
                elapsed_s=time.monotonic() - self._started,
                step_s=span_s / (len(points) - 1) if span_s else None,
                samples_per_s=sum(point.value for point in points[1:]) / span_s if span_s else None,
                rewards=rewards,
                staleness_mean=mean.value if mean else None,
                staleness_max=int(most.value) if most else None,
                max_staleness=config.max_staleness,
                rows_per_version=rows_per_version,
                rows_waiting=self._waiting,
                roles={
                    name: member.state
                    for name, member in self._hub.members().items()
                    if member.role != OPERATOR
                },
                num_row_errors=len(self._row_errors),
                note=self._note,
            )
        )
