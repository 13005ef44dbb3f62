"""Rows live while others refer to them: the pure counts, the tables, and a search against a plain model."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flight.errors import InvalidRequestError, MissingReferencesError, TableNotFoundError
from flight.schema import Column, ConsumerSpec, TableSpec
from flight.state.ledger import Ledger, TakeRequest
from flight.state.references import ReferenceCounts, Referring
from tests.kit.search import num_examples

AGE_S = 10.0


def media_spec(*consumers: ConsumerSpec, **changes) -> TableSpec:
    """What others refer to."""
    pixels = Column(name="pixels", type=pa.binary(), meaning="pixels", writer="preprocess")
    return TableSpec(name="media", columns=(pixels,), consumers=consumers, **{"max_age_s": AGE_S} | changes)


def prompts_spec(name: str = "prompts", **changes) -> TableSpec:
    """Rows that refer to media, in two parts by two writers."""
    columns = (
        Column(
            name="media_ids",
            type=pa.list_(pa.string()),
            meaning="media",
            writer="preprocess",
            references="media",
        ),
        Column(
            name="mask_id",
            type=pa.string(),
            meaning="a mask",
            writer="judge",
            nullable=True,
            references="media",
        ),
    )
    consumers = (ConsumerSpec(name="rollout", columns=("media_ids",)),)
    return TableSpec(name=name, columns=columns, consumers=consumers, **{"max_attempts": 2} | changes)


def make_ledger(*specs: TableSpec) -> Ledger:
    ledger = Ledger()
    for spec in specs or (media_spec(), prompts_spec()):
        ledger.create(spec)
    return ledger


def put_media(ledger: Ledger, *uids: str, now: float = 0.0) -> None:
    ledger.put("media", uids, uids, 1, None, now=now)


def put(
    ledger: Ledger, name: str, rows: dict[str, list[str]], *, column: str = "media_ids", now: float = 0.0
):
    """Do what the broker does: admit, put, note, and let go what retired."""
    writer = {"media_ids": "preprocess", "mask_id": "judge"}[column]
    referring = [Referring(column=column, writer=writer, target="media", uids=list(rows.values()))]
    references = ledger.references.admit(name, list(rows), referring)
    part = 1 << ledger.table(name).part_names.index(writer)
    outcome = ledger.put(name, list(rows), list(rows), part, None, now=now)
    ledger.references.note(name, outcome.row_ids, references)
    return outcome


def collect(ledger: Ledger) -> None:
    """Let what left its tables let go of what it referred to, as the broker does after each verb."""
    names = list(ledger.tables)
    while names:
        table = ledger.table(names.pop())
        gone, table.retired = table.retired, []
        names += ledger.references.leave(table.spec.name, gone)


def take(ledger: Ledger, name: str, consumer: str = "rollout", max_rows: int = 99, now: float = 0.0) -> str:
    taken = ledger.take(name, TakeRequest(consumer=consumer, max_rows=max_rows), now)
    assert taken is not None
    assert taken.lease is not None
    return taken.lease.lease_id


def media(ledger: Ledger) -> list[str]:
    return [row.uid for row in ledger.table("media").rows.values()]


def test_row_goes_with_the_last_one_that_refers_to_it():
    """Two prompts share a picture, one names it twice; its uid may come again."""
    ledger = make_ledger()
    put_media(ledger, "a", "b")
    put(ledger, "prompts", {"p": ["a", "a"], "q": ["a", "b"]})
    assert ledger.references.counts.count("media", "a") == 2
    lease = take(ledger, "prompts")
    ledger.ack("prompts", "rollout", lease, ["q"])
    collect(ledger)
    assert media(ledger) == ["a"]
    ledger.ack("prompts", "rollout", lease, None)
    collect(ledger)
    assert (media(ledger), ledger.references.counts.num_held("media")) == ([], 0)
    put_media(ledger, "a")
    assert media(ledger) == ["a"]
    assert ledger.references.missing("media", ["b", "a", "b", "c"]) == ["b", "c"]


def test_put_that_refers_to_nothing_that_is_there_is_refused_whole():
    """The message names what is missing, sixteen at most; nothing is counted."""
    ledger = make_ledger()
    put_media(ledger, "a")
    with pytest.raises(MissingReferencesError) as caught:
        put(ledger, "prompts", {"p": ["a", "x"], "q": ["y"]})
    assert str(caught.value) == (
        "put into prompts: media_ids must refer to rows of table 'media', got 2 that are not there: ['x', 'y']; "
        "put these first, then repeat"
    )
    assert (len(ledger.table("prompts").rows), ledger.references.counts.count("media", "a")) == (0, 0)
    with pytest.raises(MissingReferencesError, match=r"got 40 that are not there: .* and 24 more; put these"):
        put(ledger, "prompts", {"p": [f"m{index}" for index in range(40)]})
    alone = make_ledger(prompts_spec())
    assert put(alone, "prompts", {"p": []}).row_ids == [0]
    with pytest.raises(
        TableNotFoundError, match="table that media_ids refers to must exist, got 'media'; create it"
    ):
        put(alone, "prompts", {"q": ["a"]})


def test_repeated_put_counts_once_and_asks_for_nothing():
    """A duplicate refers to what its row referred to, even if that is gone with it."""
    ledger = make_ledger()
    put_media(ledger, "a")
    put(ledger, "prompts", {"p": ["a"]})
    assert put(ledger, "prompts", {"p": ["nowhere"]}).num_duplicates == 1
    assert ledger.references.counts.count("media", "a") == 1
    ledger.ack("prompts", "rollout", take(ledger, "prompts"), None)
    collect(ledger)
    assert media(ledger) == []
    assert put(ledger, "prompts", {"p": ["a"]}).num_duplicates == 1


def test_parts_of_a_row_refer_on_their_own():
    """Another writer's part adds its references; all go with the row."""
    ledger = make_ledger()
    put_media(ledger, "a", "b")
    put(ledger, "prompts", {"p": ["a"]})
    put(ledger, "prompts", {"p": ["b"]}, column="mask_id")
    assert ledger.references.counts.num_held("media") == 2
    ledger.ack("prompts", "rollout", take(ledger, "prompts"), None)
    collect(ledger)
    assert media(ledger) == []


