"""Sixty-four clients at full rate against one server, for minutes: is there an error, and does memory stay flat?

    python tools/load_bus.py --minutes 10                        # without a journal, then with one
    python tools/load_bus.py --minutes 1 --modes journal --clients 16
    python tools/load_bus.py --minutes 10 --write BENCHMARKS.md  # rewrite the figures between the load_bus markers

Half of the clients share memory with the server, half use TCP; they put, take and ack by calls and over open streams,
have rows pushed, read by a filter, and ask for statistics, each as fast as it is answered. The server's memory is
sampled every second; it is flat if the median of the last quarter is at most `--growth` above that of the second (the
first fills pools and caches). Exit code 0 only without an error and with flat memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import numpy as np  # noqa: E402  (after the path)
import pyarrow as pa  # noqa: E402
from busload.clients import rows, tables  # noqa: E402
from busload.figures import Growth, Latencies, growth, replace_block  # noqa: E402

from flight.client import QueueClient  # noqa: E402

MODES = ("memory", "journal")
NUM_READ_ROWS = 2000
SAMPLE_S = 1.0
SLACK_BYTES = 8 << 20
"""Growth that counts as none whatever its share."""
START_S = 300.0
END_S = 120.0


@dataclass(kw_only=True)
class Load:
    """What came of one mode."""

    mode: str
    num_clients: int
    seconds: float = 0.0
    rows: int = 0
    num_bytes: int = 0
    errors: int = 0
    told: list[str] = field(default_factory=list)
    ops: dict[str, Latencies] = field(default_factory=lambda: defaultdict(Latencies))
    server: list[float] = field(default_factory=list)
    """Bytes of the server's memory, sample by sample, shared memory included."""
    clients: list[float] = field(default_factory=list)
    """Bytes of all client processes together."""
    journal: list[float] = field(default_factory=list)
    """Bytes of the journal's files."""

    def problems(self, allowed: float) -> list[str]:
        """Return what does not hold; `allowed` is the share by which memory may grow."""
        found = [f"errors must be none, got {self.errors}: {'; '.join(self.told[:3])}"] if self.errors else []
        for what, samples in (("server", self.server), ("clients", self.clients), ("journal", self.journal)):
            grown = growth(samples) if samples else Growth(1, 1)
            if grown.last > grown.second * (1 + allowed) + SLACK_BYTES:
                found.append(f"the {what} must stay flat, got {grown}")
        return found


def main(argv: list[str] | None = None) -> int:
    """Measure each mode; return the exit code."""
    arguments = _parse(argv)
    # So that servers and clients go away as they do after Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    loads = []
    for mode in arguments.modes:
        loads.append(_measure(mode, arguments))
        block = page(loads, arguments)
        print(block, flush=True)
    problems = [f"{load.mode}: {text}" for load in loads for text in load.problems(arguments.growth)]
    for problem in problems:
        print(f"FAILED: {problem}")
    if arguments.write:
        arguments.write.write_text(replace_block(arguments.write.read_text(), block))
    return 1 if problems else 0


def _measure(mode: str, arguments: argparse.Namespace) -> Load:
    load = Load(mode=mode, num_clients=arguments.clients)
    with tempfile.TemporaryDirectory(prefix="load_bus.") as directory:
        journal = Path(directory) / "journal" if mode == "journal" else None
        server, uri = _serve(Path(directory), journal)
        try:
            _prepare(uri)
            _drive(load, uri, server, journal, arguments)
            _check_server(load, uri)
        finally:
            server.terminate()
            server.wait(END_S)
    return load


def _serve(directory: Path, journal: Path | None) -> tuple[subprocess.Popen[bytes], str]:
    """Start a server and return it with its address."""
    words = ["-m", "flight", "serve", "--port", "0", "--parent-pid", str(os.getpid())]
    words += ["--uri-file", str(directory / "uri"), *(["--journal", str(journal)] if journal else [])]
    server = subprocess.Popen([sys.executable, *words], env=_environment(), stdout=subprocess.DEVNULL)
    ends_at = time.monotonic() + START_S
    while not (directory / "uri").is_file():
        if server.poll() is not None or time.monotonic() > ends_at:
            raise RuntimeError(f"load_bus: the server must listen within {START_S:.0f} s, got nothing")
        time.sleep(0.05)
    return server, (directory / "uri").read_text().strip()


def _prepare(uri: str) -> None:
    """Make the tables, and the rows that stay."""
    source = np.random.default_rng(0)
    with QueueClient(uri, identity="load-owner") as client:
        for spec in tables():
            client.create_table(spec)
        names = (f"read-{at}" for at in range(NUM_READ_ROWS))
        client.put("readers", rows(source, names, pixels=False, count=NUM_READ_ROWS))


