"""docs/standalone.md as printed, and the commands that feed, follow and change tables."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from flight.cli import app
from flight.client import QueueClient
from tests.kit.server import REPOSITORY, queue_server

PAGE = REPOSITORY / "docs" / "standalone.md"
CONFIG = REPOSITORY / "conf" / "tables.yaml"
SIZE = re.compile(r"[\d.]+ [kM]?B")


@pytest.fixture(scope="module")
def uri():
    """The address of a server with the tables of conf/tables.yaml."""
    with queue_server("--config", str(CONFIG)) as (address, _):
        yield address


def flight(*arguments: str, folder: Path = REPOSITORY, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command to its end, in this process: starting Python a hundred times takes minutes."""
    with contextlib.chdir(folder):
        ended = CliRunner().invoke(app, arguments, input=stdin, env={"COLUMNS": "200"})
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        raise ended.exception
    return subprocess.CompletedProcess(arguments, ended.exit_code, ended.stdout, ended.stderr)


def answer(*arguments: str, **options) -> object:
    """Return what a command prints with --json."""
    ended = flight(*arguments, "--json", **options)
    assert ended.stderr == ""
    return json.loads(ended.stdout)


def rollouts(group_id: str, num_rows: int = 4) -> pa.Table:
    """Return rows of one group."""
    return pa.table(
        {
            "uid": [f"{group_id}/{index}" for index in range(num_rows)],
            "group_id": [group_id] * num_rows,
            "modality": ["text"] * num_rows,
            "completion_text": ["x"] * num_rows,
            "completion_token_ids": pa.array([[1]] * num_rows, pa.list_(pa.int32())),
            "policy_version_start": [0] * num_rows,
            "reward": pa.array(range(num_rows), pa.float32()),
        }
    )


