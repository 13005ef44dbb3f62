"""What refers to what outlives a server: counted again from rows, whether a checkpoint or a log brings them back."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from flight.broker import Wait
from flight.errors import FlightQueueError, MissingReferencesError
from flight.journal.format import Frame, Kind, read_frames
from flight.journal.fsck import fsck
from flight.journal.survey import map_file
from flight.state.ledger import TakeRequest
from tests.kit.clock import FakeClock
from tests.kit.journals import NOW, crashed, media_rows, media_specs, open_journal, prompt_rows, state_of
from tests.kit.search import num_examples

MEDIA = ("a", "b", "c")
UIDS = tuple(f"p{number}" for number in range(6))
TWO = TakeRequest(consumer="reader", max_rows=2, lease_s=10.0)


class ReferringLives(RuleBasedStateMachine):
    """Media and rows that refer to them come, go and crash; what comes back is what was there."""

    @initialize(age_s=st.sampled_from([None, 15.0]))
    def start(self, age_s):
        self.specs = media_specs(age_s)
        self.root = Path(tempfile.mkdtemp(prefix="journal-test-"))
        self.path = self.root / "0"
        self.clock = FakeClock()
        self.num_crashes = 0
        self.leases = []
        self.broker = open_journal(self.path, self.clock, segment_bytes=16384)
        for spec in reversed(self.specs):
            self.broker.create_table(spec, exist_ok=False)

    def teardown(self):
        if hasattr(self, "broker"):
            self.broker.close()
            shutil.rmtree(self.root)

    def attempt(self, verb, *arguments, **options):
        """Do something that may be refused in this state; a refusal changes nothing."""
        try:
            return verb(*arguments, **options)
        except FlightQueueError:
            return None

    @rule(uids=st.lists(st.sampled_from(MEDIA), min_size=1, unique=True))
    def put_media(self, uids):
        self.attempt(self.broker.put, "media", media_rows(*uids), "", NOW)

    @rule(
        refers=st.dictionaries(
            st.sampled_from(UIDS), st.lists(st.sampled_from(MEDIA), max_size=3), min_size=1
        )
    )
    def put_prompts(self, refers):
        self.attempt(self.broker.put, "prompts", prompt_rows(**refers), "preprocess", NOW)

    @rule(uid=st.sampled_from(UIDS), mask=st.sampled_from([None, *MEDIA]))
    def put_mask(self, uid, mask):
        batch = pa.record_batch({"uid": [uid], "mask_id": pa.array([mask], pa.string())})
        self.attempt(self.broker.put, "prompts", batch, "judge", NOW)

    @rule()
    def take(self):
        answer = self.attempt(self.broker.take, "prompts", TWO, None, Wait(deadline=self.clock()))
        if answer is not None and answer.lease_id:
            self.leases.append(answer.lease_id)

    @rule(lease=st.integers(0, 9), how=st.sampled_from(["ack", "nack", "skip"]))
    def finish(self, lease, how):
        lease_id = self.leases[lease % len(self.leases)] if self.leases else "none"
        if how == "ack":
            self.attempt(self.broker.ack, "prompts", "reader", lease_id, None)
        else:
            self.attempt(
                self.broker.nack, "prompts", "reader", lease_id, None, reason="r", requeue=how == "nack"
            )

    @rule(uids=st.lists(st.sampled_from(MEDIA), max_size=2))
    def view(self, uids):
        self.attempt(self.broker.ack, "media", "viewer", None, uids)

    @rule(seconds=st.integers(1, 12))
    def let_time_pass(self, seconds):
        self.clock.advance(seconds)
        self.broker.stats()

    @rule(name=st.sampled_from(["media", "prompts"]), what=st.sampled_from(["truncate", "drop", "create"]))
    def change_table(self, name, what):
        if what == "truncate":
            self.attempt(self.broker.truncate_table, name)
        elif what == "drop":
            self.attempt(self.broker.drop_table, name)
        else:
            spec = next(each for each in self.specs if each.name == name)
            self.attempt(self.broker.create_table, spec, exist_ok=True)

    @rule()
    def make_checkpoint(self):
        self.broker.checkpoint(sparse=1.0)

    @rule(from_checkpoint=st.booleans())
    def crash(self, from_checkpoint):
        """Nothing differs but that leases are void, and that media wait for their first reference anew."""
        self.broker.flush()
        if from_checkpoint:
            self.broker.checkpoint(sparse=1.0)
        self.num_crashes += 1
        self.path = crashed(self.path, self.root / str(self.num_crashes))
        self.broker.void_leases()
        for table in self.broker.ledger.tables.values():
            table.renew_grace(self.clock())
        expected = state_of(self.broker)
        self.broker.close()
        self.broker = open_journal(self.path, self.clock, segment_bytes=16384)
        assert state_of(self.broker) == expected


TestReferringLives = ReferringLives.TestCase
TestReferringLives.settings = settings(
    max_examples=num_examples(25),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("from_checkpoint", [False, True])
def test_media_that_wait_for_their_first_reference_wait_anew_after_a_restart(tmp_path, from_checkpoint):
    """Those who would refer to them may be late for the same reason; what was referred to once goes as ever."""
    clock = FakeClock()
    broker = open_journal(tmp_path, clock)
    for spec in media_specs(40.0):
        broker.create_table(spec, exist_ok=False)
    broker.put("media", media_rows("a", "b"), "", NOW)
    broker.put("prompts", prompt_rows(p0=["a"]), "preprocess", NOW)
    broker.ack("media", "viewer", None, ["a", "b"])
    if from_checkpoint:
        broker.checkpoint()
    broker.close()
    clock.advance(60.0)
    again = open_journal(tmp_path, clock)
    assert again.missing("media", ["a", "b"]) == []
    lease = again.take("prompts", TWO, None, Wait(deadline=clock()))
    again.ack("prompts", "reader", lease.lease_id, None)
    assert again.missing("media", ["a", "b"]) == ["a"]
    clock.advance(39.0)
    assert again.missing("media", ["b"]) == []
    clock.advance(1.0)
    assert again.missing("media", ["b"]) == ["b"]
    again.close()


def test_repair_takes_rows_along_that_refer_to_lost_media(tmp_path):
    """Nobody is handed a row whose picture is gone; both may be put again."""
    broker = open_journal(tmp_path)
    for spec in media_specs():
        broker.create_table(spec, exist_ok=False)
    broker.put("media", media_rows("a"), "", NOW)
    broker.put("media", media_rows("b"), "", NOW)
    broker.put("prompts", prompt_rows(p0=["a"], p1=["b"], p2=[]), "preprocess", NOW)
    broker.checkpoint(sparse=1.0)
    broker.close()
    [path] = tmp_path.glob("*.rows")
    frames = (each for each in read_frames(map_file(path)) if isinstance(each, Frame))
    first = next(each for each in frames if each.kind is Kind.ROWS)
    data = bytearray(path.read_bytes())
    data[first.offset + 60] ^= 1
    path.write_bytes(data)
    report = fsck(tmp_path, repair=True)
    assert report.is_repaired
    assert report.rows == {"media": 1, "prompts": 2}
    again = open_journal(tmp_path)
    found = state_of(again)
    assert [row["uid"] for row in found["prompts"]["values"]] == ["p1", "p2"]
    assert found["media"]["references"]["counts"] == {"b": 1}
    with pytest.raises(MissingReferencesError, match="put these first"):
        again.put("prompts", prompt_rows(p0=["a"]), "preprocess", NOW)
    again.put("media", media_rows("a"), "", NOW)
    assert again.put("prompts", prompt_rows(p0=["a"]), "preprocess", NOW).num_duplicates == 0
    again.close()
