"""Clients that have none of our code: C++ against Arrow Flight, and a script with pyarrow alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from flight.client import QueueClient
from tests.kit.queues import prompts_spec, rollouts_spec
from tests.kit.server import REPOSITORY, queue_server

CPP_CLIENT = REPOSITORY / "examples" / "cpp_client"


def run(*arguments: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    return subprocess.run(arguments, capture_output=True, text=True, cwd=folder, timeout=120, check=False)


def test_script_with_pyarrow_alone_creates_puts_takes_acks_and_is_refused(tmp_path):
    """In a process that could not import our packages; the refusal names the column."""
    script = (REPOSITORY / "examples" / "pyarrow_only.py").read_text()
    no_package_of_ours = (
        "import sys, importlib.abc\n"
        "class Refuse(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('flight', 'modalities', 'relax', 'pipelines', 'msgspec'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
    )
    with queue_server() as (uri, _):
        ended = run(sys.executable, "-c", no_package_of_ours + script, uri, folder=tmp_path)
    assert ended.stderr == ""
    assert ended.stdout.splitlines() == [
        "put: {'num_rows': 3, 'num_duplicates': 0, 'row_ids': [0, 1, 2]}",
        "taken: [{'uid': 'a', 'text': 'One.', 'attempt': 1}, {'uid': 'b', 'text': 'Two.', 'attempt': 1}]",
        "acked: 2 rows",
        "refused: schema_mismatch",
        "put into sentences: batch must fit the table, got 1 difference(s): column 'scores': expected one of "
        "['text', 'score'], got an unknown column",
    ]


@pytest.fixture(scope="module")
def reader(tmp_path_factory) -> Path:
    """The C++ client, compiled against the Arrow library in the pyarrow wheel."""
    if shutil.which("g++") is None or shutil.which("make") is None:
        pytest.skip("no g++ and make on this machine to compile the C++ client with")
    program = tmp_path_factory.mktemp("cpp") / "read_table"
    made = run("make", f"PYTHON={sys.executable}", f"OUT={program}", folder=CPP_CLIENT)
    assert made.returncode == 0, made.stderr
    assert made.stderr == ""
    return program


@pytest.mark.slow
def test_cpp_client_lists_describes_and_reads(reader, tmp_path):
    """Tables, meanings, a projection by ticket, and the server's typed refusal."""
    with queue_server() as (uri, _), QueueClient(uri, identity="test") as client:
        client.create_table(prompts_spec())
        client.create_table(rollouts_spec())
        client.put("prompts", pa.table({"uid": ["p0", "p1", "p2"], "text": ["one", 'say "hi"', "drei ü"]}))
        tables = run(reader, uri, folder=tmp_path)
        columns = run(reader, uri, "rollouts", folder=tmp_path)
        rows = run(reader, uri, "prompts", "text,uid", "2", folder=tmp_path)
        refused = run(reader, uri, "prompts", "words", folder=tmp_path)
        missing = run(reader, uri, 'no"thing', folder=tmp_path)
    assert [line.rpartition(",")[0] for line in tables.stdout.splitlines()] == [
        "table prompts: 3 rows",
        "table rollouts: 0 rows",
    ]
    assert (
        "column completion_token_ids list<item: int32> [num_tokens] in tokens: the answer\n" in columns.stdout
    )
    assert columns.stdout.endswith("\n0 rows\n")
    assert rows.stdout.splitlines()[-3:] == [
        "row row_id=0 uid=p0 group_id=p0 text=one",
        'row row_id=1 uid=p1 group_id=p1 text=say "hi"',
        "2 rows",
    ]
    assert json.loads(refused.stderr.removeprefix("error: "))["code"] == "invalid_request"
    assert json.loads(missing.stderr.removeprefix("error: "))["code"] == "table_not_found"
    assert (tables.returncode, refused.returncode, missing.returncode) == (0, 1, 1)


@pytest.mark.slow
def test_cpp_client_tells_wrong_usage_and_no_server(reader, tmp_path):
    """Exit status 2 and 1, nothing hangs."""
    assert run(reader, folder=tmp_path).returncode == 2
    ended = run(reader, "grpc://127.0.0.1:1", folder=tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: ")
