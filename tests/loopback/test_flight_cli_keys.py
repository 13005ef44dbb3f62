"""Commands with keys: making them, serving with them, showing them."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from flight.cli import app
from flight.client import QueueClient
from flight.security.guard import load_access
from relax.errors import ConfigError
from relax.run.attachment import check_server
from tests.kit.pixels import until
from tests.kit.secured import secured_server
from tests.kit.server import queue_server

CONFIG = "conf/tables.yaml"


def flight(*words: str) -> tuple[int, str, str]:
    """Run a command; return its exit code and what it printed."""
    ended = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    return ended.exit_code, ended.stdout, ended.stderr


PRINCIPALS = ("admin", "producer", "consumer", "viewer", "storage")


def test_keys_serve_and_show(tmp_path):
    """As docs/security.md says it."""
    keys = str(tmp_path / "keys")
    code, said, _ = flight("keys", keys, "--host", "127.0.0.1")
    assert code == 0
    assert said.splitlines() == [
        f"serve with: python -m flight serve --keys {keys}",
        *(f"{name}: --credentials {keys}/{name}" for name in PRINCIPALS),
    ]
    uri_file = tmp_path / "uri"
    with queue_server("--keys", keys, "--config", CONFIG, "--uri-file", str(uri_file)) as (uri, process):
        assert uri == uri_file.read_text().strip()
        assert uri.startswith("grpc+tls://127.0.0.1:")
        code, said, _ = flight("ls", "--json", "--uri", uri, "--credentials", f"{keys}/viewer")
        assert (code, sorted(json.loads(said))) == (0, ["media", "prompts", "rollouts"])
        code, _, error = flight("drop", "prompts", "--yes", "--uri", uri, "--credentials", f"{keys}/viewer")
        assert (code, error.startswith("error: viewer: must have the right to admin on table 'prompts'")) == (
            7,
            True,
        )
        code, _, error = flight("ls", "--uri", uri)
        assert (code, error.startswith("error: stats: a server must answer at grpc+tls://")) == (3, True)
        with QueueClient(uri, identity="x", credentials=tmp_path / "keys" / "admin") as client:
            client.drop_table("prompts")
        process.terminate()
        until(lambda: process.poll() is not None)
        assert process.returncode == 0


def test_keys_for_named_principals(tmp_path):
    """Roles by table, and who may map the server's memory."""
    words = ["--grant", "writer:prompts:produce", "--grant", "writer:prompts:read", "--grant", "boss:*:admin"]
    code, said, _ = flight("keys", str(tmp_path / "k"), *words, "--shares-memory", "boss", "--json")
    assert code == 0
    assert json.loads(said)["credentials"] == {
        name: str(tmp_path / "k" / name) for name in ("writer", "boss")
    }
    access = json.loads((tmp_path / "k" / "access.json").read_text())["principals"]
    assert [(each["name"], each["grants"], each.get("shares_memory", False)) for each in access] == [
        ("writer", {"prompts": ["produce", "read"]}, False),
        ("boss", {"*": ["admin"]}, True),
    ]
    assert len(load_access(tmp_path / "k" / "access.json")) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--grant", "a:b"], "error: keys: grant must be NAME:TABLE:ROLE"),
        (["--grant", "a:b:root"], "error: keys: grant must be NAME:TABLE:ROLE"),
        (["--grant", "../a:b:read"], "error: keys: name of a principal must be letters"),
        (["--shares-memory", "who"], "error: keys: shares-memory must name principals with a grant, got who"),
    ],
)
def test_keys_that_cannot_be_are_refused(tmp_path, words, message):
    """And nothing is made."""
    code, _, error = flight("keys", str(tmp_path / "k"), *words)
    assert (code, error.startswith(message)) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_keys_are_not_replaced(tmp_path):
    """They may be in use."""
    code, _, error = flight("keys", str(tmp_path))
    assert code == 2
    assert error == f"error: keys: {tmp_path} must be a new directory, got: File exists\n"


def test_run_can_be_attached_to_a_server_with_keys(tmp_path):
    """With credentials that may do what its roles do, or it is said before it starts."""
    with secured_server(tmp_path, {"admin": {"*": ["admin"]}, "viewer": {"*": ["read"]}}) as server:
        check_server(server.uri, ["rollouts"], overwrite=False, credentials=server.keys / "admin")
        with pytest.raises(ConfigError, match=r"queue\.uri: "):
            check_server(server.uri, ["rollouts"], overwrite=False)
        plain = server.uri.replace("grpc+tls", "grpc")
        with pytest.raises(ConfigError, match=r"a token is never sent in the clear"):
            check_server(plain, ["rollouts"], overwrite=False, credentials=server.keys / "viewer")
