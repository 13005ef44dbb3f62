"""Ties the life of a process to another's. For the child's side: call `die_with_parent` first thing in `main`."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
from typing import NoReturn

PR_SET_PDEATHSIG = 1
CHECK_INTERVAL_S = 0.5
EXIT_CODE = 125


def die_with_parent(parent_pid: int) -> None:
    """End this process as soon as process `parent_pid` is gone. Does not block.

    A direct parent: the kernel sends SIGKILL when the thread that started this process ends. Any other, such
    as a launcher's launcher: a watcher thread ends this process with code 125, or its whole group by SIGKILL
    if it leads one. So it does at once when that process is gone already. Children of this process are the
    supervisor's guardian's to end.
    """
    is_direct = os.getppid() == parent_pid
    if is_direct:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            print(
                f"die_with_parent: prctl failed ({os.strerror(ctypes.get_errno())}); watching instead",
                file=sys.stderr,
            )
        if os.getppid() != parent_pid:  # it went between the two calls
            _end("its parent")
    try:
        pidfd: int | None = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        _end(f"process {parent_pid}")
    except OSError:  # a kernel or sandbox without pidfd
        pidfd = None
    arguments = (parent_pid, is_direct, pidfd)
    threading.Thread(target=_watch, args=arguments, name="parent-watch", daemon=True).start()


def _watch(parent_pid: int, is_direct: bool, pidfd: int | None) -> None:
    if pidfd is not None:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        poller.poll()  # a pidfd is readable once its process has ended
    else:
        pause = threading.Event()
        while not _is_gone(parent_pid, is_direct):
            pause.wait(CHECK_INTERVAL_S)
    _end(f"process {parent_pid}")


def _is_gone(parent_pid: int, is_direct: bool) -> bool:
    if is_direct:
        return os.getppid() != parent_pid
    try:
        os.kill(parent_pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _end(who: str) -> NoReturn:
    print(f"ERROR process {os.getpid()}: {who} is gone, ending too", file=sys.stderr, flush=True)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(EXIT_CODE)
