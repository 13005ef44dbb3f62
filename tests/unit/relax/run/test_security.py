"""Keys of a run."""

from __future__ import annotations

import pytest

from flight.client.credentials import Credentials
from flight.security.access import Principal
from flight.security.guard import load_access
from relax.config import load_config
from relax.control.curve import CurveKeys
from relax.errors import ConfigError
from relax.records import WRITES
from relax.run.security import GRANTS, RunSecurity


def test_run_without_security_has_no_keys(tmp_path):
    """And says no words of them."""
    found = RunSecurity.make(load_config([]), tmp_path)
    assert (found.hub_keys, found.credentials("driver"), found.look_words) == (None, None, "")
    assert found.queue_words == found.role_words("actor") == []
    assert list(tmp_path.iterdir()) == []


def test_run_with_security_hands_out_paths_of_keys_that_are_there(tmp_path):
    """`on` is the one word; a run that is taken up again keeps its keys."""
    config = load_config([], ["security=on"])
    found = RunSecurity.make(config, tmp_path)
    home = tmp_path / "security"
    assert found.queue_words == ["--keys", str(home)]
    assert found.role_words("actor") == [
        *("--credentials", str(home / "actor"), "--control-keys", str(home / "actor")),
    ]
    assert found.look_words == f" --credentials {home / 'viewer'}"
    assert {path.name for path in home.iterdir() if path.is_dir()} == {*GRANTS, "server"}
    for name in ("preprocess", "rollout", "actor", "recorder"):
        CurveKeys.load(home / name)
    assert len(load_access(home / "access.json")) == len(GRANTS)
    token = Credentials.load(home / "actor").token
    RunSecurity.make(config, tmp_path)
    assert Credentials.load(home / "actor").token == token


def test_run_on_a_server_of_others_shows_what_it_is_given(tmp_path):
    """To the queue; the control plane is its own."""
    words = ["queue.uri=grpc+tls://127.0.0.1:1", f"queue.credentials={tmp_path}"]
    found = RunSecurity.make(load_config([], [*words, "security=on"]), tmp_path)
    assert found.credentials("driver") == found.credentials("rollout") == tmp_path
    assert found.role_words("rollout") == [
        *("--credentials", str(tmp_path), "--control-keys", str(tmp_path / "security" / "rollout")),
    ]
    plain = RunSecurity.make(load_config([], words), tmp_path / "plain")
    assert (plain.hub_keys, plain.credentials("driver")) == (None, tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["security=on", "queue.uri=grpc://127.0.0.1:1"], "security: must come with queue.credentials"),
        (["queue.credentials=keys/admin"], "queue.credentials: must come with queue.uri"),
        (["security=maybe"], "security"),
    ],
)
def test_config_refuses_keys_that_cannot_work(words, message):
    """Before anything starts."""
    with pytest.raises(ConfigError, match=message):
        load_config([], words)


def test_roles_may_write_what_they_write():
    """The grants against the wiring: nothing is missing."""
    for role, tables in WRITES.items():
        principal = Principal(name=role, token_sha256="", grants=GRANTS[role])
        principal.check("produce", tables)


@pytest.mark.parametrize("name", ["preprocess", "rollout", "actor", "recorder", "viewer"])
def test_no_role_but_the_driver_changes_tables(name):
    """Nor looks at rows that it has no business with."""
    principal = Principal(name=name, token_sha256="", grants=GRANTS[name])
    tables = ["media", "prompts", "rollouts", "eval_prompts", "eval_rollouts", "metrics", "row_errors"]
    assert principal.visible("admin", tables) == []
    seen = {"viewer": tables, "rollout": ["media"], "actor": ["media", "rollouts"]}.get(name, [])
    assert principal.visible("read", tables) == seen