def test_row_that_nothing_has_referred_to_waits_for_max_age():
    """A reference ends its ageing; without any it goes, and may come again."""
    ledger = make_ledger()
    put_media(ledger, "a", "b", now=0.0)
    put_media(ledger, "c", now=4.0)
    put(ledger, "prompts", {"p": ["a"]}, now=5.0)
    assert ledger.next_expiry() == AGE_S
    assert ledger.expire(AGE_S) == ["media"]
    assert media(ledger) == ["a", "c"]
    assert ledger.expire(14.0) == ["media"]
    assert (media(ledger), ledger.next_expiry()) == (["a"], None)
    assert ledger.expire(1e6) == []
    put_media(ledger, "b", now=20.0)
    assert media(ledger) == ["a", "b"]


def test_consumers_of_a_target_keep_its_rows_too():
    """A row goes when both are done with it, in either order; a new reference holds one that its consumer finished."""
    ledger = make_ledger(media_spec(ConsumerSpec(name="recorder", columns=("pixels",))), prompts_spec())
    put_media(ledger, "a", "b", "c")
    put(ledger, "prompts", {"p": ["a"], "q": ["b", "c"]})
    first = take(ledger, "media", "recorder")
    ledger.ack("media", "recorder", first, ["a", "c"])
    collect(ledger)
    assert media(ledger) == ["a", "b", "c"]
    ledger.ack("prompts", "rollout", take(ledger, "prompts"), None)
    collect(ledger)
    assert media(ledger) == ["b"]
    put(ledger, "prompts", {"r": ["b"]})
    ledger.ack("media", "recorder", first, None)
    collect(ledger)
    assert media(ledger) == ["b"]
    ledger.table("prompts").truncate()
    collect(ledger)
    assert media(ledger) == []


def test_dead_letter_keeps_what_it_refers_to():
    """It may be requeued."""
    ledger = make_ledger()
    put_media(ledger, "a")
    put(ledger, "prompts", {"p": ["a"]})
    for _ in range(2):
        ledger.nack("prompts", "rollout", take(ledger, "prompts"), None, reason="broken", requeue=True)
        collect(ledger)
    assert media(ledger) == ["a"]
    assert ledger.table("prompts").discard_oldest_dead()
    collect(ledger)
    assert media(ledger) == []


