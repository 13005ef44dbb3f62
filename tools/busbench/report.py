"""From samples to figures: medians, ranges, ratios, Markdown, JSON, a chart. Pure but for the chart's file."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from busbench.rounds import Result

OURS = ("ours_shm", "ours_tcp")
LABELS = {
    "ours_stream": "ours, open streams",
    "ours_shm": "ours, shared memory",
    "ours_tcp": "ours, TCP",
    "flight": "bare pyarrow Flight",
    "zmq": "ZeroMQ raw frames",
    "memcpy": "memcpy (the limit)",
    "transferqueue": "TransferQueue",
    "ray": "Ray object store",
}

Round = Mapping[str, Any]


@dataclass(frozen=True)
class Summary:
    """The middle and the range of some numbers."""

    median: float
    low: float
    high: float

    def text(self, digits: int = 3) -> str:
        """Return `median (low to high)` with significant digits."""
        return f"{number(self.median, digits)} ({number(self.low, 2)} to {number(self.high, 2)})"


def summarize(values: Iterable[float]) -> Summary:
    """Return median, smallest and largest.

    Raises:
        ValueError: there are none.
    """
    found = sorted(values)
    if not found:
        raise ValueError("summarize: values must be at least one, got none")
    return Summary(statistics.median(found), found[0], found[-1])


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile."""
    found = sorted(values)
    return found[min(len(found) - 1, max(0, -(-len(found) * percent // 100).__int__() - 1))]


def number(value: float, digits: int = 3) -> str:
    """Return a number with significant digits and without an exponent."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:.0f}" if abs(rounded) >= 10 ** (digits - 1) else f"{rounded:.{digits}g}"


def round_ms(sample: Round, which: str = "both") -> float:
    """Return what one round says: the median of its repeats, in ms."""
    if which != "both":
        return 1e3 * statistics.median(sample[which])
    return 1e3 * statistics.median(p + t for p, t in zip(sample["put_s"], sample["take_s"], strict=True))


def ratios(peer: Sequence[Round], ours: Sequence[Round]) -> list[float]:
    """Return, round by round, how many times as long as ours a peer takes for put plus take."""
    return [round_ms(p) / round_ms(o) for p, o in zip(peer, ours, strict=False)]


def markdown(results: Sequence[Result]) -> str:
    """Return all tables."""
    blocks = []
    moved = [result for result in results if result.workload in "abcd"]
    if moved:
        blocks.append(moved_table(moved))
    tables: dict[str, Callable[[Result], str]] = {"e": latency_table, "f": size_table, "g": clients_table}
    blocks += [tables[result.workload](result) for result in results if result.workload in tables]
    skipped = _skipped(results)
    return "\n\n".join(blocks + ([skipped] if skipped else []))


def moved_table(results: Sequence[Result]) -> str:
    """Return the table of the workloads that are about bytes: times, ratios, CPU and memory."""
    bases = [base for base in OURS if any(base in result.samples for result in results)]
    columns = ["system", "put ms", "take ms", "put + take ms (range)"]
    columns += [f"times {LABELS[base]} (range)" for base in bases]
    lines = _head([*columns, "CPU s per GB", "peak server bytes per byte live"])
    for result in results:
        scale = "" if result.scale == 1 else f", scale {result.scale:g}"
        lines.append(
            _row([f"**{result.title}, {result.nbytes / 1e6:.1f} MB{scale}**"] + [""] * (len(bases) + 5))
        )
        for system, rounds in result.samples.items():
            cells = [LABELS.get(system, system)]
            cells += [
                number(statistics.median(round_ms(r, key) for r in rounds)) for key in ("put_s", "take_s")
            ]
            cells.append(summarize(round_ms(r) for r in rounds).text())
            for base in bases:
                ours = result.samples.get(base)
                cells.append(summarize(ratios(rounds, ours)).text() if ours and base != system else "")
            gigabytes = sum(len(r["put_s"]) for r in rounds) * result.nbytes / 1e9
            cells.append(number(sum(r["cpu_s"] for r in rounds) / gigabytes, 2))
            peak = result.peak_bytes.get(system)
            lines.append(_row([*cells, number(peak / result.nbytes, 2) if peak is not None else "-"]))
    return "\n".join(lines)


def latency_table(result: Result) -> str:
    """Return percentiles of single puts and takes over all rounds."""
    lines = [
        f"{result.title}, one after the other, over all rounds; a take includes the ack, over open streams that of the "
        "rows before:",
        "",
    ]
    lines += _head(["system", "calls", "put p50 ms", "put p99 ms", "take p50 ms", "take p99 ms"])
    for system, rounds in result.samples.items():
        cells = [LABELS.get(system, system), str(sum(len(r["put_s"]) for r in rounds))]
        for key in ("put_s", "take_s"):
            values = [1e3 * value for r in rounds for value in r[key]]
            cells += [number(percentile(values, 50)), number(percentile(values, 99))]
        lines.append(_row(cells))
    return "\n".join(lines)


def size_table(result: Result) -> str:
    """Return the cost of a put and a take by how many rows are in the table."""
    lines = [f"{result.title}: one row put and taken while others wait in the table:", ""]
    head = ["system", "rows in the table", "put p50 ms", "take + ack p50 ms", "take + ack p99 ms"]
    lines += _head([*head, "server CPU ms per put + take + ack", "rows/s when filled, batches of 8192"])
    for label, rounds in result.samples.items():
        system, table_rows = label.split()
        takes = [1e3 * value for r in rounds for value in r["take_s"]]
        calls = sum(len(r["put_s"]) for r in rounds)
        fill_s = result.fill_s.get(label, 0.0)
        cells = [LABELS.get(system, system), f"{int(table_rows):,}"]
        cells.append(number(statistics.median(1e3 * value for r in rounds for value in r["put_s"])))
        cells += [number(percentile(takes, 50)), number(percentile(takes, 99))]
        cells.append(number(1e3 * sum(r["server_cpu_s"] for r in rounds) / calls, 2))
        lines.append(_row([*cells, f"{int(table_rows) / fill_s:,.0f}" if fill_s else "-"]))
    return "\n".join(lines)


def clients_table(result: Result) -> str:
    """Return rows a second of all clients together, by their number."""
    counts = sorted({int(label.split()[1]) for label in result.samples})
    lines = [
        f"{result.title}: {result.num_rows} rows a put and a take, rows/s of all clients together (range):",
        "",
    ]
    lines += _head(["system", *[f"{count} client{'s' if count > 1 else ''}" for count in counts]])
    for system in dict.fromkeys(label.split()[0] for label in result.samples):
        cells = [LABELS.get(system, system)]
        for count in counts:
            rounds = result.samples.get(f"{system} {count}", [])
            found = summarize(r["rows_per_s"] for r in rounds) if rounds else None
            cells.append(f"{found.median:,.0f} ({found.low:,.0f} to {found.high:,.0f})" if found else "-")
        lines.append(_row(cells))
    return "\n".join(lines)


def _head(columns: Sequence[str]) -> list[str]:
    return [_row(columns), _row(["---"] * len(columns), " ").replace(" ", "")]


def _row(cells: Sequence[str], space: str = " ") -> str:
    return "|" + "|".join(f"{space}{cell}{space}" for cell in cells) + "|"


def _skipped(results: Sequence[Result]) -> str:
    reasons: dict[str, list[str]] = {}
    for result in results:
        for label, reason in result.skipped.items():
            name = LABELS.get(label.split()[0], label)
            reasons.setdefault(f"{name}: {reason}", []).append(result.workload)
    return "\n".join(f"Skipped in {', '.join(found)}: {reason}" for reason, found in reasons.items())


def to_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return all samples as plain values."""
    return [asdict(result) for result in results]


def replace_block(page: str, block: str, tool: str = "bench_bus") -> str:
    """Return the page with what is between a tool's two markers replaced.

    Raises:
        ValueError: the page does not have each marker once, in order.
    """
    begin, end = f"<!-- {tool} -->", f"<!-- /{tool} -->"
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"page: it must have {begin} and then {end} once each; add the two lines")
    before, rest = page.split(begin)
    return f"{before}{begin}\n\n{block.strip()}\n\n{end}{rest.split(end)[1]}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join([*_head(columns), *map(_row, rows)])


def draw(results: Sequence[Result], path: Path) -> None:
    """Write bars of put plus take as multiples of memcpy, or in ms where memcpy was not measured."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "bench_bus"  # The same figures give the same file.
    from matplotlib import pyplot as plt

    moved = [result for result in results if result.workload in "abcd" and result.samples]
    if not moved:
        return
    figure, axes = plt.subplots(1, len(moved), figsize=(3.4 * len(moved), 3.2), layout="constrained")
    for axis, result in zip([axes] if len(moved) == 1 else axes, moved, strict=True):
        systems = list(reversed(result.samples))
        found = [summarize(round_ms(r) for r in result.samples[system]) for system in systems]
        limit = found[systems.index("memcpy")].median if "memcpy" in systems else 1.0
        middle = [each.median / limit for each in found]
        spread = [[(e.median - e.low) / limit for e in found], [(e.high - e.median) / limit for e in found]]
        colours = ["#c44" if system in OURS else "#68a" for system in systems]
        axis.barh([LABELS[system] for system in systems], middle, xerr=spread, color=colours)
        axis.set_xscale("log")
        axis.set_title(f"({result.workload}) {result.nbytes / 1e6:.0f} MB", fontsize=9)
        axis.set_xlabel("put + take, times memcpy" if "memcpy" in systems else "put + take, ms", fontsize=8)
        axis.tick_params(labelsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})
    plt.close(figure)
