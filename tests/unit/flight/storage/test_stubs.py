"""What a coordinator keeps of rows whose values lie elsewhere, and a broker that has some."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from flight.broker import Broker, ReadRequest, Wait
from flight.client.gathering import Part, gather_rows
from flight.data.batches import check_batch, check_schema
from flight.errors import CapacityError, InvalidRequestError, MissingReferencesError, UnavailableError
from flight.schema import Column, ConsumerSpec, StalenessSpec, TableSpec
from flight.state.ledger import TakeRequest
from flight.storage.book import LOST_AFTER_S
from flight.storage.messages import StorageBeat
from flight.storage.stubs import Stub, check_stub, kept_columns, make_stub, num_remote_bytes, stub_spec
from tests.kit.clock import FakeClock
from tests.kit.columns import columns

LISTS = pa.list_(pa.int32())
TOKENS = Column(name="completion_token_ids", type=LISTS, meaning="tokens")
START = Column(name="policy_version_start", type=pa.int64(), meaning="weights")
IMAGE = Column(name="image", type=pa.binary(), meaning="a picture", nullable=True)
SCORE = Column(name="score", type=pa.string(), meaning="words", writer="judge")
SPEC = TableSpec(
    name="rows",
    columns=(TOKENS, START, IMAGE, SCORE),
    consumers=(ConsumerSpec(name="c", columns=("completion_token_ids",)),),
)


def batch(*uids: str, tokens: int = 3) -> pa.RecordBatch:
    """Return rows of the first writer."""
    return pa.record_batch(
        {
            "uid": list(uids),
            "completion_token_ids": pa.array([[7] * tokens] * len(uids), LISTS),
            "policy_version_start": pa.array([0] * len(uids), pa.int64()),
            "image": pa.array([None, *[b"png"] * (len(uids) - 1)], pa.binary()),
        }
    )


class Cluster:
    """A broker with an owner whose values are a dictionary: the wire is left out."""

    def __init__(self, spec: TableSpec = SPEC) -> None:
        self.clock = FakeClock()
        self.broker = Broker(clock=self.clock)
        self.broker.create_table(spec, exist_ok=False)
        self.spec = spec
        self.owner = self.broker.join("grpc://a", None)
        self.next = 0

    @property
    def wait(self) -> Wait:
        """Do not wait."""
        return Wait(deadline=self.clock())

    def put(
        self,
        rows: pa.RecordBatch,
        writer: str = "",
        owner: int | None = None,
        spec: TableSpec | None = None,
    ):
        """Register rows as an owner does."""
        first, self.next = self.next, self.next + rows.num_rows
        owner, spec = owner or self.owner, spec or self.spec
        stub = Stub(owner, first, num_remote_bytes(spec, rows))
        return self.broker.put(spec.name, make_stub(spec, rows, owner, first), writer, self.wait, stub=stub)

    def take(self, max_rows: int = 9):
        """Take as a client does that fetches by itself."""
        request = TakeRequest(consumer="c", max_rows=max_rows)
        return self.broker.take("rows", request, None, self.wait, is_direct=True)

    def beat(self, heard: int = 0):
        """Return what the owner hears."""
        return self.broker.beat(StorageBeat(owner=self.owner, used_bytes=0, heard=heard), self.wait)


def test_stub_keeps_numbers_and_has_sizes_of_all_else():
    """A stub is a batch of its table's stub specification, nulls where the values have them."""
    rows = batch("a", "b")
    stub = make_stub(SPEC, rows, 5, 10)
    spec = stub_spec(SPEC)
    assert kept_columns(SPEC) == {"policy_version_start"}
    assert check_batch(spec, stub, check_schema(spec, stub.schema, "")).writers == ("",)
    assert stub["completion_token_ids"].to_pylist() == [3, 3]
    assert stub["image"].to_pylist() == [None, 3]
    assert stub["policy_version_start"].equals(rows["policy_version_start"])
    assert stub["@bytes:"].to_pylist() == [num_remote_bytes(SPEC, rows) // 2] * 2
    check_stub(spec, stub, Stub(5, 10, 0))
    for wrong in (Stub(6, 10, 0), Stub(5, 11, 0), Stub(5, 10, -1)):
        with pytest.raises(InvalidRequestError, match="register in rows: a stub must point at numbers"):
            check_stub(spec, stub, wrong)


def test_stub_of_every_type_can_be_made():
    """Whatever a column may hold; nulls are seen."""
    found = columns()
    spec = TableSpec(
        name="rows",
        columns=tuple(
            Column(name=name, type=each.type, meaning="", nullable=True) for name, each in found.items()
        ),
        consumers=(),
    )
    stub = make_stub(spec, pa.record_batch(found), 1, 0)
    assert {name: stub[name].null_count for name in found} == {
        name: each.null_count for name, each in found.items()
    }


def test_stub_keeps_what_marks_the_age_of_tokens():
    """Under a policy that delivers stale tokens, the coordinator marks them itself."""
    bound = StalenessSpec(max_staleness=1, rows_per_version=4, consumer="c", policy="mask")
    spec = TableSpec(name="rows", columns=(TOKENS, START), consumers=SPEC.consumers, staleness=bound)
    assert kept_columns(spec) == {"policy_version_start", "completion_token_ids"}


def test_broker_hands_out_rows_that_lie_elsewhere():
    """The answer says where; finishing them frees the owner, and the bytes count for the table."""
    cluster = Cluster()
    assert cluster.put(batch("a", "b", "c", tokens=1000)).row_ids == [0, 1, 2]
    assert 12_000 <= cluster.broker.stats("rows")["rows"]["remote_bytes"] <= 13_000
    answer = cluster.take(2)
    assert answer.table.column_names == ["row_id", "uid", "group_id", "attempt"]

    def fetch(part: Part) -> pa.Table:
        assert (part.endpoint.owner, part.endpoint.location) == (cluster.owner, "grpc://a")
        assert (part.endpoint.runs, part.uids()) == ([(0, 2)], ["a", "b"])
        tokens = pa.array([[number] for number in part.row_ids().tolist()], LISTS)
        return pa.table({"row_id": part.row_ids(), "completion_token_ids": tokens})

    whole, num_missing = gather_rows(answer.table, fetch)
    assert (whole["completion_token_ids"].to_pylist(), num_missing) == ([[0], [1]], 0)
    cluster.broker.ack("rows", "c", answer.lease_id, None)
    assert cluster.beat().free == [(0, 2)]
    cluster.broker.drop_table("rows")
    assert cluster.beat(heard=1).free == [(2, 1)]


def test_broker_counts_values_elsewhere_for_the_table_and_not_for_the_server():
    """Its own memory holds the stub only."""
    spec = TableSpec(name="rows", columns=SPEC.columns, consumers=SPEC.consumers, capacity_bytes=50_000)
    cluster = Cluster(spec)
    cluster.broker.capacity_bytes = 10_000
    cluster.put(batch("a", tokens=10_000))
    with pytest.raises(CapacityError, match="at most capacity_bytes 50000, got"):
        cluster.put(batch("b", tokens=20_000))
    with pytest.raises(TimeoutError, match=r"got 65535 rows and \d+ bytes"):
        cluster.put(batch("b", tokens=10_000))


def test_broker_takes_a_repeated_put_for_the_duplicate_that_it_is():
    """Whoever has the values first keeps them."""
    cluster = Cluster()
    cluster.put(batch("a", "b"))
    other = cluster.broker.join("grpc://b", None)
    outcome = cluster.put(batch("b", "c"), owner=other)
    assert (outcome.row_ids, outcome.new_parts, outcome.num_duplicates) == ([1, 2], [0, 1], 1)


def test_broker_loses_the_rows_of_an_owner_that_is_silent():
    """Ready or leased; the ledger stays exact, their uids may come again, and nobody waits for them."""
    cluster = Cluster()
    cluster.put(batch("a", "b"))
    lease = cluster.take(1)
    cluster.broker.put("rows", batch("local"), "", cluster.wait)
    cluster.broker.seal("rows", 3)
    cluster.clock.advance(LOST_AFTER_S + 1)
    stats = cluster.broker.stats("rows")["rows"]
    assert (stats["rows"], stats["lost"], stats["remote_bytes"], stats["never_coming"]) == (1, 2, 0, 2)
    assert not cluster.beat().is_known
    with pytest.raises(UnavailableError, match="which is given up"):
        cluster.put(batch("d"))
    assert cluster.broker.ack("rows", "c", lease.lease_id, None) == 1
    rest = cluster.take()
    assert rest.table["uid"].to_pylist() == ["local"]
    assert rest.table["completion_token_ids"].to_pylist() == [[7, 7, 7]]
    cluster.broker.ack("rows", "c", rest.lease_id, None)
    assert cluster.take().status == "sealed"


def test_rows_that_were_lost_may_be_put_again_before_the_end():
    """They are expected anew, and counted once."""
    cluster = Cluster()
    cluster.put(batch("a", "b"))
    cluster.broker.seal("rows", 3)
    cluster.broker.lose_owner(cluster.owner, "a test")
    assert cluster.broker.put("rows", batch("b", "a"), "", cluster.wait).new_parts == [1, 1]
    stats = cluster.broker.stats("rows")["rows"]
    assert (stats["put"], stats["never_coming"], stats["sealed"]) == (2, 0, False)


def test_rows_that_lie_elsewhere_refer_to_rows_that_lie_elsewhere():
    """References stay with the coordinator, which counts them; what is lost takes what refers to it."""
    cluster = Cluster()
    shows = Column(name="shows", type=pa.list_(pa.string()), meaning="rows", references="rows")
    scenes = TableSpec(name="scenes", columns=(shows, IMAGE), consumers=())
    cluster.broker.create_table(scenes, exist_ok=False)
    other = cluster.broker.join("grpc://b", None)

    def put_scenes(**refers_to: list[str]):
        rows = {"uid": list(refers_to), "shows": list(refers_to.values()), "image": [b"png"] * len(refers_to)}
        batch = pa.record_batch(
            rows, schema=pa.schema([("uid", pa.string()), shows.to_field(), IMAGE.to_field()])
        )
        return cluster.put(batch, owner=other, spec=scenes)

    with pytest.raises(MissingReferencesError, match=r"got 1 that are not there: \['a'\]"):
        put_scenes(x=["a"])
    cluster.put(batch("a", "b"))
    put_scenes(x=["a"], y=[], z=["b"])
    cluster.broker.put("rows", batch("local"), "", cluster.wait)
    put_scenes(w=["local"])
    found = cluster.broker.read("scenes", ReadRequest(columns=["shows"]))
    assert found["shows"].to_pylist() == [["a"], [], ["b"], ["local"]]
    cluster.broker.lose_owner(cluster.owner, "a test")
    stats = cluster.broker.stats()
    assert (stats["rows"]["lost"], stats["scenes"]["lost"], stats["scenes"]["rows"]) == (2, 2, 2)
    assert cluster.broker.placement().num_lost == 4
    assert cluster.broker.missing("rows", ["a", "local"]) == ["a"]
    cluster.broker.ack("rows", "c", cluster.take().lease_id, None)
    cluster.broker.lose_owner(other, "a test")
    assert cluster.broker.missing("rows", ["local"]) == ["local"]


def test_a_table_that_others_refer_to_keeps_what_its_owner_has_when_it_is_not_dropped():
    """A refused drop frees nothing."""
    cluster = Cluster()
    shows = Column(name="shows", type=pa.string(), meaning="a row", references="rows")
    scenes = TableSpec(name="scenes", columns=(shows,), consumers=())
    cluster.broker.create_table(scenes, exist_ok=False)
    cluster.put(batch("a"))
    cluster.broker.put("scenes", pa.record_batch({"uid": ["x"], "shows": ["a"]}), "", cluster.wait)
    with pytest.raises(InvalidRequestError, match="rows of other tables must not refer to it"):
        cluster.broker.drop_table("rows")
    assert cluster.beat().free == []
    cluster.broker.drop_table("scenes")
    cluster.broker.drop_table("rows")
    assert cluster.beat().free == [(0, 1)]


def test_broker_says_who_has_which_rows_whole():
    """A row of which two owners have parts, or whose values are here, is the coordinator's to give."""
    cluster = Cluster()
    assert cluster.broker.shards("rows") == []
    cluster.put(batch("a", "b", "c"))
    cluster.broker.put("rows", batch("local"), "", cluster.wait)
    cluster.put(pa.record_batch({"uid": ["b"], "score": ["good"]}), "judge")
    found = {
        shard.location: (shard.row_ids, shard.numbers, shard.uids) for shard in cluster.broker.shards("rows")
    }
    assert found == {
        "grpc://a": ([(0, 1), (2, 1)], [(0, 1), (2, 1)], []),
        "": ([(1, 1), (3, 1)], [], ["b", "local"]),
    }


def test_broker_filters_by_what_is_here_without_asking_anybody():
    """Numbers stay with the coordinator."""
    cluster = Cluster()
    cluster.put(batch("a", "b"))
    wanted = {"column": "policy_version_start", "op": ">=", "value": 0}
    request = ReadRequest(columns=["policy_version_start"], filter=wanted)
    assert cluster.broker.read("rows", request).num_rows == 2
    assert np.array_equal(cluster.broker.still_there("rows", [0, 1, 2]), [True, True, False])
