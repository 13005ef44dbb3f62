"""The one-page report of a run: `report.html`, self-contained, readable without a network. It measures nothing.

It is made from what a run leaves on disk (`rollouts/*.parquet`, `evaluation/*.parquet`, metrics) and from what the
caller has in hand.
Questions, answers and file names are untrusted text: every value is escaped, and the page allows no script.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from relax.observe.embedding import Embedded, EmbeddingLimits, MediaEmbedder
from relax.observe.metrics import TIME_PREFIX, read_metrics
from relax.observe.progress import format_duration
from relax.observe.recorder import read_rollouts
from relax.records import split_by

LIBRARIES = ("torch", "transformers", "megatron-core", "pyarrow", "pyzmq", "numpy", "av", "librosa", "pillow")
ROLLOUT_COLUMNS = ("modality", "reward", "trained_policy_version", "staleness", "created_at")
MAX_TEXT_CHARS = 2000
MAX_ERROR_LINES = 50


@dataclass(frozen=True, kw_only=True)
class ReportInputs:
    """What the run knows and its files do not say. Everything may be left out."""

    run_name: str = ""
    """Title of the page; absent: the name of the run directory."""
    outcome: str = ""
    """How the run ended, in a few words."""
    config_text: str = ""
    """The configuration as YAML; shown, and digested with blake2b."""
    duration_s: float | None = None
    """Seconds from start to end; absent: left out."""
    max_staleness: int | None = None
    """The bound K in policy versions; absent: not drawn."""
    rows_per_version: int | None = None
    """Rollouts that one policy version consumes; absent: the bound is given in policy versions only."""
    eval_rollouts: pa.Table | None = None
    """Rows of table `eval_rollouts`; absent: read from `evaluation/*.parquet`."""
    events: Sequence[tuple[str, str]] = ()
    """(time, text) of what befell the run beside its steps, such as restarts."""
    row_errors: pa.Table | None = None
    """Rows of table `row_errors`; absent: none."""
    media_base_dirs: Mapping[str, str | os.PathLike[str]] = field(default_factory=dict)
    """Where relative media paths count from, by evaluation set; a set that is absent: the working directory."""
    read_media: Callable[..., bytes] | None = None
    """Reads media sources that are no plain files, given `base_dir`; absent: these are named, not shown."""
    confine_media: bool = False
    """Whether only media below their set's directory are shown: it is rows of others that say which."""


@dataclass(frozen=True, kw_only=True)
class ReportLimits:
    """How much the page may hold."""

    answers_per_modality: int = 4
    """Wrong answers shown of each modality, slowest first."""
    wrong_below: float = 0.5
    """An answer is wrong when its reward is below this."""
    embedding: EmbeddingLimits = field(default_factory=EmbeddingLimits)