def _drive(
    load: Load,
    uri: str,
    server: subprocess.Popen[bytes],
    journal: Path | None,
    arguments: argparse.Namespace,
) -> None:
    """Let the clients work, and look at memory meanwhile."""
    share = -(-arguments.clients // arguments.processes)
    seconds = 60 * arguments.minutes
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "busload.clients", uri, str(first), str(count), str(seconds)],
            env=_environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        for first in range(0, arguments.clients, share)
        for count in (min(share, arguments.clients - first),)
    ]
    lock = threading.Lock()
    readers = [threading.Thread(target=_listen, args=(load, lock, each)) for each in workers]
    for reader in readers:
        reader.start()
    began_at = time.monotonic()
    while time.monotonic() - began_at < seconds and all(each.poll() is None for each in workers):
        time.sleep(SAMPLE_S)
        load.server.append(_memory(server.pid))
        load.clients.append(sum(_memory(each.pid) for each in workers))
        if journal is not None:
            load.journal.append(_disk(journal))
    load.seconds = time.monotonic() - began_at
    for each in workers:
        if each.wait(END_S):
            load.errors += 1
            load.told.append(f"a process of clients ended with code {each.returncode}")
    for reader in readers:
        reader.join(END_S)


def _listen(load: Load, lock: threading.Lock, worker: subprocess.Popen[str]) -> None:
    """Add up what a process of clients says."""
    for line in worker.stdout or ():
        facts = json.loads(line)
        with lock:
            load.rows += facts["rows"]
            load.num_bytes += facts["bytes"]
            load.errors += facts["errors"]
            load.told += facts["told"]
            for name, counts in facts["ops"].items():
                load.ops[name].merge(counts)


def _check_server(load: Load, uri: str) -> None:
    """See that the server counts as the clients do: nothing dead, nothing but leases that were given back."""
    with QueueClient(uri, identity="load-owner") as client:
        stats: dict[str, Any] = client.stats()
    for name, facts in stats.items():
        consumer = facts["consumers"]["c"]
        open_rows = consumer["ready"] + consumer["leased"] + consumer["unready"]
        if facts["put"] != consumer["acked"] + open_rows + consumer["dead"] or consumer["dead"]:
            load.errors += 1
            load.told.append(
                f"table {name}: rows put must be acked or waiting, got {facts['put']} and {consumer}"
            )


def page(loads: list[Load], arguments: argparse.Namespace) -> str:
    """Return the figures as Markdown."""
    lines = [
        f"{arguments.clients} clients in {arguments.processes} processes, {arguments.minutes:g} minutes each; Python "
        f"{platform.python_version()}, pyarrow {pa.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[1]:.1f} "
        "over the last five minutes. Rows put and taken are counted both ways; memory is the median of the second and "
        "of the last quarter.",
        "",
        "| server | rows/s | MB/s | errors | server memory | clients' memory | journal |",
        "|---|---|---|---|---|---|---|",
    ]
    for load in loads:
        per_s = (f"{load.rows / load.seconds:,.0f}", f"{load.num_bytes / load.seconds / 1e6:.0f}")
        memory = [
            str(growth(each)) if len(each) >= 8 else "-" for each in (load.server, load.clients, load.journal)
        ]
        name = "with a journal" if load.mode == "journal" else "in memory"
        lines.append(f"| {' | '.join([name, *per_s, str(load.errors), *memory])} |")
    lines += [
        "",
        f"| p50 / p99 ms | {' | '.join(load.mode for load in loads)} |",
        "|---" * (len(loads) + 1) + "|",
    ]
    for name in dict.fromkeys(name for load in loads for name in sorted(load.ops)):
        cells = [
            f"{1e3 * load.ops[name].percentile_s(50):.1f} / {1e3 * load.ops[name].percentile_s(99):.0f}"
            if load.ops[name].counts
            else "-"
            for load in loads
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _memory(pid: int) -> float:
    try:
        return float(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0.0


def _disk(directory: Path) -> float:
    """Return the bytes of all files; those that go meanwhile do not count."""
    num_bytes = 0
    for path in directory.iterdir():
        with suppress(FileNotFoundError):
            num_bytes += path.stat().st_size
    return float(num_bytes)


def _environment() -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "tools"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": "1",
    }


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="of each mode")
    parser.add_argument("--clients", type=int, default=64, help="connections")
    parser.add_argument("--processes", type=int, default=4, help="in which the clients are")
    parser.add_argument(
        "--modes", type=lambda text: text.split(","), default=list(MODES), help="memory,journal"
    )
    parser.add_argument("--growth", type=float, default=0.05, help="share by which memory may grow")
    parser.add_argument("--write", type=Path, help="page whose part between the load_bus markers is replaced")
    arguments = parser.parse_args(argv)
    if unknown := [mode for mode in arguments.modes if mode not in MODES]:
        parser.error(f"--modes: each must be one of {','.join(MODES)}, got {unknown}")
    if arguments.minutes * 60 < 8 * SAMPLE_S:
        parser.error(f"--minutes: must be at least {8 * SAMPLE_S / 60:.2f}, got {arguments.minutes}")
    return arguments


if __name__ == "__main__":
    raise SystemExit(main())
