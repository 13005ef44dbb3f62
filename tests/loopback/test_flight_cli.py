"""The command line and the pyarrow-only example, run as a user runs them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pyarrow as pa
import pytest

from flight.client import QueueClient
from tests.kit.queues import prompts_spec, rollouts_spec
from tests.kit.server import REPOSITORY, queue_server


@pytest.fixture(scope="module")
def uri():
    """The address of a server with one table of three prompts and an empty one."""
    with queue_server() as (address, _), QueueClient(address, identity="test") as client:
        client.create_table(prompts_spec())
        client.create_table(rollouts_spec())
        client.put(
            "prompts", pa.table({"uid": ["p0", "p1", "p2"], "text": ["short", "long " * 100, "\x1b[31m"]})
        )
        yield address


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=REPOSITORY, timeout=60, check=False
    )


def flight(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m flight`."""
    return run("-m", "flight", *arguments)


def test_ls_shows_tables_for_people_and_programs(uri):
    """Rows, and what is ready for whom; --json has everything."""
    shown = flight("ls", "--uri", uri)
    assert shown.returncode == 0
    line = next(line for line in shown.stdout.splitlines() if line.startswith("prompts"))
    assert [cell.strip() for cell in line.split("│")][:2] == ["prompts", "3"]
    assert "rollout 3" in line
    found = json.loads(flight("ls", "--json", "--uri", uri.removeprefix("grpc://")).stdout)
    assert found["prompts"]["rows"] == 3


def test_schema_shows_meaning_and_unit(uri):
    """What a column is, in words."""
    shown = flight("schema", "rollouts", "--uri", uri).stdout
    assert "the answer" in shown
    assert "consumer actor (groups) needs policy_version_start, completion_token_ids" in shown
    columns = json.loads(flight("schema", "rollouts", "--uri", uri, "--json").stdout)
    assert columns[1] == {
        "column": "completion_token_ids",
        "type": "list<item: int32>",
        "unit": "tokens",
        "shape": "[num_tokens]",
        "writer": "rollout",
        "nullable": "no",
        "meaning": "the answer",
    }


def test_head_shortens_long_values(uri):
    """Long text is cut, control characters do not reach the terminal."""
    found = json.loads(
        flight("head", "prompts", "-n", "2", "--columns", "text", "--uri", uri, "--json").stdout
    )
    assert [row["text"] for row in found] == ["short", "long " * 9 + "lon… 500 characters"]
    assert "\x1b" not in flight("head", "prompts", "--newest", "--uri", uri).stdout
    assert flight("head", "rollouts", "--uri", uri).stdout == "table rollouts has no rows now\n"


def test_stats_shows_the_staleness_books(uri):
    """The bound in rows stands beside what is outstanding."""
    books = json.loads(flight("stats", "rollouts", "--uri", uri, "--json").stdout)["rollouts"]["staleness"]
    assert (books["bound_rows"], books["outstanding"]) == (4, 0)
    assert "staleness.bound_rows" in flight("stats", "--uri", uri).stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ("head", "nothing"),
            4,
            "error: server: table must be one of ['prompts', 'rollouts'], got 'nothing'\n",
        ),
        (
            ("head", "prompts", "--columns", "words"),
            2,
            "error: table 'prompts': columns must be among ['text'], ",
        ),
        (
            ("ls", "--uri", "grpc://127.0.0.1:1"),
            3,
            "error: stats: a server must answer at grpc://127.0.0.1:1, ",
        ),
        (
            ("serve", "--port", "0", "--parent-pid", "4194999"),
            2,
            "error: serve: parent-pid must be a running process",
        ),
        (
            ("serve", "--host", "192.0.2.1", "--port", "0", "--allow-insecure"),
            3,
            "error: serve: 192.0.2.1:0 must be free to listen on",
        ),
        (
            ("serve", "--host", "192.0.2.1", "--port", "0"),
            2,
            "error: serve: host must be a loopback address without --keys, got '192.0.2.1'; ",
        ),
    ],
)
def test_exit_codes_tell_what_went_wrong(uri, arguments, code, message):
    """One line on stderr and a code that scripts can use."""
    options = () if "serve" in arguments or "--uri" in arguments else ("--uri", uri)
    ended = flight(*arguments, *options)
    assert ended.returncode == code
    assert ended.stderr.splitlines()[-1].startswith(message.rstrip("\n"))


def test_help_names_every_command():
    """Without arguments the help is shown."""
    shown = flight("--help").stdout
    assert all(name in shown for name in ("serve", "ls", "schema", "head", "stats"))


def test_example_needs_nothing_but_pyarrow(uri):
    """The script from the README, in a process that could not import our packages."""
    script = (REPOSITORY / "examples" / "inspect_queue.py").read_text()
    ended = run("-c", f"import sys; sys.path = [p for p in sys.path if p != '']; exec({script!r})", uri)
    assert ended.stderr == ""
    assert ended.stdout.startswith("prompts 3 rows, ")
    assert "{'row_id': '0', 'uid': 'p0', 'group_id': 'p0', 'text': 'short'}" in ended.stdout
    assert "rollouts 0 rows, 0 bytes" in ended.stdout
    assert "flight.client" not in script
    body = script.split('"""', 2)[2].lstrip()
    assert f"```python\n{body}```" in (REPOSITORY / "README.md").read_text()


def test_import_loads_no_torch():
    """The bus stays light, and it is ours that is imported."""
    code = (
        "import sys, flight, flight.client, flight.server, flight.cli;"
        "print(flight.__file__, [m for m in ('torch', 'zmq', 'omegaconf', 'pandas') if m in sys.modules])"
    )
    assert run("-c", code).stdout == f"{REPOSITORY / 'flight' / '__init__.py'} []\n"


def test_protocol_document_runs_as_printed():
    """Every Python block of docs/protocol.md, in order, against a fresh server."""
    text = (REPOSITORY / "docs" / "protocol.md").read_text()
    blocks = [part.partition("\n```")[0] for part in text.split("```python\n")[1:]]
    assert len(blocks) >= 6
    if importlib.util.find_spec("duckdb") is None:
        blocks = [block for block in blocks if '"verb": "sql"' not in block]
    with queue_server() as (address, _):
        script = "\n".join(blocks).replace("grpc://127.0.0.1:8815", address)
        ended = run("-c", script)
    assert ended.stderr == ""
    assert ended.stdout == "[b'questions'] 2 ['q2', 'q3']\n"


def test_serve_tells_programs_its_address_as_json():
    """The first line is an object with address and process; the server answers there."""
    command = [
        sys.executable,
        "-m",
        "flight",
        "serve",
        "--port",
        "0",
        "--json",
        "--parent-pid",
        str(os.getpid()),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as process:
        try:
            said = json.loads(process.stdout.readline())
            assert said["pid"] == process.pid
            assert flight("ls", "--uri", said["uri"]).stdout == f"no tables at {said['uri']}\n"
        finally:
            process.terminate()
            assert process.wait(timeout=10) == 0