def build_report(
    run_dir: str | os.PathLike[str], inputs: ReportInputs | None = None, *, limits: ReportLimits | None = None
) -> Path:
    """Write `report.html` into `run_dir` and return its path. Missing parts of a run become sentences that say so."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    directory, inputs, limits = Path(run_dir), inputs or ReportInputs(), limits or ReportLimits()
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= {"duration": format_duration, "number": _number}
    template = environment.get_template("report.html.jinja")
    page = template.render(_page(directory, inputs, limits))
    path = directory / "report.html"
    unfinished = directory / ".report.html.unfinished"
    unfinished.write_text(page, encoding="utf-8")
    unfinished.replace(path)
    return path


def _page(directory: Path, inputs: ReportInputs, limits: ReportLimits) -> dict[str, Any]:
    from relax.observe.charts import ChartMaker

    charts = ChartMaker()
    rollouts = read_rollouts(directory / "rollouts", ROLLOUT_COLUMNS)
    evals = (
        inputs.eval_rollouts if inputs.eval_rollouts is not None else read_rollouts(directory / "evaluation")
    )
    errors = inputs.row_errors if inputs.row_errors is not None else pa.table({})
    rewards = _rewards(charts, rollouts, evals)
    metrics = read_metrics(directory)
    return {
        "title": inputs.run_name or directory.resolve().name,
        "outcome": inputs.outcome,
        "facts": _facts(inputs, rollouts),
        "versions": _versions(),
        "config_text": inputs.config_text,
        "rewards": rewards,
        "staleness": _staleness(charts, rollouts, inputs),
        "throughput": _throughput(charts, rollouts),
        "mismatch": _mismatch(charts, metrics),
        "time_shares": _time_shares(charts, metrics),
        "errors": _errors(errors),
        "events": [(_clip(moment, 40), _clip(text, 400)) for moment, text in inputs.events],
        "wrong": _wrong_answers(evals, limits, _embedders(evals, limits, inputs)),
        "wrong_below": limits.wrong_below,
        "num_answers": limits.answers_per_modality,
    }


def _facts(inputs: ReportInputs, rollouts: pa.Table) -> list[tuple[str, str]]:
    facts = []
    if inputs.duration_s is not None:
        facts.append(("Duration", format_duration(inputs.duration_s)))
    if len(rollouts):
        versions = pc.min_max(rollouts["trained_policy_version"]).as_py()
        facts.append(("Policy versions trained", f"{versions['min']} to {versions['max']}"))
        facts.append(("Rollouts recorded", f"{len(rollouts):,}"))
    if inputs.max_staleness is not None:
        bound = f"{inputs.max_staleness} policy versions"
        if inputs.rows_per_version is not None:
            bound += f" = {inputs.max_staleness * inputs.rows_per_version:,} rollouts"
        facts.append(("Staleness bound", bound))
    if inputs.config_text:
        digest = hashlib.blake2b(inputs.config_text.encode(), digest_size=8).hexdigest()
        facts.append(("Configuration digest", digest))
    return facts


def _versions() -> list[tuple[str, str]]:
    found = [("Python", platform.python_version())]
    for library in LIBRARIES:
        try:
            found.append((library, version(library)))
        except PackageNotFoundError:
            continue
    return found


def _rewards(charts: Any, rollouts: pa.Table, evals: pa.Table) -> list[dict[str, Any]]:
    """One entry a modality, or a modality of each evaluation set where there are several.

    It has its curve, its last held-out mean and count, and the numbers behind the curve.
    """
    train = _means(rollouts, "trained_policy_version")
    sets = split_by(evals, "source") if len(evals) else {"": evals}
    held_out = {name: _means(rows, "policy_version_start") for name, rows in sets.items()}
    entries = []
    modalities = sorted(train.keys() | {each for means in held_out.values() for each in means})
    for modality, name in _by_set(modalities, held_out):
        train_x, train_y, _ = train.get(modality, _NOTHING)
        eval_x, eval_y, eval_count = held_out[name].get(modality, _NOTHING)
        title = f"{modality}, {name}" if len(held_out) > 1 and modality in held_out[name] else modality
        entries.append(
            {
                "modality": title,
                "svg": charts.reward_curve(f"Mean reward, {title}", (train_x, train_y), (eval_x, eval_y)),
                "first": eval_y[0] if len(eval_y) > 1 else None,
                "final": eval_y[-1] if len(eval_y) else None,
                "final_version": int(eval_x[-1]) if len(eval_x) else None,
                "num_held_out": int(eval_count[-1]) if len(eval_count) else 0,
                "train": train_y[-10:].mean() if len(train_y) else None,
                "points": list(zip(eval_x.tolist(), eval_y.tolist(), eval_count.tolist(), strict=True)),
            }
        )
    return entries


def _by_set(modalities: list[str], held_out: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return each modality with every evaluation set that has it, or with any one if none has."""
    found = []
    for modality in modalities:
        names = [name for name, means in held_out.items() if modality in means]
        found += [(modality, name) for name in names or list(held_out)[:1]]
    return found


_NOTHING = (np.zeros(0), np.zeros(0), np.zeros(0, dtype=np.int64))


def _means(table: pa.Table, version_column: str) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return (policy versions [N], mean rewards [N], row counts [N]) by modality, without unscored rows."""
    if not len(table):
        return {}
    table = table.select(["modality", "reward", version_column]).filter(pc.is_finite(table["reward"]))
    grouped = table.group_by(["modality", version_column]).aggregate(
        [("reward", "mean"), ("reward", "count")]
    )
    means = {}
    for modality in pc.unique(grouped["modality"]).to_pylist():
        rows = grouped.filter(pc.equal(grouped["modality"], modality)).sort_by(version_column)
        columns = (rows[version_column], rows["reward_mean"], rows["reward_count"])
        means[modality] = tuple(column.to_numpy() for column in columns)
    return means


def _staleness(charts: Any, rollouts: pa.Table, inputs: ReportInputs) -> dict[str, Any] | None:
    ages = rollouts["staleness"].drop_null() if len(rollouts) else []
    if not len(ages):
        return None
    counts = {row["values"]: row["counts"] for row in pc.value_counts(ages).to_pylist()}
    ordered = dict(sorted(counts.items()))
    svg = charts.bars(
        "Sample age in policy versions", ordered, "age in policy versions", bound=inputs.max_staleness
    )  # fmt: skip
    return {"svg": svg, "mean": pc.mean(ages).as_py(), "max": max(ordered), "counts": list(ordered.items())}


def _throughput(charts: Any, rollouts: pa.Table) -> dict[str, Any] | None:
    """Rollouts generated a second, in at most 60 equal spans of the run."""
    if len(rollouts) < 2:
        return None
    moments = np.sort(rollouts["created_at"].drop_null().cast(pa.int64()).to_numpy()) / 1e6
    lasted_s = float(moments[-1] - moments[0]) if len(moments) else 0.0
    if lasted_s <= 0:
        return None
    num_spans = int(np.clip(lasted_s / 2, 4, 60))
    counts, edges = np.histogram(moments - moments[0], bins=num_spans)
    rates = counts / np.diff(edges)
    svg = charts.line(
        "Rollouts a second",
        (edges[:-1] + edges[1:]) / 2,
        rates,
        ("seconds since the first rollout", "samples / s"),
    )
    return {
        "svg": svg,
        "mean": len(moments) / lasted_s,
        "median": float(np.median(rates)),
        "max": float(rates.max()),
    }


def _mismatch(charts: Any, metrics: pa.Table) -> dict[str, Any] | None:
    """How far the trainer's logprobs were from the rollouts', and how often its routers would choose other experts."""
    steps, differences = _series(metrics, "logprob_difference_mean_nats")
    if not len(steps):
        return None
    _, routing = _series(metrics, "routing_mismatch")
    return {
        "svg": charts.line(
            "Logprob difference of trainer and rollout", steps, differences, ("optimizer step", "mean, nats")
        ),
        "mean": float(differences.mean()),
        "last": float(differences[-10:].mean()),
        "agreement": 1 - float(routing.mean()) if len(routing) else None,
    }


def _series(metrics: pa.Table, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps [N], values [N]) of a metric that one role has."""
    rows = metrics.filter(pc.equal(metrics["name"], name)).sort_by("step")
    return rows["step"].to_numpy(), rows["value"].to_numpy()


