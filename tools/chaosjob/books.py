"""What must hold of the books of a run that has ended, whatever happened on the way. Reads files, changes none.

prompts issued  = trained + waiting + counted drops      the queue's own books (`relax.run.ledger`)
each optimizer step is there, with as many rows as asked for, and no row twice
each row is of the policy version before its step, and no older than the bound
no prompt of the order is skipped: what was not trained on is waiting or refused
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from relax.config import RunConfig, load_config
from relax.data.manifest import Manifest
from relax.data.order import PromptOrder, SourceSize
from relax.run.ledger import Ledger

COLUMNS = [
    "uid",
    "group_id",
    "optimizer_step",
    "trained_policy_version",
    "policy_version_start",
    "policy_version_end",
    "staleness",
    "reward",
]
LAST_SHARE = 0.25
"""The reward of a run is that of the rows of this last part of its steps."""
SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the configuration promises of a run."""

    num_steps: int
    prompts_per_step: int
    group_size: int
    max_staleness: int

    @classmethod
    def of(cls, config: RunConfig) -> Expected:
        """Read it from a configuration."""
        return cls(
            num_steps=config.num_steps,
            prompts_per_step=config.prompts_per_step,
            group_size=config.group_size,
            max_staleness=config.max_staleness,
        )


@dataclass(kw_only=True)
class Books:
    """What a run left: its ledger, its last rewards, and what is wrong."""

    ledger: dict[str, int] = field(default_factory=dict)
    reward: float = float("nan")
    problems: list[str] = field(default_factory=list)


def read_books(run_dir: Path) -> Books:
    """Check everything that a run which has ended well left on disk."""
    config = load_config([run_dir / "config.yaml"])
    expected = Expected.of(config)
    books = Books()
    ended = [event for event in _events(run_dir) if event["event"] == "ended"]
    if not ended or ended[-1].get("ledger") is None:
        books.problems.append("ledger: the run must have ended with one, got none")
        return books
    books.ledger = ended[-1]["ledger"]
    rows = _read(sorted((run_dir / "rollouts").glob("*.parquet")), COLUMNS)
    metrics = pq.read_table(run_dir / "metrics.parquet")
    books.problems += check_ledger(Ledger(**books.ledger), expected)
    books.problems += check_rows(rows, expected)
    books.problems += check_metrics(metrics, expected)
    books.problems += check_order(rows, _order(config), books.ledger)
    books.problems += _left_behind(run_dir)
    books.reward = last_reward(rows, expected.num_steps)
    return books


def check_ledger(ledger: Ledger, expected: Expected) -> list[str]:
    """Return by what the queue's own counts fail."""
    found = [f"ledger: {name} differ by {number}" for name, number in ledger.differences().items()]
    asked = expected.num_steps * expected.prompts_per_step * expected.group_size
    if ledger.rows_trained != asked:
        found.append(f"ledger: rows trained must be {asked}, got {ledger.rows_trained}")
    return found


def check_rows(rows: pa.Table, expected: Expected) -> list[str]:
    """Return what is wrong with the recorded rows: lost, twice, of a missing step, of a wrong or too old version."""
    found = []
    twice = [uid for uid, count in Counter(rows["uid"].to_pylist()).items() if count > 1]
    if twice:
        found.append(f"rows: each must be recorded once, got {len(twice)} twice or more: {twice[:SHOWN]}")
    per_step = Counter(rows["optimizer_step"].to_pylist())
    size = expected.prompts_per_step * expected.group_size
    wrong = {step: per_step[step] for step in range(1, expected.num_steps + 1) if per_step[step] != size}
    if wrong:
        found.append(f"steps: each must have {size} rows, got {_some(wrong)}")
    if strange := sorted(set(per_step) - set(range(1, expected.num_steps + 1)), key=str):
        found.append(f"steps: must be 1 to {expected.num_steps}, got {strange[:SHOWN]}")
    groups: dict[str, list[int]] = {}
    for group, step in zip(rows["group_id"].to_pylist(), rows["optimizer_step"].to_pylist(), strict=True):
        groups.setdefault(group, []).append(step)
    torn = {
        group: steps
        for group, steps in groups.items()
        if len(steps) != expected.group_size or len(set(steps)) > 1
    }
    if torn:
        found.append(f"groups: each must be {expected.group_size} rows of one step, got {_some(torn)}")
    return found + _check_versions(rows, expected)


def _check_versions(rows: pa.Table, expected: Expected) -> list[str]:
    start, end, trained, step, age = (
        np.array(rows[name].to_pylist(), np.float64)
        for name in (
            "policy_version_start",
            "policy_version_end",
            "trained_policy_version",
            "optimizer_step",
            "staleness",
        )
    )
    rules = {
        "its version must be the one before its step": trained == step - 1,
        "its versions must grow from its start to its end and its training": (start <= end)
        & (end <= trained),
        "its age must be the difference of its versions": age == trained - start,
        f"its age must be at most {expected.max_staleness}": age <= expected.max_staleness,
    }
    uids = rows["uid"]
    return [
        f"versions: {rule}, got {int((~holds).sum())} rows: "
        f"{uids.filter(pa.array(~holds)).to_pylist()[:SHOWN]}"
        for rule, holds in rules.items()
        if not holds.all()
    ]


