"""A few clients of the load test for some seconds: every kind of work is done, and nothing fails."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.kit.server import REPOSITORY

pytestmark = pytest.mark.slow


def test_load_of_a_few_seconds_has_no_error():
    """Calls, streams, subscribers and readers, by shared memory and TCP, on a server with a journal."""
    words = ["--minutes", "0.2", "--clients", "16", "--processes", "2", "--modes", "journal", "--growth", "9"]
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "tools" / "load_bus.py"), *words],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    for name in ("put", "take", "ack", "stream put", "stream take", "pushed", "pushed ack", "read", "stats"):
        assert f"\n| {name} | " in done.stdout
