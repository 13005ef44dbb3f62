"""What faults do to files and sockets: a torn journal, a damaged one, connections that break."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flight.errors import JournalDamagedError
from flight.journal.fsck import fsck
from tests.kit.journals import NOW, open_journal, plain_rows, plain_spec, state_of

ROOT = Path(__file__).resolve().parents[3]
DRAWS = (0.0, 0.37, 0.999)


@pytest.fixture(autouse=True)
def _tools_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tool's parts be imported as they are when it runs."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


def written(path: Path, *uids: str, kept: str = "") -> dict:
    """Write a journal with a put for each row, a kept checkpoint after `kept`; return the state at its end."""
    broker = open_journal(path)
    broker.create_table(plain_spec(), exist_ok=False)
    for uid in uids:
        broker.put("rows", plain_rows(uid), "", NOW)
        if uid == kept:
            broker.prepare("step 1")
    state = state_of(broker)
    broker.close()
    return state


@pytest.mark.parametrize("draw", DRAWS)
def test_torn_journal_is_cut_and_nothing_is_lost(tmp_path, draw):
    """What `tear` appends is what a crash leaves: a server cuts it by itself."""
    from chaosjob.journals import tear

    expected = written(tmp_path, "a", "b", "c")
    assert tear(tmp_path, draw).endswith(".log")
    again = open_journal(tmp_path)
    assert again.recovered.num_torn == 1
    assert state_of(again) == expected
    again.close()


@pytest.mark.parametrize("draw", DRAWS)
def test_damaged_journal_is_refused_and_its_kept_checkpoint_survives_the_repair(tmp_path, draw):
    """What `damage` flips is no torn end, and no checkpoint needs it."""
    from chaosjob.journals import damage

    written(tmp_path, *"abcdefgh", kept="c")
    assert damage(tmp_path, draw).startswith("a bit of byte ")
    with pytest.raises(JournalDamagedError, match="damaged place"):
        open_journal(tmp_path)
    assert fsck(tmp_path, repair=True).is_repaired
    again = open_journal(tmp_path)
    again.rewind("step 1")
    assert again.size("rows")[0] == 3
    again.close()


def test_damage_finds_nothing_where_all_is_in_the_checkpoint(tmp_path):
    """Then there is nothing to do."""
    from chaosjob.journals import damage

    written(tmp_path, "a", "b", kept="b")
    assert damage(tmp_path, 0.5) == ""


def test_cut_breaks_the_connections_of_another_process():
    """Both ends see it, the process lives on, and what listens there still does."""
    from chaosjob.sockets import cut

    code = (
        "import socket, sys; own = socket.create_server(('127.0.0.1', 0)); "
        "near = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); "
        "print(own.getsockname()[1], flush=True); print(len(near.recv(1)), flush=True); sys.stdin.read()"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with subprocess.Popen(
            [sys.executable, "-c", code, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            far, _ = listener.accept()
            with far:
                own = int(process.stdout.readline())
                try:
                    assert cut(process.pid) == 1
                except PermissionError as error:
                    process.kill()
                    pytest.skip(f"no right to reach into another process: {error}")
                far.settimeout(20.0)
                assert far.recv(1) == b""
            assert process.stdout.readline() == "0\n"
            with socket.create_connection(("127.0.0.1", own), 20.0):
                assert process.poll() is None
            process.stdin.close()
            assert process.wait(20.0) == 0