def check_metrics(metrics: pa.Table, expected: Expected) -> list[str]:
    """Return what is wrong with what the actor measured: each step once, in the order of time."""
    mine = metrics.filter(
        pc.and_(pc.equal(metrics["role"], "actor"), pc.equal(metrics["name"], "reward/mean"))
    )
    steps = mine["step"].to_pylist()
    count = Counter(steps)
    wrong = {step: count[step] for step in range(1, expected.num_steps + 1) if count[step] != 1}
    found = [f"metrics: each step must be measured once, got {_some(wrong)}"] if wrong else []
    in_time = mine.sort_by("time")["step"].to_pylist()
    if not wrong and in_time != sorted(steps):
        late = [after for before, after in pairwise(in_time) if after < before]
        found.append(f"metrics: steps must follow one another in time, got {late[:SHOWN]} late")
    return found


def check_order(rows: pa.Table, orders: Sequence[Iterable[str]], ledger: Mapping[str, int]) -> list[str]:
    """Return whether prompts were skipped: holes in the order of each preprocess service before the last trained one.

    `orders` yield the prompts' uids as they are drawn, without end. A prompt that was drawn before the last one trained
    on is trained on, waits, or was refused; more holes than the queue counts of these are losses.
    """
    trained = set(rows["group_id"].to_pylist())
    found_trained: set[str] = set()
    holes: list[str] = []
    for order in orders:
        behind_the_last: list[str] = []
        for uid in order:
            if uid in trained:
                found_trained.add(uid)
                holes += behind_the_last
                behind_the_last = []
            else:
                behind_the_last.append(uid)
            if len(behind_the_last) > ledger["prompts_issued"]:
                break
    allowed = (
        ledger["prompts_waiting"]
        + ledger["prompts_refused"]
        + (ledger["rows_waiting"] + ledger["rows_dropped"]) // ledger["group_size"]
    )
    found = []
    if strange := sorted(trained - found_trained):
        found.append(f"prompts: each trained one must be of the order, got {strange[:SHOWN]}")
    if len(holes) > allowed:
        found.append(
            f"prompts: at most {allowed} before the last trained one may be waiting, refused or dropped, "
            f"got {len(holes)}: {holes[:SHOWN]}"
        )
    return found


def last_reward(rows: pa.Table, num_steps: int) -> float:
    """Return the mean reward of the rows of the last quarter of the steps; NaN without any."""
    late = pc.greater(rows["optimizer_step"], int(num_steps * (1 - LAST_SHARE)))
    mean = pc.mean(rows.filter(late)["reward"]).as_py()
    return float("nan") if mean is None else float(mean)


def check_reward(reward: float, undisturbed: Sequence[float], margin: float) -> list[str]:
    """Return whether a reward is further than `margin` from all those of undisturbed runs."""
    if not undisturbed:
        return []
    low, high = min(undisturbed) - margin, max(undisturbed) + margin
    if low <= reward <= high:
        return []
    return [f"reward: must be within {low:.3f} and {high:.3f}, as undisturbed runs are, got {reward:.3f}"]


def _order(config: RunConfig) -> list[Iterable[str]]:
    """Return the uids of prompts as each preprocess service draws them."""
    sources = [Manifest(source, name=name) for name, source in config.data.train_sources().items()]
    weights = config.data.train_sources()
    sizes = [SourceSize(each.name, len(each), weights[each.name].weight) for each in sources]
    names = [f"-{each.name}" if len(sources) > 1 else "" for each in sources]
    return [
        (
            f"{draw.epoch}-{draw.row}{names[draw.source]}"
            for draw in PromptOrder(
                sizes, seed=config.seed, shuffle=config.data.shuffle, share=(index, config.data.num_workers)
            )
        )
        for index in range(config.data.num_workers)
    ]


def _left_behind(run_dir: Path) -> list[str]:
    """Return half-written files that a run must not leave."""
    patterns = (".*.partial", ".*.replaced", ".*.unfinished", "*.draft", "queue.uri*")
    left = [path.relative_to(run_dir).as_posix() for name in patterns for path in run_dir.rglob(name)]
    return [f"files: none may be half-written, got {sorted(left)[:SHOWN]}"] if left else []


def _events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "history.jsonl").read_text().splitlines()]


def _read(paths: Sequence[Path], columns: list[str]) -> pa.Table:
    parts = [pq.read_table(path, columns=columns, partitioning=None) for path in paths]
    return pa.concat_tables(parts, promote_options="permissive")


def _some(found: Mapping[Any, Any]) -> str:
    shown = ", ".join(f"{key}: {value}" for key, value in list(found.items())[:SHOWN])
    return shown + (f" and {len(found) - SHOWN} more" if len(found) > SHOWN else "")
