"""Puts a program into a sandbox and becomes its waiter. Standard library only; run by path, as `sandbox.py` does.

    entry (host) -> unshare -> first (process 1 of its own world: mounts, then waits) -> program

`namespaces`: no network, no other processes, a file system of a few read-only directories and one small writable one
in memory; when the first process ends, the kernel ends all the others. `limits`: resource limits alone.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import sys
from typing import Any, NoReturn

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MNT_DETACH, AT_FDCWD, AT_RECURSIVE = 2, -100, 0x8000
MOUNT_ATTR_READ_ONLY = 0x1 | 0x2 | 0x4  # read-only, no set-user-id, no devices
SYS_MOUNT_SETATTR = 442  # the same on every architecture
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER = 1, 38, 36
NOBODY = 65534
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
FAILED = 125

libc = ctypes.CDLL(None, use_errno=True)


class MountAttributes(ctypes.Structure):
    """The kernel's struct mount_attr."""

    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def check(what: str, result: int) -> None:
    """Raise OSError with the reason when a call of the C library failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def main() -> NoReturn:
    """Run the program that the first argument describes; end as it does."""
    spec = json.loads(sys.argv[1])
    os.set_inheritable(spec["status_fd"], False)  # the program must not speak for the sandbox
    check("prctl", libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    try:
        if spec["isolation"] == "namespaces":
            run_in_namespaces(spec)
        else:
            run_with_limits(spec)
    except (OSError, ValueError) as error:
        os.write(spec["status_fd"], str(error).encode())
    os._exit(FAILED)


def run_in_namespaces(spec: dict[str, Any]) -> NoReturn:
    """Make a world of its own, and a first process in it."""
    user, group, is_root = os.geteuid(), os.getegid(), os.geteuid() == 0
    kinds = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    check("unshare", libc.unshare(kinds if is_root else kinds | CLONE_NEWUSER))
    if not is_root:
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", f"{NOBODY} {user} 1")
        write("/proc/self/gid_map", f"{NOBODY} {group} 1")
    life, ours = os.pipe()
    first = os.fork()
    if first == 0:
        os.close(ours)
        be_first(spec, life, is_root)
    os.close(life)
    os.close(spec["status_fd"])
    end_like(first)


def be_first(spec: dict[str, Any], life: int, is_root: bool) -> NoReturn:
    """Mount the file system, start the program and wait for it; the world ends with this process."""
    try:
        check("prctl", libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
        if select.select([life], [], [], 0)[0]:  # the parent went before the line above
            os._exit(FAILED)
        make_root(spec)
        program = os.fork()
        if program == 0:
            os.chdir("/box")
            if is_root:
                become_nobody()
                libc.unshare(
                    CLONE_NEWUSER
                )  # so that processes are counted by sandbox, not by user; may be refused
            start(spec, "/box/program.py")
        os.close(spec["status_fd"])
        end_like(program)
    except (OSError, ValueError) as error:
        os.write(spec["status_fd"], str(error).encode())
    os._exit(FAILED)


def make_root(spec: dict[str, Any]) -> None:
    """Make a small file system in memory, with read-only directories of the host's, and move into it."""
    root = spec["work_dir"]
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount(
        "tmpfs",
        root,
        "tmpfs",
        MS_NOSUID | MS_NODEV,
        f"size={spec['max_files_bytes']},nr_inodes=4096,mode=755",
    )
    for source in spec["directories"]:
        if os.path.islink(source):
            os.symlink(os.readlink(source), root + source)
        elif os.path.isdir(source):
            os.makedirs(root + source, exist_ok=True)
            mount(source, root + source, None, MS_BIND | MS_REC)
            attributes = MountAttributes(MOUNT_ATTR_READ_ONLY, 0, 0, 0)
            path = os.fsencode(root + source)
            arguments = (AT_FDCWD, path, AT_RECURSIVE, ctypes.byref(attributes), ctypes.sizeof(attributes))
            check(f"mount_setattr {source}", libc.syscall(SYS_MOUNT_SETATTR, *arguments))
    os.mkdir(f"{root}/dev")
    for device in DEVICES:
        write(root + device, "")
        mount(device, root + device, None, MS_BIND)
    os.mkdir(f"{root}/box")
    os.chmod(f"{root}/box", 0o777)
    os.symlink("box", f"{root}/tmp")
    copy_program(spec, f"{root}/box/program.py")
    os.chdir(root)
    check("pivot_root", libc.syscall(pivot_root_number(), b".", b"."))
    check("umount", libc.umount2(b".", MNT_DETACH))
    os.chdir("/")


