"""How much faster a run is when generation and training overlap: samples a second at several bounds, side by side.

    python tools/bench_staleness.py --bounds 0 1 4 --rounds 5 --steps 80 --out runs/staleness

The bounds are interleaved inside each round; ratios are to the first bound of the same round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from bench_learning import run_once


def main() -> None:
    """Run all rounds, print a Markdown table of medians and ranges, write `staleness.json`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 4], help="max_staleness of the runs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--out", type=Path, default=Path("runs/staleness"))
    arguments = parser.parse_args()
    words = [f"num_steps={arguments.steps}", "evaluation.interval_steps=0"]
    speeds: dict[int, list[float]] = {bound: [] for bound in arguments.bounds}
    for number in range(arguments.rounds):
        for bound in arguments.bounds:
            result = run_once(arguments.out, 0, bound, words)
            if "failed" in result:
                raise SystemExit(f"round {number}, max_staleness {bound}: {result['failed']}")
            speeds[bound].append(result["samples_per_s"])
            print(number, bound, round(result["samples_per_s"]), file=sys.stderr, flush=True)
    (arguments.out / "staleness.json").write_text(json.dumps(speeds, indent=1))
    print(table(speeds))


def table(speeds: dict[int, list[float]]) -> str:
    """Return medians of samples a second and of the ratio to the first bound, with their ranges."""
    first = next(iter(speeds.values()))
    lines = ["| K | samples/s, median (range) | ratio to the first, median (range) |", "|---|---|---|"]
    for bound, values in speeds.items():
        ratios = [value / base for value, base in zip(values, first, strict=True)]
        lines.append(
            f"| {bound} | {statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f}) "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