def parts_of(page: Path) -> list[tuple[str, str]]:
    """Return the code blocks of a page with their languages."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_page_runs_as_printed(tmp_path):
    """Every block of docs/standalone.md, in order; what is printed below it is what comes out, sizes aside."""
    pytest.importorskip("duckdb", reason="the page shows sql, which needs DuckDB")
    blocks = parts_of(PAGE)
    assert blocks[0] == ("sh", "python -m flight serve --config conf/tables.yaml\n")
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "LC_ALL": "C.UTF-8",
    }
    shown = ""
    with queue_server("--config", str(CONFIG)) as (uri, _):
        for language, text in blocks[1:]:
            if language == "text":
                assert sorted(_lines(shown)) == sorted(_lines(text))
                continue
            script = re.sub(r"^(python -m flight .*)$", rf"\1 --uri {uri}", text, flags=re.MULTILINE)
            program = ["bash", "-c", script] if language == "sh" else [sys.executable, "-c", script]
            ended = subprocess.run(
                program,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
                cwd=tmp_path,
                env=environment,
            )
            shown = ended.stdout + ended.stderr


def _lines(text: str) -> list[str]:
    return [SIZE.sub("SIZE", line).rstrip() for line in text.splitlines()]


def test_serve_has_the_tables_of_its_file(uri):
    """They are there before the first call, and declaring them again changes nothing."""
    assert {"prompts", "rollouts"} <= set(answer("ls", "--uri", uri))
    assert answer("create", "--config", str(CONFIG), "--uri", uri) == {
        "tables": ["media", "prompts", "rollouts"]
    }
    assert (
        flight("create", "--config", str(CONFIG), "--dry-run").stdout == "valid: media, prompts, rollouts\n"
    )


def test_serve_and_create_refuse_a_wrong_file(tmp_path, uri):
    """Exit code 2 and the place in the file; the server never listens."""
    (tmp_path / "tables.yaml").write_text(CONFIG.read_text().replace("type: int64", "type: int46"))
    for arguments in (("serve", "--port", "0"), ("create", "--uri", uri), ("create", "--dry-run")):
        ended = flight(*arguments, "--config", "tables.yaml", folder=tmp_path)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert ended.stderr == (
            "error: tables.yaml:50: table 'rollouts': column 'policy_version_start': type must be the name of an "
            "Arrow type, got 'int46'; did you mean 'int64'?\n"
        )


def test_put_takes_files_and_standard_input_once(uri, tmp_path):
    """A uid is put once, wherever it comes from; a wrong last line keeps the whole file out."""
    line = '{"prompt_text": "Why?", "modality": "text", "reference_answer": "because"}\n'
    (tmp_path / "a.jsonl").write_text(line * 3)
    put = ("put", "prompts", "a.jsonl", "--uri", uri)
    assert answer(*put, folder=tmp_path) == {"table": "prompts", "rows": 3, "duplicates": 0}
    again = flight(*put, folder=tmp_path)
    assert again.stdout == "3 rows put into prompts, 3 were there already\n"
    assert answer("put", "prompts", "-", "--uid-prefix", "p", "--uri", uri, stdin=line)["rows"] == 1
    assert flight("put", "prompts", "-", "--uri", uri, stdin=line).returncode == 6
    (tmp_path / "b.jsonl").write_text(line * 3 + '{"prompt_text": 1}\n')
    ended = flight("put", "prompts", "b.jsonl", "--uri", uri, folder=tmp_path)
    assert ended.returncode == 6
    assert ended.stderr.startswith("error: b.jsonl:4: column 'prompt_text' must be string, text, got 1")
    assert answer("stats", "prompts", "--uri", uri)["prompts"]["put"] == 4


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_export_and_put_are_inverse(uri, tmp_path, suffix):
    """What was exported can be put into another table, open parts stay open; the file is readable by others."""
    with QueueClient(uri, identity="test") as client:
        client.put("rollouts", rollouts(f"export-{suffix}"))
    file = tmp_path / f"out.{suffix}"
    found = answer("export", "rollouts", str(file), "--uri", uri)
    assert found["rows"] >= 4
    assert found["bytes"] == file.stat().st_size
    frame = pd.read_parquet(file) if suffix == "parquet" else pd.read_feather(file)
    assert len(frame) == found["rows"]
    with queue_server("--config", str(CONFIG)) as (other, _):
        assert answer("put", "rollouts", str(file), "--uri", other)["rows"] == found["rows"]
        with QueueClient(other, identity="test") as client:
            assert client.stats("rollouts")["consumers"]["actor"]["ready"] == found["rows"]
    for wrong, code in (("out.csv", 2), ("no/out.parquet", 2)):
        assert flight("export", "rollouts", wrong, "--uri", uri, folder=tmp_path).returncode == code


def test_tail_follows_new_rows_without_consuming(uri):
    """It begins with the last rows, goes on with what comes, and tells when nothing does."""
    with QueueClient(uri, identity="test") as client:
        client.put("rollouts", rollouts("tail-1"))
        tail = subprocess.Popen(
            [
                *(sys.executable, "-m", "flight", "tail", "rollouts", "-n", "1", "--count", "3", "--json"),
                *("--columns", "reward", "--interval", "0.1", "--uri", uri),
            ],
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )
        assert tail.stdout is not None
        with tail:
            assert json.loads(tail.stdout.readline())["uid"] == "tail-1/3"
            client.put("rollouts", rollouts("tail-2"))
            assert [json.loads(line)["uid"] for line in tail.stdout] == ["tail-2/0", "tail-2/1"]
        assert tail.returncode == 0
        assert client.read("rollouts", uids=["tail-2/0"]).num_rows == 1
    late = flight("tail", "rollouts", "-n", "0", "--deadline-s", "0.1", "--uri", uri)
    assert (late.returncode, late.stdout) == (5, "")
    assert late.stderr.startswith(
        "error: tail rollouts: rows must come within 0.1 s, got the last one before row_id"
    )


def test_watch_shows_consumers_and_rates(uri):
    """One line a refresh for programs, one line a consumer for people."""
    ended = flight("watch", "rollouts", "--count", "2", "--interval", "0.1", "--json", "--uri", uri)
    ticks = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [[each["table"] for each in tick] for tick in ticks] == [["rollouts"]] * 2
    assert {each["name"] for each in ticks[0][0]["consumers"]} == {"actor", "recorder"}
    shown = flight("watch", "--count", "1", "--uri", uri).stdout
    assert [line.split("│")[0].strip() for line in shown.splitlines()[2:]] == [
        "media",
        "prompts",
        "rollouts",
        "",
    ]
    assert flight("watch", "rolouts", "--uri", uri).returncode == 4


def _finish(client: QueueClient, table: str, consumers: Sequence[str]) -> None:
    """Take and ack everything for some consumers, until the end of the table."""
    for consumer in consumers:
        while (lease := client.take(table, consumer, max_rows=64, deadline_s=20)).status != "sealed":
            if lease.status == "rows":
                client.ack(table, consumer, lease_id=lease.lease_id)


def test_drain_waits_for_every_consumer():
    """Exit code 5 and who is behind, then 0 once they have finished."""
    with queue_server("--config", str(CONFIG)) as (uri, _), QueueClient(uri, identity="test") as client:
        client.put(
            "prompts",
            pa.table({name: ["x"] for name in ("uid", "prompt_text", "modality", "reference_answer")}),
        )
        late = flight("drain", "prompts", "--deadline-s", "0.3", "--uri", uri)
        assert late.returncode == 5
        assert "within 0.3 s, got consumers behind: rollout with 1; the table stays sealed" in late.stderr
        finish = threading.Thread(target=_finish, args=(client, "prompts", ["rollout"]), daemon=True)
        finish.start()
        drained = answer("drain", "prompts", "--deadline-s", "20", "--uri", uri)
        finish.join(20)
    assert drained == {"table": "prompts", "acked": {"rollout": 1}}


def test_change_commands_say_what_they_did():
    """seal, set-max-staleness, requeue, truncate, drop; the last two want to be sure."""
    with queue_server("--config", str(CONFIG)) as (uri, _), QueueClient(uri, identity="test") as client:
        client.put("rollouts", rollouts("g"))
        at = ("--uri", uri)
        assert answer("set-max-staleness", "rollouts", "3", *at) == {
            "table": "rollouts",
            "max_staleness": 3,
            "bound_rows": 64,
            "outstanding": 4,
        }
        assert flight("set-max-staleness", "prompts", "3", *at).returncode == 2
        for _ in range(client.describe("rollouts").max_attempts):
            lease = client.take("rollouts", "actor", max_rows=4)
            client.nack("rollouts", "actor", lease_id=lease.lease_id, reason="kills its reader")
        dead = answer("head", "rollouts", "--dead", "--columns", "reward", *at)
        assert {(row["dead_consumer"], row["dead_attempts"]) for row in dead} == {("actor", 8)}
        assert (
            flight("requeue", "rollouts", "actor", *at).stdout
            == "4 rows of rollouts are ready again for actor\n"
        )
        assert answer("seal", "rollouts", "--expected-rows", "8", *at)["expected_rows"] == 8
        for verb in ("truncate", "drop"):
            refused = flight(verb, "rollouts", *at)
            assert (refused.returncode, refused.stdout) == (2, "")
            assert refused.stderr.endswith("it must be confirmed, got no terminal to ask on; give --yes\n")
        assert flight("truncate", "rollouts", "--yes", *at).stdout == "4 rows of rollouts are removed\n"
        assert answer("drop", "rollouts", "--yes", *at) == {"table": "rollouts", "rows": 0}
        assert flight("export", "rollouts", "x.parquet", *at).returncode == 4


def test_sql_answers_and_refuses(uri, tmp_path):
    """Rows for people, programs and files; a wrong query is a wrong request."""
    pytest.importorskip("duckdb", reason="sql needs DuckDB")
    query = "select count(*) as n, 'a' as b from prompts where uid = 'nothing'"
    assert answer("sql", query, "--uri", uri) == [{"n": 0, "b": "a"}]
    written = flight("sql", query, "-o", "out.parquet", "--uri", uri, folder=tmp_path)
    assert written.stdout.startswith("1 rows in out.parquet, ")
    assert pd.read_parquet(tmp_path / "out.parquet").to_dict("records") == [{"n": 0, "b": "a"}]
    assert flight("sql", "select * from nowhere", "--uri", uri).returncode == 2


@pytest.mark.parametrize(
    "command",
    [
        *(
            "serve",
            "ls",
            "schema",
            "head",
            "tail",
            "stats",
            "watch",
            "sql",
            "export",
            "create",
            "put",
            "seal",
        ),
        *("drain", "set-max-staleness", "requeue", "truncate", "drop"),
    ],
)
def test_help_of_every_command_has_an_example(command):
    """And says where the server is, and how programs read the answer."""
    shown = flight(command, "--help").stdout
    assert f"Example: python -m flight {command}" in shown
    if command != "serve":
        assert "--uri" in shown
        assert "--json" in shown


def test_completion_knows_commands_and_tables(uri):
    """What the shell asks while one types; no server means no tables, not an error."""
    typed = {"_TRANSFER_QUEUE_COMPLETE": "complete_bash", "COMP_CWORD": "4"}
    for address, found in ((uri, ["rollouts"]), ("grpc://127.0.0.1:1", [])):
        ended = subprocess.run(
            [sys.executable, "-c", "from flight.cli import app; app(prog_name='transfer-queue')"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=REPOSITORY,
            env=os.environ
            | typed
            | {"COMP_WORDS": f"transfer-queue head --uri {address} ro", "PYTHONPATH": str(REPOSITORY)},
        )
        assert (ended.stdout.split(), ended.stderr) == (found, "")


def test_readme_shows_commands_of_the_page_that_is_run():
    """What the README prints of the queue alone is among the commands that the test above runs."""
    run_lines = {line for language, text in parts_of(PAGE) if language == "sh" for line in text.splitlines()}
    shown = [text for language, text in parts_of(REPOSITORY / "README.md") if language == "sh"]
    lines = [line for text in shown for line in text.splitlines()]
    assert len(lines) >= 8
    assert [line for line in lines if line not in run_lines] == []
