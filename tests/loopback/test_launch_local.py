"""The local supervisor with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from relax.errors import ServiceError
from relax.launch.local import Exited, LocalSupervisor

DEADLINE_S = 10.0
SLEEPER = [sys.executable, "-S", "-c", "print('ready', flush=True); import time; time.sleep(600)"]
# A service that ignores SIGTERM and has a child which does so too.
STUBBORN = [
    "/bin/bash",
    "-c",
    "trap '' TERM; (trap '' TERM; echo child $BASHPID; echo ready; while :; do sleep 0.1; done) & "
    "while :; do wait; done",
]
WITH_CHILD = ["/bin/bash", "-c", "sleep 600 & echo child $!; echo ready; wait"]


@pytest.fixture
def supervisor(tmp_path) -> Iterator[LocalSupervisor]:
    with LocalSupervisor(tmp_path) as supervisor:
        yield supervisor


def log_lines(path: Path, last: str = "ready") -> list[str]:
    """Wait until the service wrote that line and return the log."""
    end_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < end_s:
        lines = path.read_text().splitlines() if path.exists() else []
        if last in lines:
            return lines
        time.sleep(0.005)
    return pytest.fail(f"{path} has no line {last!r}: {lines}")


def child_of(lines: list[str]) -> int:
    return next(int(line.split()[1]) for line in lines if line.startswith("child "))


def ends(pid: int, deadline_s: float = DEADLINE_S) -> bool:
    """Whether the process is gone, or dead and only not reaped, by the deadline."""
    end_s = time.monotonic() + deadline_s
    while time.monotonic() < end_s:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.005)
    return False


def one_exit(supervisor: LocalSupervisor) -> Exited:
    (exited,) = supervisor.poll(DEADLINE_S)
    return exited


def test_failing_service_is_reported_with_its_own_error(supervisor, tmp_path):
    """The last traceback's final line, the end of the log and where it lies."""
    program = "print('working'); raise ValueError('batch must be finite, got nan')"
    supervisor.start("actor-0", [sys.executable, "-S", "-c", program])
    exited = one_exit(supervisor)
    assert (exited.name, exited.returncode) == ("actor-0", 1)
    assert exited.error == "ValueError: batch must be finite, got nan"
    assert exited.last_lines[0] == "working"
    assert exited.log_path == tmp_path / "logs" / "actor-0.log"
    assert str(exited) == (
        f"actor-0 exited with code 1: ValueError: batch must be finite, got nan (log: {exited.log_path})"
    )
    assert supervisor.poll() == []
    assert supervisor.running() == {}


def test_killed_service_is_reported_by_its_signal(supervisor):
    """A negative return code and the signal's name."""
    pid = supervisor.start("rollout-0", SLEEPER)
    log_lines(supervisor.log_path("rollout-0"))
    os.kill(pid, signal.SIGKILL)
    exited = one_exit(supervisor)
    assert exited.returncode == -9
    assert str(exited).startswith("rollout-0 was killed by SIGKILL: ready (log: ")


def test_service_that_ends_well_is_reported_once(supervisor):
    """Code 0 is an end too; the name is free again and the log goes on, but old lines are not the new ones."""
    supervisor.start("recorder-0", [sys.executable, "-S", "-c", "print('ERROR of the first start')"])
    first = one_exit(supervisor)
    assert (first.returncode, first.error) == (0, "ERROR of the first start")
    assert str(first) == "recorder-0 exited with code 0"
    supervisor.start("recorder-0", [sys.executable, "-S", "-c", "print('second')"])
    second = one_exit(supervisor)
    assert (second.last_lines, second.error) == (("second",), "")
    assert second.log_path.read_text() == "ERROR of the first start\nsecond\n"


def test_service_gets_its_environment_and_no_input(supervisor):
    """Variables are added to ours, output is unbuffered, standard input is empty."""
    program = (
        "import os, sys; print(os.environ['OMP_NUM_THREADS'], 'PATH' in os.environ, repr(sys.stdin.read()))"
    )
    supervisor.start("a", [sys.executable, "-S", "-c", program], env={"OMP_NUM_THREADS": "1"})
    assert one_exit(supervisor).last_lines == ("1 True ''",)


def test_stop_within_the_grace_lets_a_service_finish(supervisor):
    """SIGTERM first; what the service does about it is seen in its code."""
    program = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(7)))\n"
        "print('ready')\n"
        "time.sleep(600)"
    )
    supervisor.start("actor-0", [sys.executable, "-S", "-c", program])
    log_lines(supervisor.log_path("actor-0"))
    (exited,) = supervisor.stop(grace_s=DEADLINE_S)
    assert (exited.returncode, exited.last_lines) == (7, ("ready", "saved"))
    assert supervisor.poll() == []


def test_stop_kills_the_whole_group_after_the_grace(supervisor):
    """A service and a grandchild that ignore SIGTERM end all the same, and nobody waits longer than the grace."""
    pid = supervisor.start("rollout-0", STUBBORN)
    grandchild = child_of(log_lines(supervisor.log_path("rollout-0")))
    started_s = time.monotonic()
    (exited,) = supervisor.stop(["rollout-0", "unknown"], grace_s=0.2)
    assert 0.2 <= time.monotonic() - started_s < 2.0
    assert exited.returncode == -9
    assert ends(pid)
    assert ends(grandchild)


