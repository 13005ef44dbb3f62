"""A small process that ends all services when their supervisor is gone, even by SIGKILL. Standard library only.

The supervisor runs this file by its path and writes one line a service to its standard input: `+PGID` when
the service starts, `-PGID` when it has ended. When the input ends, or the parent is another, every group
still listed is killed. It needs nothing of the services, so it also covers programs that are not ours and
their children.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys

CHECK_INTERVAL_S = 1.0


def update(groups: set[int], line: bytes) -> None:
    """Apply one line of the protocol; a malformed one is ignored."""
    sign, number = line[:1], line[1:].strip()
    if not number.isdigit() or int(number) <= 1:
        return
    if sign == b"+":
        groups.add(int(number))
    elif sign == b"-":
        groups.discard(int(number))


def main() -> None:
    """Read lines until the supervisor is gone, then kill what it left."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent_pid = int(sys.argv[1])
    groups: set[int] = set()
    rest = b""
    while True:
        readable, _, _ = select.select([0], [], [], CHECK_INTERVAL_S)
        if not readable:
            if os.getppid() != parent_pid:  # gone, though another process still holds its end of the pipe
                break
            continue
        chunk = os.read(0, 65536)
        if not chunk:
            break
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            update(groups, line)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