def pivot_root_number() -> int:
    """Return the number of a call that the C library has no name for."""
    numbers = {"x86_64": 155, "aarch64": 41, "riscv64": 41, "ppc64le": 203, "s390x": 217}
    if os.uname().machine not in numbers:
        raise ValueError(f"namespaces: machine must be one of {', '.join(numbers)}, got {os.uname().machine}")
    return numbers[os.uname().machine]


def run_with_limits(spec: dict[str, Any]) -> NoReturn:
    """Run the program in the host's world; whatever it leaves behind is killed at its end."""
    check("prctl", libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
    signal.signal(signal.SIGTERM, lambda *_: kill_descendants_and_leave())
    program_path = os.path.join(spec["work_dir"], "program.py")
    copy_program(spec, program_path)
    is_root = os.geteuid() == 0
    if is_root:
        os.chown(spec["work_dir"], NOBODY, NOBODY)
        os.chown(program_path, NOBODY, NOBODY)
    program = os.fork()
    if program == 0:
        try:
            os.chdir(spec["work_dir"])
            if is_root:
                become_nobody()
            start(spec, program_path)
        except (OSError, ValueError) as error:
            os.write(spec["status_fd"], str(error).encode())
        os._exit(FAILED)
    os.close(spec["status_fd"])
    code = wait_for(program)
    kill_descendants()
    os._exit(code)


def kill_descendants_and_leave() -> NoReturn:
    """End at the wish of whoever waits for this."""
    kill_descendants()
    os._exit(128 + signal.SIGKILL)


def kill_descendants() -> None:
    """Kill children, and the children of those, which become ours, until none is left."""
    while True:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            children = file.read().split()
        if not children:
            return
        for child in children:
            os.kill(int(child), signal.SIGKILL)
        os.waitpid(-1, 0)


def start(spec: dict[str, Any], program_path: str) -> NoReturn:
    """Become the program, under limits, without environment and rights."""
    os.setsid()
    for signal_number in (signal.SIGTERM, signal.SIGPIPE):
        signal.signal(signal_number, signal.SIG_DFL)
    for kind, limit in (
        (resource.RLIMIT_AS, spec["max_memory_bytes"]),
        (resource.RLIMIT_FSIZE, spec["max_files_bytes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, spec["max_processes"]),
        (resource.RLIMIT_CPU, spec["max_cpu_s"]),
    ):
        resource.setrlimit(kind, (limit, limit))
    check("prctl", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    os.execve(spec["python"], [spec["python"], "-I", "-B", "-X", "utf8", program_path], {})


def become_nobody() -> None:
    """Give up root for good."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def end_like(child: int) -> NoReturn:
    """Wait for a child and end with its code, 128 and the signal's number if a signal ended it."""
    os._exit(wait_for(child))


def wait_for(child: int) -> int:
    """Return the code of a child that has ended; others that have ended are reaped meanwhile."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return 128 - code if code < 0 else code


def copy_program(spec: dict[str, Any], path: str) -> None:
    """Write the program to where it shall lie."""
    with os.fdopen(spec["program_fd"], "rb") as source, open(path, "wb") as target:
        target.write(source.read())


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """Call mount(2)."""
    words = (None if word is None else os.fsencode(word) for word in (source, target, kind))
    check(f"mount {target}", libc.mount(*words, ctypes.c_ulong(flags), os.fsencode(data)))


def write(path: str, text: str) -> None:
    """Write a small file."""
    with open(path, "w") as file:
        file.write(text)


if __name__ == "__main__":
    main()
