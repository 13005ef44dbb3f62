"""Runs a Python program that nobody trusts: without network, files, environment or much of anything. Linux only.

The program's standard library is there, packages are not (but for those in the interpreter's own site-packages).
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from relax.rewards import sandbox_entry
from relax.rewards.base import RewardFailedError

Isolation = Literal["namespaces", "limits"]

KILL_DEADLINE_S = 5.0
SYSTEM_DIRECTORIES = ("/usr", "/lib", "/lib64", "/lib32", "/bin")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a program may use."""

    wall_s: float = 5.0
    """Seconds from start to end; processor time is bounded by the same number, rounded up."""
    max_memory_bytes: int = 512 << 20
    """Address space of each process."""
    max_files_bytes: int = 16 << 20
    """All files together (`limits`: each file)."""
    max_processes: int = 8
    """Processes and threads together (`limits`: of the same user, whoever started them)."""
    max_output_bytes: int = 1 << 20
    """Standard output and error together."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """How a program ended.

    ending: `exit`: by itself; `time`, `output`: killed at that limit. code: exit code, 128 + number for a signal.
    """

    ending: Literal["exit", "time", "output"]
    code: int
    output: bytes
    errors: bytes


def run_program(source: str, stdin: str, limits: Limits, isolation: Isolation = "namespaces") -> Ran:
    """Run Python source to its end. Blocks up to the limit; nothing of it is left afterwards.

    Raises:
        RewardFailedError: the sandbox could not be made.
    """
    python = os.path.realpath(sys.executable)
    status, theirs = os.pipe()
    with (
        tempfile.TemporaryDirectory(prefix="relax-sandbox-", ignore_cleanup_errors=True) as work_dir,
        os.fdopen(status, "rb") as report,
        _memory_file(source) as program,
        _memory_file(stdin) as words,
    ):
        spec = {
            "isolation": isolation,
            "python": python,
            "work_dir": work_dir,
            "directories": _directories(python),
            "program_fd": program.fileno(),
            "status_fd": theirs,
            "max_memory_bytes": limits.max_memory_bytes,
            "max_files_bytes": limits.max_files_bytes,
            "max_processes": limits.max_processes,
            "max_cpu_s": int(limits.wall_s) + 1,
        }
        command = [python, "-I", "-S", sandbox_entry.__file__, json.dumps(spec)]
        try:
            process = subprocess.Popen(
                command,
                stdin=words.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={},
                cwd="/",
                pass_fds=[program.fileno(), theirs],
                start_new_session=True,
            )
        finally:
            os.close(theirs)
        ran = _until_end(process, limits)
        # What a killed program's processes hold open has gone with them: this does not block.
        problem = report.read().decode(errors="replace")
    if problem:
        raise RewardFailedError(f"sandbox: {isolation} must be allowed here, got {problem}", retry=False)
    return ran


def _memory_file(text: str):
    file = os.fdopen(os.memfd_create("relax-sandbox"), "w+b")
    file.write(text.encode(errors="surrogateescape"))
    file.seek(0)
    return file


def _directories(python: str) -> list[str]:
    """Return the directories that the interpreter needs, those that hold others first."""
    wanted = {*SYSTEM_DIRECTORIES, sys.base_prefix, sys.base_exec_prefix, str(Path(python).parent)}
    kept: list[str] = []
    for path in sorted(wanted):
        if not any(path.startswith(f"{other}/") for other in kept) and path != "/":
            kept.append(path)
    return kept


def _until_end(process: subprocess.Popen[bytes], limits: Limits) -> Ran:
    """Read what the program writes until it has ended or met a limit; it and its kind are gone then."""
    end_s = time.monotonic() + limits.wall_s
    collected = {"output": bytearray(), "errors": bytearray()}
    ending: Literal["exit", "time", "output"] = "exit"
    with process, selectors.DefaultSelector() as selector:
        for name, pipe in (("output", process.stdout), ("errors", process.stderr)):
            if pipe is not None:
                selector.register(pipe, selectors.EVENT_READ, name)
        try:
            while selector.get_map() and ending == "exit":
                remaining_s = end_s - time.monotonic()
                if remaining_s <= 0:
                    ending = "time"
                for key, _ in selector.select(max(remaining_s, 0.0)):
                    chunk = os.read(key.fd, 1 << 16)
                    collected[key.data] += chunk
                    if not chunk:
                        selector.unregister(key.fileobj)
                if sum(map(len, collected.values())) > limits.max_output_bytes:
                    ending = "output"
            if ending == "exit":
                process.wait(max(end_s - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:  # it closed its pipes and goes on
            ending = "time"
        finally:
            _kill(process)
    code = process.returncode
    return Ran(
        ending=ending,
        code=128 - code if code < 0 else code,
        output=bytes(collected["output"][: limits.max_output_bytes]),
        errors=bytes(collected["errors"][: limits.max_output_bytes]),
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the entry, and with it its world; it is asked first, for with limits alone it ends those who fled."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(KILL_DEADLINE_S)