def _time_shares(charts: Any, metrics: pa.Table) -> dict[str, Any] | None:
    timed = metrics.filter(pc.starts_with(metrics["name"], TIME_PREFIX))
    if not len(timed):
        return None
    sums = timed.group_by(["role", "name"]).aggregate([("value", "sum")]).to_pylist()
    roles: dict[str, list[tuple[str, float]]] = {}
    for row in sorted(sums, key=lambda row: (row["role"], -row["value_sum"])):
        part = row["name"].removeprefix(TIME_PREFIX).removesuffix("_s")
        if row["value_sum"] > 0:
            roles.setdefault(row["role"], []).append((part.replace("_", " "), row["value_sum"]))
    if not roles:
        return None
    cut = {role: _largest(parts, 6) for role, parts in roles.items()}
    return {"svg": charts.shares("Share of time by role and part", cut), "roles": list(roles.items())}


def _largest(parts: list[tuple[str, float]], num_parts: int) -> list[tuple[str, float]]:
    if len(parts) <= num_parts:
        return parts
    rest = sum(seconds for _, seconds in parts[num_parts - 1 :])
    return [*parts[: num_parts - 1], ("other", rest)]


def _errors(errors: pa.Table) -> dict[str, Any]:
    """Count rows by stage, place and reason, most frequent first."""
    names = ("stage", "place", "reason")
    columns = [
        errors[name].to_pylist() if name in errors.column_names else [""] * len(errors) for name in names
    ]
    counted = Counter(zip(*columns, strict=True))
    lines = [
        (*(_clip(str(cell), 400) for cell in key), number)
        for key, number in counted.most_common(MAX_ERROR_LINES)
    ]
    return {"total": len(errors), "lines": lines, "num_more": max(0, len(counted) - MAX_ERROR_LINES)}


def _wrong_answers(
    evals: pa.Table, limits: ReportLimits, embedders: Mapping[str, MediaEmbedder]
) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return (modality, its slowest wrong answers): of the last evaluation first, then of earlier ones."""
    if not len(evals):
        return []
    reward = pc.fill_null(evals["reward"], float("nan"))
    wrong = evals.filter(pc.invert(pc.greater_equal(reward, limits.wrong_below)))
    order = [("modality", "ascending"), ("policy_version_start", "descending"), ("generate_s", "descending")]
    chosen: dict[str, list[dict[str, Any]]] = {}
    seen: set[tuple] = set()
    for row in wrong.sort_by(order).to_pylist():
        paths = row.get("media_paths") or []
        key = (row["prompt_text"], *paths)
        answers = chosen.setdefault(row["modality"], [])
        if key in seen or len(answers) >= limits.answers_per_modality:
            continue
        seen.add(key)
        embedder = embedders[row.get("source") or ""]
        media: list[Embedded] = [embedder.embed(path) for path in paths]
        texts = {
            name: _clip(row[name] or "") for name in ("prompt_text", "completion_text", "reference_answer")
        }
        answers.append(row | texts | {"media": media})
    return list(chosen.items())


def _embedders(evals: pa.Table, limits: ReportLimits, inputs: ReportInputs) -> dict[str, MediaEmbedder]:
    """Return what embeds the media of each evaluation set; together they keep to the page's limit."""
    names = list(split_by(evals, "source")) if len(evals) else []
    shared = replace(limits.embedding, max_total_bytes=limits.embedding.max_total_bytes // max(1, len(names)))
    made = {}
    for name in names:
        base_dir = Path(inputs.media_base_dirs.get(name, Path.cwd()))
        read = partial(inputs.read_media, base_dir=base_dir) if inputs.read_media is not None else None
        made[name] = MediaEmbedder(base_dir, shared, read, is_confined=inputs.confine_media)
    return made


def _clip(text: str, max_chars: int = MAX_TEXT_CHARS) -> str:
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}… ({len(text) - max_chars:,} more characters)"


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None or not np.isfinite(value) else f"{value:,.{digits}f}"