def test_row_that_is_lost_takes_what_refers_to_it():
    """In every table, ready or leased; they let go of the rest that they referred to, and all may come again."""
    ledger = make_ledger(media_spec(), prompts_spec(), prompts_spec("rollouts"))
    put_media(ledger, "a", "b", "c")
    put(ledger, "prompts", {"p": ["a", "b"], "q": ["b", "c"]})
    put(ledger, "rollouts", {"p/0": ["a"], "q/0": ["c"]})
    lease = take(ledger, "prompts")
    lost = ledger.table("media").find("a")
    assert ledger.lose("media", [lost]) == {"media": 1, "prompts": 1, "rollouts": 1}
    collect(ledger)
    assert media(ledger) == ["b", "c"]
    assert ledger.ack("prompts", "rollout", lease, None) == 1
    collect(ledger)
    assert media(ledger) == ["c"]
    assert ledger.references.counts.count("media", "a") == 0
    put_media(ledger, "a", "b")
    assert put(ledger, "prompts", {"p": ["a", "b"]}).num_duplicates == 0
    assert media(ledger) == ["c", "a", "b"]


def test_table_that_rows_refer_to_is_neither_dropped_nor_emptied():
    """First those that refer to it; dropping them frees what they held."""
    ledger = make_ledger()
    put_media(ledger, "a", "b")
    put(ledger, "prompts", {"p": ["a"]})
    for verb in (ledger.drop, ledger.truncate):
        with pytest.raises(InvalidRequestError) as caught:
            verb("media")
        assert str(caught.value) == (
            f"{'drop' if verb == ledger.drop else 'truncate'}_table media: rows of other tables must not refer to it, "
            "got 1 rows that those of ['prompts'] refer to; drop or truncate these first"
        )
    assert ledger.drop("prompts") == ["media"]
    collect(ledger)
    assert media(ledger) == ["b"]
    ledger.drop("media")


def test_target_may_be_there_with_rows_before_and_after():
    """The order of creation does not matter; rows that were there are held from then on, and retired uids forgotten."""
    ledger = make_ledger(media_spec(ConsumerSpec(name="recorder", columns=("pixels",))))
    put_media(ledger, "old", "a")
    ledger.ack("media", "recorder", take(ledger, "media", "recorder"), ["old"])
    ledger.create(prompts_spec())
    put_media(ledger, "old")
    put(ledger, "prompts", {"p": ["old", "a"]})
    later = make_ledger(prompts_spec(), media_spec())
    put_media(later, "a")
    assert later.table("media").unreferenced is not None


def test_target_must_have_rows_of_their_own():
    """Groups and versions have lives of their own, which references would cut short or outlast."""
    groups = ConsumerSpec(name="train", columns=("pixels",), sampler="groups")
    with pytest.raises(
        InvalidRequestError, match="must not take groups, nor be bound in staleness, in a table that"
    ):
        make_ledger(media_spec(groups, group_size=2), prompts_spec())
    with pytest.raises(InvalidRequestError, match="must not take groups"):
        make_ledger(prompts_spec(), media_spec(groups, group_size=2))
    ledger = make_ledger(media_spec(groups, group_size=2), TableSpec(name="plain", columns=(), consumers=()))
    column = prompts_spec().columns[1]
    with pytest.raises(InvalidRequestError, match="must not take groups"):
        ledger.alter("plain", [column], [])
    assert ledger.table("plain").spec.columns == ()


def test_counts_cost_the_references_of_the_rows_touched():
    """A million other rows make no difference: only entries of the rows that leave are looked at."""

    class Counted(dict):
        """A fake: counts how often it is asked."""

        asked = 0

        def pop(self, *args):
            Counted.asked += 1
            return super().pop(*args)

    counts = ReferenceCounts()
    for row in range(1000):
        counts.add("prompts", row, "media", [str(row % 10)])
    counts._held["prompts"] = Counted(counts._held["prompts"])
    assert counts.leave("prompts", [3, 13, 5000]) == {}
    assert Counted.asked == 3
    assert counts.leave("prompts", [*range(3, 1000, 10)]) == {"media": ["3"]}
    assert counts.leave("elsewhere", [1]) == {}


