"""SELECT over the tables as they are now: DuckDB in a process of its own, fed with the columns that the query names.

Needs the extra `sql` (DuckDB). A query sees one snapshot of each table, and nothing else; see
`flight.server.sql_worker` for
what it may do. Its process is killed at the deadline, so a query harms nobody but itself.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from flight.broker import Broker, ReadRequest
from flight.errors import DeadlineExceededError, InvalidRequestError, OverloadedError
from flight.schema import KEY_COLUMNS

MAX_QUERIES = 2
"""Queries that may run at the same time; each may use two cores and a gigabyte."""

MAX_RESULT_ROWS = 1_000_000
MAX_RESULT_BYTES = 256 << 20
MAX_INPUT_BYTES = 4 << 30
"""Most that the columns of one query may hold: they are copied once."""

WORKER = Path(__file__).with_name("sql_worker.py")


class SqlEngine:
    """Answers queries over a broker's tables. Thread-safe."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._slots = threading.BoundedSemaphore(MAX_QUERIES)

    def query(
        self, query: str, names: Sequence[str] | None = None, *, max_rows: int, deadline_s: float
    ) -> pa.Table:
        """Return the answer to one SELECT over the tables of these names, all if None.

        Raises:
            InvalidRequestError: it is not one SELECT over the tables that are there, its answer is too large, or DuckDB
                is not installed.
            DeadlineExceededError: it takes too long.
            OverloadedError: other queries are running.
        """
        if not 0 < max_rows <= MAX_RESULT_ROWS:
            raise InvalidRequestError(f"sql: max_rows must be from 1 to {MAX_RESULT_ROWS}, got {max_rows}")
        if not self._slots.acquire(timeout=deadline_s):
            raise OverloadedError(
                f"sql: queries at the same time must be at most {MAX_QUERIES}, got one more; try later"
            )
        try:
            names = self._broker.list_tables() if names is None else names
            return self._run(query, names, max_rows, deadline_s)
        finally:
            self._slots.release()

    def _run(self, query: str, names: Sequence[str], max_rows: int, deadline_s: float) -> pa.Table:
        tables = {name: self._columns(name) for name in names}
        request = {"query": query, "tables": tables, "max_rows": max_rows, "max_bytes": MAX_RESULT_BYTES}
        with _memory_file("sql-data") as data_file, _memory_file("sql-answer") as result_file:
            with _Worker(data_file, result_file, deadline_s) as worker:
                needs = worker.ask(request)["needs"]
                worker.ask({"data": self._write(needs, data_file)})
            return _read_answer(result_file)

    def _columns(self, name: str) -> list[str]:
        return [*KEY_COLUMNS, *self._broker.describe(name).columns_by_name]

    def _write(self, needs: dict[str, list[str]], data_file: int) -> dict[str, tuple[int, int]]:
        """Copy columns of tables into a memory file; return where each lies."""
        places = {}
        with os.fdopen(data_file, "wb", closefd=False) as sink:
            for name, columns in needs.items():
                rows = self._broker.read(name, ReadRequest(columns=columns))
                if sink.tell() + rows.nbytes > MAX_INPUT_BYTES:
                    raise InvalidRequestError(
                        f"sql: columns of one query must hold at most {MAX_INPUT_BYTES} bytes, got more in {name} "
                        f"{columns}; name fewer columns"
                    )
                start = sink.tell()
                with pa.ipc.new_stream(sink, rows.schema) as out:
                    out.write_table(rows)
                places[name] = (start, sink.tell() - start)
                sink.write(bytes(-sink.tell() % 64))
        return places


class _Worker:
    """The process of one query, which ends with the block or at the deadline."""

    def __init__(self, data_file: int, result_file: int, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER), str(data_file), str(result_file)],
            pass_fds=(data_file, result_file),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._is_late = threading.Event()
        self._timer = threading.Timer(deadline_s, self._kill)
        self._timer.daemon = True
        self._timer.start()

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._timer.cancel()
        self._process.kill()
        self._process.communicate()

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send one line and return the one that answers it."""
        line = ""
        if self._process.stdin is not None and self._process.stdout is not None:
            try:
                self._process.stdin.write(json.dumps(message) + "\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                pass  # It has ended; what it said before tells why.
            line = self._process.stdout.readline()
        if self._is_late.is_set():
            raise DeadlineExceededError(f"sql: the answer must come within {self._deadline_s} s, got none")
        if not line:
            raise InvalidRequestError(
                "sql: query must be one that DuckDB can answer, got the end of its process (out of memory?)"
            )
        answer = json.loads(line)
        if "missing" in answer:
            raise InvalidRequestError(
                "sql: the server must have DuckDB, got none; install the extra beside it: pip install 'relax-omni[sql]'"
            )
        if "refused" in answer:
            raise InvalidRequestError(f"sql: {answer['refused']}")
        return answer

    def _kill(self) -> None:
        self._is_late.set()
        self._process.kill()


@contextmanager
def _memory_file(name: str) -> Iterator[int]:
    descriptor = os.memfd_create(name)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read_answer(result_file: int) -> pa.Table:
    # The map outlives the descriptor, and ends with the last view of it.
    size = os.fstat(result_file).st_size
    return pa.ipc.open_stream(pa.py_buffer(mmap.mmap(result_file, size, prot=mmap.PROT_READ))).read_all()
