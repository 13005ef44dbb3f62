"""Server processes of a worker, and what the kernel says about processes: CPU seconds and peak memory (Linux)."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
START_S = 30.0


def start_server(arguments: Sequence[str], ready: str) -> tuple[subprocess.Popen[str], str]:
    """Start `python ARGUMENTS` and return it with what follows `ready` in its first line.

    Raises:
        RuntimeError: it did not print that line in time.
    """
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
    stdout = process.stdout
    line = ""
    if stdout is not None and readable(stdout, START_S):
        line = stdout.readline().strip()
    if not line.startswith(ready):
        process.kill()
        raise RuntimeError(f"{' '.join(arguments)}: first line must start with {ready!r}, got {line!r}")
    return process, line.removeprefix(ready)


def readable(stream: TextIO, deadline_s: float) -> bool:
    """Return whether a pipe has something to read, or its end, by the deadline."""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        return bool(selector.select(deadline_s))


def stop_server(process: subprocess.Popen[str]) -> None:
    """End a server, in time."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)


def descendants(pid: int) -> list[int]:
    """Return the processes below one, at any depth."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := _stat(int(entry))):
            children.setdefault(int(fields[1]), []).append(int(entry))
    found, front = [], [pid]
    while front:
        front = [child for parent in front for child in children.get(parent, [])]
        found += front
    return found


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU seconds used so far, those of children that have ended included."""
    return sum(
        sum(int(value) for value in fields[11:15]) / TICKS_PER_S for pid in pids if (fields := _stat(pid))
    )


def name_of(pid: int) -> str:
    """Return the command name of a process, empty if it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def memory_bytes(pids: Iterable[int], field: str = "VmRSS") -> int:
    """Return resident bytes now (VmRSS) or at their peak (VmHWM), in sum."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith(field + ":"):
                    total += int(line.split()[1]) * 1024
    return total


def end_all(pids: Iterable[int], grace_s: float = 3.0) -> None:
    """Kill those of the processes that do not end by themselves in time."""
    deadline = time.monotonic() + grace_s
    left = list(pids)
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if (fields := _stat(pid)) and fields[0] != "Z"]
        time.sleep(0.05)
    for pid in left:
        with suppress(OSError):
            os.kill(pid, 9)


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; none if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
