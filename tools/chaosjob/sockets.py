"""Breaks the TCP connections of another process: it finds them as broken as when a cable is pulled for good.

A copy of each socket is fetched out of the process (`pidfd_getfd`, Linux 5.6), and shut down. That needs the right to
trace it, which a process has over what it has started. Sockets that listen are left alone.
"""

from __future__ import annotations

import ctypes
import os
import socket
from contextlib import suppress
from pathlib import Path

_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None, use_errno=True)


def cut(pid: int) -> int:
    """Break all TCP connections that a process has at this moment; return how many."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return 0
    try:
        return sum(_shut(handle, number) for number in _sockets(pid))
    finally:
        os.close(handle)


def _sockets(pid: int) -> list[int]:
    found = []
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if str(path.readlink()).startswith("socket:"):
                    found.append(int(path.name))
    return found


def _shut(handle: int, number: int) -> bool:
    copy = _libc.syscall(_PIDFD_GETFD, handle, number, 0)
    if copy < 0:
        error = ctypes.get_errno()
        if error in (1, 38):  # EPERM, ENOSYS
            raise OSError(error, f"{os.strerror(error)}: another process's sockets cannot be reached here")
        return False  # closed meanwhile
    with socket.socket(fileno=copy) as found:
        if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
            return False
        with suppress(OSError):
            found.getpeername()  # a socket that listens has nobody at the other end
            found.shutdown(socket.SHUT_RDWR)
            return True
    return False
