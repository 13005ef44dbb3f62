"""The virtual environment of the systems that need Ray: made once, with pinned versions, and kept."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

PINNED = ("TransferQueue==0.1.11", "ray==2.60.0", "torch==2.13.0", "tensordict==0.15.3", "pyarrow==26.0.1")
INSTALL_S = 600.0


def python_of(directory: Path) -> Path:
    """Return the interpreter of an environment that is there with all pinned versions, made if need be.

    Raises:
        RuntimeError: it cannot be made.
    """
    python = directory / "bin" / "python"
    stamp = directory / ".installed"
    if python.exists() and stamp.exists() and stamp.read_text().split() == list(PINNED):
        return python
    print(f"making {directory} with {', '.join(PINNED)}", file=sys.stderr, flush=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PINNED]
    with tempfile.TemporaryFile("w+") as log:
        for command in ([sys.executable, "-m", "venv", str(directory)], install):
            try:
                code = subprocess.run(
                    command, stdout=log, stderr=log, timeout=INSTALL_S, check=False
                ).returncode
            except (OSError, subprocess.TimeoutExpired) as error:
                raise RuntimeError(f"{' '.join(command[:4])}: {error}") from error
            if code:
                log.seek(0)
                last = " ".join(log.read().strip().splitlines()[-2:])
                raise RuntimeError(f"{' '.join(command[1:4])} ended with {code}: {last[:300]}")
    stamp.write_text("\n".join(PINNED))
    return python
