"""Open streams and shared memory on a server with a journal: what is answered is durable there, too."""

from __future__ import annotations

import threading

import pyarrow as pa
import pytest

from flight import messages as m
from flight import stream_messages as sm
from flight.broker import ReadRequest, Wait
from flight.server.open_streams import PutStreamSession, TakeStreamSession
from flight.server.putting import add_batch
from tests.kit.journals import NOW, GatedDisk, crashed, open_journal, plain_rows, plain_spec


@pytest.fixture
def disk() -> GatedDisk:
    """A disk whose syncs wait."""
    return GatedDisk()


@pytest.fixture
def broker(tmp_path, disk):
    """A broker with a table that waits for the disk."""
    broker = open_journal(tmp_path / "live", disk=disk, fsync_interval_s=1000.0)
    broker.create_table(plain_spec(), exist_ok=False)
    yield broker
    disk.gate.set()
    broker.close()


def answered_only_once_synced(disk, call) -> object:
    """Return what a call answers; it must wait for the disk."""
    disk.gate.clear()
    disk.has_come.clear()
    answers = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start()
    assert disk.has_come.wait(20.0)
    assert answers == []
    disk.gate.set()
    thread.join(20.0)
    return answers[0]


def test_puts_takes_and_acks_of_open_streams_wait_for_the_disk(broker, disk, tmp_path):
    """Each is answered when it would survive, and survives."""

    def waits(_):
        return Wait(deadline=broker.clock() + 20.0)

    puts = PutStreamSession(broker, None, sm.PutStream(table="rows"), waits)
    request = sm.TakeStream(table="rows", consumer="reader", identity="me")
    takes = TakeStreamSession(broker, None, request, waits)
    added = answered_only_once_synced(disk, lambda: puts.answer(sm.PutRows(seq=1), plain_rows("a", "b")))
    assert added == sm.Added(seq=1, num_rows=2, runs=[(0, 2)])
    [(taken, _)] = takes.answer(sm.TakeRows(seq=2, max_rows=1))
    ack = sm.AckRows(seq=3, lease_id=taken.lease_id)
    assert answered_only_once_synced(disk, lambda: list(takes.answer(ack))) == [
        (sm.Done(seq=3, num_rows=1), None)
    ]
    again = open_journal(crashed(tmp_path / "live", tmp_path / "dead"))
    assert again.read("rows", ReadRequest(columns=[])).column("uid").to_pylist() == ["b"]
    again.close()


def test_take_of_an_open_stream_waits_for_rows_that_are_not_durable_yet(broker, disk):
    """Nobody holds a row that a crash could undo."""
    request = sm.TakeStream(table="rows", consumer="reader", identity="me")
    takes = TakeStreamSession(broker, None, request, lambda _: Wait(deadline=broker.clock() + 20.0))
    disk.gate.clear()
    disk.has_come.clear()
    wait = Wait(deadline=broker.clock() + 20.0)
    put = threading.Thread(target=broker.put, args=("rows", plain_rows("a"), "", wait))
    put.start()
    assert disk.has_come.wait(20.0)
    answers = []
    take = threading.Thread(target=lambda: answers.extend(takes.answer(sm.TakeRows(seq=1, max_rows=1))))
    take.start()
    while broker.stats("rows")["rows"]["consumers"]["reader"]["leased"] == 0:
        take.join(0.01)
    assert answers == []
    disk.gate.set()
    put.join(20.0)
    take.join(20.0)
    assert [note.num_rows for note, _ in answers] == [1]


def test_rows_that_stay_in_shared_memory_are_copied_to_the_journal(broker, tmp_path):
    """The arena goes with the server; its rows do not."""
    text = pa.array(["value of a", "value of b"])
    shared = bytearray(text.buffers()[2].to_pybytes())
    values = pa.Array.from_buffers(pa.string(), 2, [None, text.buffers()[1], pa.py_buffer(shared)])
    batch = pa.record_batch({"uid": pa.array(["a", "b"]), "x": values})
    add_batch(broker, m.PutShared(table="rows", connection="c", slots=[0]), batch, NOW)
    shared[:] = b"?" * len(shared)
    held = broker.read("rows", ReadRequest(columns=["x"])).column("x").to_pylist()
    assert held == ["?" * 10, "?" * 10], "the rows must lie where they came"
    again = open_journal(crashed(tmp_path / "live", tmp_path / "dead"))
    assert again.read("rows", ReadRequest(columns=["x"])).column("x").to_pylist() == [
        "value of a",
        "value of b",
    ]
    again.close()
