"""The bus against its peers, side by side: put and take of omni samples by every system in the same rounds.

    python tools/bench_bus.py                                   # everything, under fifteen minutes on two cores
    python tools/bench_bus.py --workloads a,b --systems ours_tcp,flight,memcpy --quick

Workloads: a token-shaped lists, b pixel tensors, c MoE routing, d omni groups that share media, e single rows, f rows
in the table, g concurrent clients. Systems: ours_stream (open streams), ours_shm, ours_tcp, flight (bare pyarrow
Flight), zmq (raw frames), memcpy (the limit), transferqueue and ray (these two in a virtual environment that this tool
makes under --cache). What arrives is compared with what was sent by a hash, outside the timing; a reader reads one byte
of every page.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from busbench import report, rounds
from busbench import workloads as w
from busbench.environment import PINNED, python_of
from busbench.worker import NAMES

IN_ENVIRONMENT = ("transferqueue", "ray")
SYSTEMS_OF = {
    "e": ("ours_stream", "ours_shm", "ours_tcp", "flight", "zmq", "transferqueue", "ray"),
    "f": ("ours_shm", "ours_tcp"),
    "g": ("ours_stream", "ours_shm", "ours_tcp", "flight", "zmq"),
}
"""Who takes part where; in the others all do but open streams, which are about small messages."""

REPEATS = {"a": 20, "b": 3, "c": 3, "d": 5, "e": 100, "f": 50, "g": 4}
SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_BYTES = 2 << 30
QUICK_SCALE = 0.1


def main(argv: list[str] | None = None) -> list[rounds.Result]:
    """Measure, print Markdown, write what was asked for."""
    arguments = _parse(argv)
    # So that workers and files go away as they do after Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    systems, names = arguments.systems.split(","), arguments.workloads.split(",")
    started_s = time.monotonic()
    pythons = interpreters(systems, arguments.cache)
    results = []
    room = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > SHARED_MEMORY_BYTES
    with tempfile.TemporaryDirectory(prefix="bench_bus.", dir=SHARED_MEMORY if room else None) as directory:
        for name in names:
            takes_part = SYSTEMS_OF.get(name, NAMES[1:])
            chosen = {system: pythons[system] for system in systems if system in takes_part}
            workload = w.make(name, arguments.scale)
            print(f"{time.monotonic() - started_s:.0f} s: {workload.describe()}", file=sys.stderr, flush=True)
            results.append(
                rounds.measure(workload, chosen, _plan(name, arguments), arguments.scale, Path(directory))
            )
    page = f"{heading(arguments)}\n\n{report.markdown(results)}"
    print(page)
    print(f"{time.monotonic() - started_s:.0f} s in all", file=sys.stderr)
    if arguments.json:
        arguments.json.write_text(json.dumps(report.to_json(results), indent=1) + "\n")
    if arguments.chart:
        report.draw(results, arguments.chart)
    if arguments.write:
        if arguments.chart:
            link = os.path.relpath(arguments.chart, arguments.write.parent)
            page += f"\n\n![put plus take as multiples of memcpy]({link})"
        arguments.write.write_text(report.replace_block(arguments.write.read_text(), page))
    return results


def interpreters(systems: list[str], cache: Path) -> dict[str, Path | str]:
    """Return the interpreter of each system, or why it is skipped."""
    found: dict[str, Path | str] = {}
    for system in systems:
        if system not in NAMES:
            raise SystemExit(f"--systems: each must be one of {', '.join(NAMES)}, got {system!r}")
        found[system] = rounds.missing(system) or Path(sys.executable)
        if system in IN_ENVIRONMENT:
            try:
                found[system] = python_of(cache)
            except RuntimeError as error:
                found[system] = f"cannot be installed: {error}"
        if isinstance(found[system], str):
            print(f"{system} skipped: {found[system]}", file=sys.stderr, flush=True)
    return found


def heading(arguments: argparse.Namespace) -> str:
    """Return with what, on what and how it was measured."""
    packages = [f"{name} {_version(name)}" for name in ("pyarrow", "pyzmq", "numpy")]
    peers = (
        [pin.replace("==", " ") for pin in PINNED[:4]]
        if set(arguments.systems.split(",")) & {*IN_ENVIRONMENT}
        else []
    )
    return (
        f"Python {platform.python_version()}, {', '.join(packages + peers)}; {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f} at the end. {arguments.rounds} rounds after one to warm up, systems interleaved in "
        f"each; a figure is the median over rounds (in brackets the smallest and the largest). A ratio is of put + "
        "take of the same round: above 1, ours is faster. Ours: put, then take + look at every page + ack, against "
        "one server process. TransferQueue: kv_batch_put and kv_batch_get with two SimpleStorage units on one node; "
        "tensors are made before and rows cleared after, untimed; in (d) media go with every row, since it has no "
        "place for what rows share. Ray: Arrow tables, read by an actor."
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _plan(name: str, arguments: argparse.Namespace) -> rounds.Plan:
    numbers = [int(text) for text in arguments.table_rows.split(",")]
    clients = [int(text) for text in arguments.clients.split(",")]
    return rounds.Plan(
        rounds=arguments.rounds,
        repeats=max(1, REPEATS[name] // (5 if arguments.quick else 1)),
        clients=tuple(clients) if name == "g" else (),
        table_rows=tuple(numbers) if name == "f" else (),
    )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", default=",".join(w.TITLES))
    parser.add_argument("--systems", default=",".join(NAMES))
    parser.add_argument("--rounds", type=int, default=None, help="rounds that count; 5, with --quick 2")
    parser.add_argument(
        "--scale", type=float, default=None, help="times the rows (groups) of a workload; 1, with --quick 0.1"
    )
    parser.add_argument("--quick", action="store_true", help="a look: few rounds, a tenth of the rows")
    parser.add_argument("--table-rows", default="", help="sizes of (f)")
    parser.add_argument("--clients", default="1,2,4,8,16", help="numbers of clients of (g)")
    parser.add_argument(
        "--cache", type=Path, default=Path(".bench-venv"), help="where TransferQueue and Ray live"
    )
    parser.add_argument("--json", type=Path, help="write all samples here")
    parser.add_argument("--chart", type=Path, help="write a chart here (svg)")
    parser.add_argument(
        "--write", type=Path, help="page whose part between the bench_bus markers is replaced"
    )
    arguments = parser.parse_args(argv)
    arguments.rounds = arguments.rounds or (2 if arguments.quick else 5)
    arguments.scale = arguments.scale or (QUICK_SCALE if arguments.quick else 1.0)
    arguments.table_rows = arguments.table_rows or (
        "1000" if arguments.quick else "1000,10000,100000,1000000"
    )
    if unknown := [name for name in arguments.workloads.split(",") if name not in w.TITLES]:
        parser.error(f"--workloads: each must be one of {','.join(w.TITLES)}, got {unknown}")
    return arguments


if __name__ == "__main__":
    main()
