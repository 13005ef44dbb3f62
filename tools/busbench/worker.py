"""The process of one system: maps the workload, answers one JSON command a line. Timing happens here.

    python -m busbench.worker SYSTEM WORKLOAD DIRECTORY GROUP_SIZE

Each system has a process of its own so that its libraries, threads and memory cannot disturb the others. The first
line of stdout says that it is ready; whatever libraries print goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from busbench import workloads as w
from busbench.processes import cpu_seconds, descendants, end_all, memory_bytes

NAMES = ("ours_stream", "ours_shm", "ours_tcp", "flight", "zmq", "memcpy", "transferqueue", "ray")
CLIENT_S = 120.0


def make_system(name: str, workload: w.Workload) -> Any:
    """Return a running system.

    Raises:
        ValueError: there is none of that name.
    """
    if name in ("transferqueue", "ray"):
        from busbench import ray_systems

        return {"transferqueue": ray_systems.TransferQueue, "ray": ray_systems.RayStore}[name](workload)
    from busbench import systems

    classes: dict[str, Callable[[w.Workload], Any]] = {
        "ours_stream": systems.StreamQueue,
        "ours_shm": systems.SharedQueue,
        "ours_tcp": systems.Queue,
        "flight": systems.BareFlight,
        "zmq": systems.ZeroMq,
        "memcpy": systems.Memcpy,
    }
    if name not in classes:
        raise ValueError(f"system must be one of {NAMES}, got {name!r}")
    return classes[name](workload)


class Worker:
    """Answers commands about one system."""

    def __init__(self, system: Any, workload: w.Workload) -> None:
        self._system = system
        self._workload = workload
        self._clients: list[Any] = [system]
        self._idle_bytes = memory_bytes(system.server_pids())
        for pid in system.server_pids():
            with suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")

    def round(self, repeats: int, budget_s: float) -> dict[str, Any]:
        """Move the workload up to `repeats` times, not beyond `budget_s` after the third."""
        below = descendants(os.getpid())
        before_s = cpu_seconds(below)
        puts, takes, own_s = [], [], 0.0
        ends_at = time.perf_counter() + budget_s
        while len(puts) < repeats and (len(puts) < 3 or time.perf_counter() < ends_at):
            self._system.prepare()
            own_s -= time.process_time()
            put_s, take_s = _timed(self._system)
            own_s += time.process_time()
            puts.append(put_s)
            takes.append(take_s)
        servers_s = cpu_seconds(descendants(os.getpid())) - before_s
        return {"put_s": puts, "take_s": takes, "cpu_s": own_s + servers_s, "server_cpu_s": servers_s}

    def clients(self, num_clients: int, repeats: int) -> dict[str, Any]:
        """Let clients move the workload at the same time, a thread each; `rows_per_s` is of all together."""
        while len(self._clients) < num_clients:
            self._clients.append(self._system.client(f"client{len(self._clients)}"))
        barrier = threading.Barrier(num_clients + 1)
        times: list[tuple[float, float]] = []
        errors: list[Exception] = []

        def work(system: Any) -> None:
            barrier.wait(CLIENT_S)
            try:
                for _ in range(repeats):
                    system.prepare()
                    times.append(_timed(system))
            except Exception as error:  # Told to the caller below: a thread has nobody else to tell.
                errors.append(error)

        threads = [
            threading.Thread(target=work, args=(each,), daemon=True) for each in self._clients[:num_clients]
        ]
        for thread in threads:
            thread.start()
        barrier.wait(CLIENT_S)
        start_s = time.perf_counter()
        for thread in threads:
            thread.join(CLIENT_S)
        wall_s = time.perf_counter() - start_s
        if errors or len(times) < num_clients * repeats:
            raise RuntimeError(f"clients must all finish, got {errors or 'a slow one'}")
        return {
            "put_s": [put_s for put_s, _ in times],
            "take_s": [take_s for _, take_s in times],
            "rows_per_s": len(times) * self._workload.rows.num_rows / wall_s,
        }

    def verify(self) -> dict[str, Any]:
        """Move the workload once and return the digest of what arrived."""
        self._system.prepare()
        self._system.put()
        self._system.take()
        return {"digest": self._system.digest()}

    def fill(self, num_rows: int) -> dict[str, Any]:
        """Put rows that stay."""
        start_s = time.perf_counter()
        self._system.fill(num_rows)
        return {"fill_s": time.perf_counter() - start_s}

    def memory(self) -> dict[str, Any]:
        """Return how much the servers held at their peak beyond what they held when idle."""
        pids = self._system.server_pids()
        return {"peak_bytes": memory_bytes(pids, "VmHWM") - self._idle_bytes if pids else None}

    def close(self) -> dict[str, Any]:
        """Stop everything."""
        below = descendants(os.getpid())
        for system in reversed(self._clients):
            system.close()
        end_all(below)
        return {}


def _timed(system: Any) -> tuple[float, float]:
    start_s = time.perf_counter()
    system.put()
    middle_s = time.perf_counter()
    system.take()
    return middle_s - start_s, time.perf_counter() - middle_s


def main() -> None:
    """Answer commands until `close` or the end of the input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    name, workload_name, directory, group_size = sys.argv[1:]
    workload = w.load(workload_name, Path(directory), int(group_size))
    worker: Worker | None = None
    try:
        worker = Worker(make_system(name, workload), workload)
        print(json.dumps({"ready": True}), file=answers, flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            verb = command.pop("verb")
            if verb == "close":
                break
            print(json.dumps(getattr(worker, verb)(**command)), file=answers, flush=True)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"[:500]}), file=answers, flush=True)
        raise
    finally:
        if worker is not None:
            worker.close()
        else:
            end_all(descendants(os.getpid()))


if __name__ == "__main__":
    main()
