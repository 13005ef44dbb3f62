"""Programs that nobody trusts, run in the sandbox: what they may and what they may not."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from relax.errors import ConfigError
from relax.rewards.base import RewardFailedError
from relax.rewards.code import Code, program_in
from relax.rewards.sandbox import Limits, run_program
from tests.kit.rewards import sample

GENEROUS = Limits(wall_s=20.0, max_memory_bytes=256 << 20, max_files_bytes=1 << 20)

FORK_BOMB = """
import os, time
born = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(600)
        born += 1
except OSError as error:
    print(born <= 8, error.errno)
"""
FLEEING = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
print("done", flush=True)
"""


@pytest.fixture
def namespaces() -> None:
    """Skip where the kernel refuses them."""
    try:
        Code().check()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture
def limits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have an interpreter that a user without rights may start: ours, or else the system's."""
    for python in (sys.executable, "/usr/bin/python3"):
        monkeypatch.setattr(sys, "executable", python)
        with suppress(ConfigError):
            return Code(isolation="limits").check()
    pytest.skip("no interpreter can be started without rights")


def output(source: str, **changes) -> str:
    """Return what a program wrote to its end, or how it failed."""
    ran = run_program(source, "", Limits(**(vars(GENEROUS) | changes)))
    return f"{ran.ending} {ran.code} {ran.output.decode().strip()}{last_line(ran.errors)}"


def last_line(errors: bytes) -> str:
    return errors.decode().strip().rpartition("\n")[2]


def test_sandbox_runs_a_program_with_its_input(namespaces):
    """Text in, text out, the exit code, the standard library."""
    ran = run_program(
        "import sys, json\nprint(json.dumps([input()[::-1]], ensure_ascii=False))\nsys.exit(3)",
        "añb\n",
        GENEROUS,
    )
    assert (ran.ending, ran.code, ran.output.decode()) == ("exit", 3, '["bña"]\n')


def test_sandbox_contains_a_fork_bomb(namespaces):
    """A handful of processes, then errors; all are gone at the end."""
    before = {process.pid for process in psutil.process_iter()}
    assert output(FORK_BOMB) == "exit 0 True 11"
    left = [p for p in psutil.process_iter(["cmdline"]) if p.pid not in before]
    assert not [p for p in left if "program.py" in " ".join(p.info["cmdline"] or [])]


def test_sandbox_ends_those_who_flee_into_a_session_of_their_own(namespaces):
    """The kernel ends the world with its first process: nothing keeps the pipes open."""
    assert output(FLEEING) == "exit 0 done"


def test_sandbox_bounds_memory(namespaces):
    """It is the program's error."""
    assert output("x = bytearray(1 << 30)") == "exit 1 MemoryError"


@pytest.mark.parametrize(
    "source",
    ["while True: pass", "import time; time.sleep(600)", "import os; os.close(1); os.close(2); input()"],
)
def test_sandbox_ends_what_does_not_end(namespaces, source: str):
    """At the limit of the wall clock."""
    read, write = os.pipe()
    try:
        assert output(source, wall_s=0.7).split()[0] in ("time", "exit")
    finally:
        os.close(read)
        os.close(write)


def test_sandbox_bounds_output(namespaces):
    """What writes without end is killed."""
    ran = run_program("while True: print('x' * 1000)", "", Limits(wall_s=20.0, max_output_bytes=100_000))
    assert ran.ending == "output"
    assert len(ran.output) <= 100_000


def test_sandbox_hides_the_host(namespaces, tmp_path: Path):
    """No file of the host's outside the interpreter, no way to write one, no environment, no user of note."""
    secret = tmp_path / "secret"
    secret.write_text("x")
    assert "FileNotFoundError" in output(f"open({str(secret)!r})")
    assert "exit 1 " in output("import os; open(os.__file__, 'a')")
    assert "exit 1 OSError: [Errno 30]" in output("open('/usr/made', 'w')")
    assert "Error" in output(f"import os; os.makedirs({str(tmp_path / 'made')!r}); open('/etc/x', 'w')")
    assert list(tmp_path.iterdir()) == [secret]
    assert (
        output("import os; print(set(os.environ) - {'LC_CTYPE'}, os.getuid() or 'root')")
        == "exit 0 set() 65534"
    )
    assert "OSError" in output("open('big', 'w').write('x' * (2 << 20))")
    assert output("open('/tmp/small', 'w').write('x'); print(open('/box/small').read())") == "exit 0 x"