def test_stop_ends_a_service_that_is_stopped(supervisor):
    """A process under SIGSTOP is woken so that it sees SIGTERM."""
    pid = supervisor.start("a", SLEEPER)
    log_lines(supervisor.log_path("a"))
    os.kill(pid, signal.SIGSTOP)
    (exited,) = supervisor.stop(grace_s=DEADLINE_S)
    assert exited.returncode == -15


def test_stop_of_some_leaves_the_others(supervisor):
    """Only the names asked for."""
    supervisor.start("a", SLEEPER)
    keep = supervisor.start("b", SLEEPER)
    assert [exited.name for exited in supervisor.stop(["a"])] == ["a"]
    assert supervisor.running() == {"b": keep}
    assert psutil.pid_exists(keep)


def test_children_of_a_service_that_died_are_killed(supervisor):
    """A crash leaves no orphan."""
    pid = supervisor.start("a", WITH_CHILD)
    grandchild = child_of(log_lines(supervisor.log_path("a")))
    os.kill(pid, signal.SIGKILL)
    assert one_exit(supervisor).returncode == -9
    assert ends(grandchild)


SUPERVISOR_PROGRAM = """
import sys, time
from relax.launch.local import LocalSupervisor
supervisor = LocalSupervisor(sys.argv[1])
print(supervisor.start("a", ["/bin/bash", "-c", "sleep 600 & echo child $!; echo ready; wait"]), flush=True)
time.sleep(600)
"""


def test_kill_of_the_supervisor_ends_its_services_and_their_children(tmp_path):
    """Even SIGKILL, and even for programs that do nothing about it themselves."""
    argv = [sys.executable, "-c", SUPERVISOR_PROGRAM, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        child = int(process.stdout.readline())
        grandchild = child_of(log_lines(tmp_path / "logs" / "a.log"))
        (guardian,) = [other.pid for other in psutil.Process(process.pid).children() if other.pid != child]
        process.kill()
    assert ends(child)
    assert ends(grandchild)
    assert ends(guardian)


def test_guardian_that_was_killed_is_replaced(supervisor):
    """The next start brings another one, which knows the services already running."""
    supervisor.start("a", SLEEPER)
    (first,) = [
        process for process in psutil.Process().children() if "guardian" in " ".join(process.cmdline())
    ]
    first.kill()
    assert ends(first.pid)
    supervisor.start("b", SLEEPER)
    guardians = [
        process
        for process in psutil.Process().children()
        if process.status() != psutil.STATUS_ZOMBIE and "guardian" in " ".join(process.cmdline())
    ]
    assert len(guardians) == 1


TIED_PROGRAM = """
import os, subprocess, sys, time
from relax.launch.parent import die_with_parent
die_with_parent(int(sys.argv[1]))
child = subprocess.Popen(["sleep", "600"])
print("child", child.pid, flush=True)
time.sleep(600)
"""

PARENT_PROGRAM = """
import os, subprocess, sys
tied = [sys.executable, "-c", sys.argv[1], str(os.getpid())]
if sys.argv[2] == "indirect":  # a shell in between, as launchers have it
    tied = ["/bin/bash", "-c", '"$@"; true', "bash", *tied]
process = subprocess.Popen(tied, start_new_session=True, stdout=subprocess.PIPE, text=True)
print(process.pid, process.stdout.readline().split()[1], flush=True)
process.wait()
"""


@pytest.mark.parametrize("how", ["direct", "indirect"])
def test_tied_process_dies_with_its_parent(how):
    """By the kernel when the parent is direct, by the watcher when a shell stands between."""
    argv = [sys.executable, "-c", PARENT_PROGRAM, TIED_PROGRAM, how]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as parent:
        started, grandchild = map(int, parent.stdout.readline().split())
        group = [started, *(process.pid for process in psutil.Process(started).children(recursive=True))]
        parent.kill()
    tied = [pid for pid in group if pid != grandchild] if how == "direct" else group[1:2]
    try:
        assert all(ends(pid) for pid in tied)
    finally:
        os.killpg(started, signal.SIGKILL)


def test_tied_process_ends_at_once_when_the_parent_is_gone():
    """A child that starts after its parent's end says so and has its own exit code."""
    gone = subprocess.Popen(["/bin/true"])
    gone.wait()
    argv = [sys.executable, "-c", TIED_PROGRAM, str(gone.pid)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 125
    assert f"process {gone.pid} is gone, ending too" in done.stderr


def test_start_refuses_bad_names_programs_and_repeats(supervisor):
    """Each with the name and the rule."""
    with pytest.raises(ServiceError, match=r"name must be letters, digits, '_', '\.' and '-', got '\.\./x'"):
        supervisor.start("../x", SLEEPER)
    with pytest.raises(ServiceError, match="argv must name a program that can be run"):
        supervisor.start("a", ["/no/such/program"])
    with pytest.raises(ServiceError, match="argv must name a program that can be run"):
        supervisor.start("a", [])
    supervisor.start("a", SLEEPER)
    with pytest.raises(ServiceError, match="the name must be free"):
        supervisor.start("a", SLEEPER)


def test_close_ends_everything_and_is_final(tmp_path):
    """No process is left; a second close does nothing; a start afterwards is refused."""
    supervisor = LocalSupervisor(tmp_path)
    pids = [supervisor.start(name, SLEEPER) for name in ("a", "b")]
    before = psutil.Process().children()
    supervisor.close()
    supervisor.close()
    assert all(ends(pid) for pid in pids)
    assert not [
        process for process in before if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]
    with pytest.raises(ServiceError, match="the supervisor must be open"):
        supervisor.start("c", SLEEPER)
