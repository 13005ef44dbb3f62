"""A run with `security=on`: it ends well, a stranger is refused, and its secrets are where they belong only."""

from __future__ import annotations

import json
import re

import psutil
import pytest

from flight.client import QueueClient
from flight.errors import AccessDeniedError, UnauthenticatedError, UnavailableError
from relax.control.errors import ControlDeadlineError
from relax.control.member import ControlMember
from relax.run.security import GRANTS

pytestmark = pytest.mark.slow


def secrets_of(directory) -> list[bytes]:
    """Return every token and private key of a run."""
    tokens = [path.read_bytes().strip() for path in directory.glob("*/token")]
    keys = [path.read_bytes().splitlines()[1] for path in directory.glob("*/key.pem")]
    curves = [json.loads(path.read_text())["secret"].encode() for path in directory.glob("*/curve.json")]
    return [*tokens, *keys, *curves]


def test_run_with_keys_ends_well_and_lets_no_stranger_in(start):
    """One setting; the first lines say how to look into it."""
    with start("security=on", "actor.layout.dp=2") as job:
        job.until_step(1)
        assert {each.ip.removeprefix("::ffff:") for each in _doors(job)} == {"127.0.0.1"}
        keys = job.run_dir / "security"
        said = re.search(
            r"queue: (\S+)  \(look into it with: python -m flight ls --uri (\S+) --credentials (\S+)\)",
            job.output,
        )
        uri = said[1]
        assert uri.startswith("grpc+tls://127.0.0.1:")
        assert said[3] == str(keys / "viewer")

        _strangers_are_refused(uri, keys, job)
        with QueueClient(uri, identity="people", credentials=keys / "viewer") as viewer:
            assert "rollouts" in viewer.list_tables()
            assert viewer.read("rollouts", max_rows=1).num_rows <= 1
            with pytest.raises(AccessDeniedError):
                viewer.drop_table("rollouts")
        with (
            QueueClient(uri, identity="curious", credentials=keys / "rollout") as rollout,
            pytest.raises(AccessDeniedError, match="right to read on table 'rollouts'"),
        ):
            rollout.read("rollouts")

        secrets = secrets_of(keys)
        # A token and a key for each, a key for the server; CURVE keys for all but two, and for the hub.
        assert len(secrets) == len(GRANTS) + (len(GRANTS) + 1) + (len(GRANTS) - 2 + 1)
        assert _shown_by_processes(job, secrets) == []
        assert job.wait() == 0, job.describe()
        told = [path for path in job.run_dir.rglob("*") if path.is_file() and keys not in path.parents]
        assert [
            path for path in [*told, job.output_path] if any(each in path.read_bytes() for each in secrets)
        ] == []
        assert (job.run_dir / "report.html") in told
        assert {path.stat().st_mode & 0o077 for path in [keys, *keys.rglob("*")]} == {0}
        principals = {
            json.loads(line).get("principal") for line in (keys / "audit.jsonl").read_text().splitlines()
        }
        assert principals >= {"driver", "preprocess", "rollout", "actor", "recorder", "viewer"}


def _doors(job) -> list:
    """Return the addresses at which the processes of a run listen."""
    found = [each for process in job.processes() for each in process.net_connections("inet")]
    return [each.laddr for each in found if each.status == psutil.CONN_LISTEN]


def _strangers_are_refused(uri, keys, job) -> None:
    """Without a certificate, without a token, and at the control plane without keys."""
    with QueueClient(uri, identity="stranger", deadline_s=5.0) as client, pytest.raises(UnavailableError):
        client.list_tables()
    home = job.run_dir.parent / "no-token"
    home.mkdir()
    for name in ("certificate.pem", "key.pem", "roots.pem"):
        (home / name).write_bytes((keys / "rollout" / name).read_bytes())
    with (
        QueueClient(uri, identity="stranger", credentials=home) as client,
        pytest.raises(UnauthenticatedError, match="a bearer token must come with it, got none"),
    ):
        client.list_tables()
    words = next(process.cmdline() for process in job.processes() if "--control" in process.cmdline())
    with pytest.raises(ControlDeadlineError):
        ControlMember(words[words.index("--control") + 1], "rollout", 9, connect_deadline_s=1.0)


def _shown_by_processes(job, secrets: list[bytes]) -> list[str]:
    """Return the processes that show a secret in their words or their environment."""
    found = []
    for process in psutil.process_iter():
        for name in ("cmdline", "environ"):
            try:
                with open(f"/proc/{process.pid}/{name}", "rb") as file:
                    shown = file.read()
            except OSError:
                continue
            if any(each in shown for each in secrets):
                found.append(f"{process.pid} {name}")
    return found