def test_sandbox_has_no_network(namespaces):
    """Not even this machine's."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        told = output(f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)")
    assert told == "exit 1 OSError: [Errno 101] Network is unreachable"


def test_sandbox_gives_no_rights_back(namespaces):
    """Nothing to mount, no one to signal, no message as from the sandbox itself."""
    mount = "import ctypes; print(ctypes.CDLL(None).mount(b'x', b'/box', b'tmpfs', 0, None))"
    assert output(mount) == "exit 0 -1"
    assert output("import os; os.kill(1, 9); print('alive')").endswith(("alive", "not permitted"))
    write_all = (
        "import os\nfor fd in range(3, 64):\n try: os.write(fd, b'x'); print(fd)\n except OSError: pass"
    )
    assert output(write_all) == "exit 0 "


def test_sandbox_leaves_nothing_behind(namespaces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No directory, no descriptor."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run_program("print(1)", "", GENEROUS)
    before = len(os.listdir("/proc/self/fd"))
    run_program("while True: pass", "", Limits(wall_s=0.3))
    assert len(os.listdir("/proc/self/fd")) == before
    assert list(tmp_path.iterdir()) == []


def test_limits_alone_bound_resources(limits_alone):
    """Time, memory, processes, files and output; nobody who fled is left."""
    for source, ending in (
        ("while True: pass", "time"),
        ("x = bytearray(1 << 30)", "exit"),
        ("open('big', 'w').write('x' * (32 << 20))", "exit"),
        ("while True: print('x' * 1000)", "output"),
    ):
        ran = run_program(source, "", Limits(wall_s=2.0), "limits")
        assert (ran.ending, ran.code == 0) == (ending, False), source
    before = {process.pid for process in psutil.process_iter()}
    for source in (FORK_BOMB, FLEEING):
        ran = run_program(source, "", Limits(wall_s=20.0), "limits")
        assert ran.ending == "exit"
    left = [p for p in psutil.process_iter(["cmdline"]) if p.pid not in before]
    assert not [p for p in left if "program.py" in " ".join(p.info["cmdline"] or [])]


ADD = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
CASES = json.dumps([{"stdin": "1 2", "stdout": "3"}, {"stdin": "2 -2", "stdout": "0\n"}])


@pytest.mark.parametrize(
    ("completion", "options", "reward"),
    [
        (f"Like this:\n{ADD}\nDone.", {}, 1.0),
        ("a, b = map(int, input().split())\nprint(a + b)", {}, 1.0),
        ("```\nprint(3)\n```", {}, 0.0),
        ("```\nprint(3)\n```", {"partial": True}, 0.5),
        ("```\nprint(3\n```", {"partial": True}, 0.0),
        ("```\nwhile True: pass\n```", {"wall_s": 0.3}, 0.0),
        (f"{ADD}\n```\nprint('other')\n```", {}, 0.0),
    ],
)
def test_code_reward_compares_what_the_program_writes(
    namespaces, completion: str, options: dict, reward: float
):
    """Case by case; the last block counts."""
    assert Code(**options).bounded(sample(completion, CASES), 20.0) == reward


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("def add(a, b): return a + b", 1.0),
        ("def add(a, b): return a - b", 0.0),
        ("import sys; sys.exit(0)", 0.0),
        ("import os; os._exit(0)", 0.0),
    ],
)
def test_code_reward_runs_asserts(namespaces, completion: str, reward: float):
    """To leave before them is not to pass them."""
    code = Code(tests="asserts")
    assert code.bounded(sample(completion, "assert add(1, 2) == 3"), 20.0) == reward


def test_code_reward_keeps_the_time_of_the_part(namespaces):
    """Cases for which there is no time left are not passed: the verdict comes in time."""
    many = json.dumps([{"stdout": "x"}] * 50)
    started = time.monotonic()
    assert Code(partial=True).bounded(sample("while True: pass", many), 0.5) == 0.0
    assert time.monotonic() - started < 10.0


@pytest.mark.parametrize("reference", ["", "[]", '[{"in": "1"}]', "3"])
def test_code_reward_needs_cases(namespaces, reference: str):
    """Else it is the data's fault."""
    with pytest.raises(RewardFailedError, match=r"^reference_answer: must "):
        Code().bounded(sample("print(1)", reference), 20.0)


def test_program_in_a_completion_is_its_last_block():
    """With or without a language."""
    assert program_in("```python\na\n```\ntext\n```\nb\n```") == "b\n"
    assert program_in("no block ``` here") == "no block ``` here"
