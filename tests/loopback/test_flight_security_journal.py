"""A server with keys and a journal: what concerns all tables at once is for those who may, also after a crash."""

from __future__ import annotations

import pyarrow as pa
import pytest

from flight.client import QueueClient
from flight.errors import AccessDeniedError, FlightQueueError, TableNotFoundError
from tests.kit.queues import prompts_spec
from tests.kit.secured import secured_server
from tests.kit.server import queue_server

GRANTS = {
    "admin": {"*": ["admin"]},
    "keeper": {"*": ["keep"]},
    "reader": {"*": ["read"]},
    "writer": {"rows": ["admin"], "absent": ["admin"]},
}
ROWS = pa.table({"uid": ["a", "b"], "text": ["one", "two"]})
WHOLE = {
    "journal": ("read", lambda c: c.journal()),
    "checkpoint_prepare": ("keep", lambda c: c.checkpoint_prepare("one")),
    "checkpoint_commit": ("keep", lambda c: c.checkpoint_commit("one")),
    "checkpoints": ("keep", lambda c: c.checkpoints()),
    "checkpoint_rewind": ("admin", lambda c: c.checkpoint_rewind("one")),
    "checkpoint_release": ("keep", lambda c: c.checkpoint_release("one")),
    "snapshot": ("admin", lambda c: b"".join(c.snapshot())),
}
"""What is about all tables, in an order in which each is possible, and the role on * that it needs."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with a journal, keys, and a table of two rows."""
    directory = tmp_path_factory.mktemp("journaled")
    with secured_server(directory, GRANTS, "--journal", str(directory / "journal")) as found:
        with found.client("admin") as admin:
            admin.create_table(prompts_spec(name="rows", tickets=None))
            admin.put("rows", ROWS)
        yield found


@pytest.mark.parametrize("name", ["keeper", "reader", "writer"])
def test_what_concerns_all_tables_takes_a_role_on_all(server, name):
    """`admin` of one table is not enough, nor is another role on all."""
    roles = GRANTS[name].get("*", [])
    with server.client(name) as client:
        refused = [verb for verb, (_, call) in WHOLE.items() if _is_refused(call, client)]
    assert refused == [verb for verb, (role, _) in WHOLE.items() if role not in roles]


def _is_refused(call, client: QueueClient) -> bool:
    try:
        call(client)
    except AccessDeniedError as error:
        return "on table '*'" in str(error)
    except FlightQueueError:
        pass
    return False


def test_error_about_a_table_that_is_not_there_names_no_others(server):
    """Though its caller would have every right to it."""
    with server.client("writer") as client, pytest.raises(TableNotFoundError) as caught:
        client.describe("absent")
    assert str(caught.value) == (
        "server: table must be there, got one that is not; list_tables returns those that you may see"
    )


def test_rows_and_rights_are_there_again_after_a_crash(tmp_path):
    """Keys and journal are each as they were."""
    with secured_server(tmp_path, GRANTS, "--journal", str(tmp_path / "journal")) as server:
        with server.client("admin") as admin:
            admin.create_table(prompts_spec(name="rows", tickets=None))
            admin.put("rows", ROWS)
        server.process.kill()
        server.process.wait()
        words = ("--keys", str(server.keys), "--journal", str(tmp_path / "journal"))
        with (
            queue_server(*words) as (uri, _),
            QueueClient(uri, identity="x", credentials=server.keys / "reader") as reader,
        ):
            assert reader.read("rows").column("uid").to_pylist() == ["a", "b"]
            with pytest.raises(AccessDeniedError):
                reader.put("rows", ROWS)
            with QueueClient(uri, identity="x", credentials=server.keys / "writer") as writer:
                assert writer.list_tables() == ["rows"]