MEDIA = st.sampled_from([f"m{index}" for index in range(5)])
ROWS = st.sampled_from([f"r{index}" for index in range(6)])


class LivesOfReferences(RuleBasedStateMachine):
    """Two tables refer to a third; the model knows which row refers to what, and since when an id waits."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = make_ledger(media_spec(), prompts_spec(), prompts_spec("rollouts"))
        self.now = 0.0
        self.held: dict[tuple[str, str], set[str]] = {}
        self.waiting: dict[str, float] = {}
        self.gone: set[tuple[str, str]] = set()

    def _live(self) -> set[str]:
        return set().union(self.waiting, *self.held.values())

    def _leave(self, key: tuple[str, str]) -> None:
        del self.held[key]
        self.gone.add(key)

    @rule(uids=st.lists(MEDIA, min_size=1, max_size=3, unique=True))
    def put_media(self, uids):
        for uid in uids:
            if uid not in self._live():
                self.waiting[uid] = self.now
        put_media(self.ledger, *uids, now=self.now)

    @rule(table=st.sampled_from(["prompts", "rollouts"]), uid=ROWS, refs=st.lists(MEDIA, max_size=3))
    def put_row(self, table, uid, refs):
        key = (table, uid)
        is_new = key not in self.held and key not in self.gone
        missing = set(refs) - self._live()
        if is_new and missing:
            with pytest.raises(MissingReferencesError):
                put(self.ledger, table, {uid: refs}, now=self.now)
            return
        put(self.ledger, table, {uid: refs}, now=self.now)
        if is_new:
            self.held[key] = set(refs)
            for each in refs:
                self.waiting.pop(each, None)

    @rule(table=st.sampled_from(["prompts", "rollouts"]), max_rows=st.integers(1, 3))
    def finish(self, table, max_rows):
        cursor = self.ledger.table(table).cursor("rollout")
        if cursor.num_ready():
            lease = take(self.ledger, table, max_rows=max_rows, now=self.now)
            uids = [row.uid for row in cursor.leases[lease].rows()]
            self.ledger.ack(table, "rollout", lease, None)
            for uid in uids:
                self._leave((table, uid))

    @rule(table=st.sampled_from(["prompts", "rollouts"]))
    def truncate(self, table):
        self.ledger.truncate(table)
        for key in [key for key in self.held if key[0] == table]:
            del self.held[key]
        self.gone = {key for key in self.gone if key[0] != table}

    @rule(uid=MEDIA)
    def lose_media(self, uid):
        row = self.ledger.table("media").find(uid)
        if row is not None:
            self.ledger.lose("media", [row])
            self.waiting.pop(uid, None)
            self.held = {key: refs for key, refs in self.held.items() if uid not in refs}

    @rule(table=st.sampled_from(["prompts", "rollouts"]), uid=ROWS)
    def lose_row(self, table, uid):
        row = self.ledger.table(table).find(uid)
        if row is not None:
            assert self.ledger.lose(table, [row]) == {table: 1}
            del self.held[table, uid]

    @rule(seconds=st.floats(0.5, AGE_S))
    def wait(self, seconds):
        self.now += seconds
        self.ledger.expire(self.now)
        self.waiting = {uid: since for uid, since in self.waiting.items() if since + AGE_S > self.now}

    @rule(table=st.sampled_from(["prompts", "rollouts"]))
    def drop(self, table):
        self.ledger.drop(table)
        self.ledger.create(prompts_spec(table))
        for key in [key for key in self.held if key[0] == table]:
            del self.held[key]
        self.gone = {key for key in self.gone if key[0] != table}

    @invariant()
    def rows_are_those_of_the_model(self):
        collect(self.ledger)
        assert set(media(self.ledger)) == self._live()
        for uid in self._live():
            expected = sum(uid in refs for refs in self.held.values())
            assert self.ledger.references.counts.count("media", uid) == expected


TestLivesOfReferences = LivesOfReferences.TestCase
TestLivesOfReferences.settings = settings(
    max_examples=num_examples(40), stateful_step_count=30, deadline=None
)
