"""A real queue server in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


@contextmanager
def storage_server(coordinator: str, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `python -m flight serve --storage` on a free port; yields its address and the process, killed afterwards."""
    with queue_server("--storage", coordinator, *options) as (uri, process):
        try:
            yield uri, process
        finally:
            process.kill()


@contextmanager
def queue_server(*options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `python -m flight serve` on a free port; yields its address and the process, which is gone afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-m", "flight", "serve", "--port", "0", "--parent-pid", str(os.getpid()), *options],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    try:
        line = process.stdout.readline() if process.stdout else ""
        if not line.startswith(("listening on grpc://127.0.0.1:", "listening on grpc+tls://127.0.0.1:")):
            raise RuntimeError(f"serve: first line must be its address, got {line!r}")
        yield line.removeprefix("listening on ").strip(), process
    finally:
        process.terminate()
        process.communicate(timeout=10)
