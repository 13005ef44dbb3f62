"""Media on the bus: one copy for all that refer to it, bytes counted on the wire, freed with the last reference."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

from flight.client import QueueClient
from flight.errors import InvalidRequestError, MissingReferencesError
from flight.schema import Column
from modalities.errors import DamagedMediaError
from modalities.media import MediaItem, MediaTable, content_hash, media_id
from modalities.registry import load_modalities
from modalities.routing import routing_columns
from relax.data.media import TABLE, MediaReader, MediaWriter
from relax.errors import ServiceError
from relax.records import PROMPT_COLUMNS, RunShape, table_specs
from tests.kit.media import LIMITS, PROFILE, picture_bytes
from tests.kit.wire import Traffic, counted_wire

MODALITIES = load_modalities(PROFILE, LIMITS)
GROUP = 16
SMALL_BYTES = 24 << 10
"""Frames and messages of a few calls; a picture of these tests is larger."""


def item(seed: int = 0) -> MediaItem:
    """A picture that decodes to about 37 KiB of patches, in a file of about 37 KiB."""
    data = picture_bytes(128, 96, seed=seed)
    image = MODALITIES["image"]
    encoded = image.encode(image.decode(data))
    noise = np.random.default_rng(seed).integers(0, 256, (96, encoded["patches"].shape[1]), np.uint8)
    encoded = {"patches": noise, "grid_thw": np.array([1, 8, 12], np.int32)}
    return MediaItem(media_id=media_id(image, data), modality="image", data=data, encoded=encoded)


def create_tables(client: QueueClient, keep: str, **shape) -> None:
    run = RunShape(prompts_per_step=16, group_size=GROUP, max_staleness=1, **shape)
    for spec in table_specs(run, MediaTable(MODALITIES, keep).columns(), routing_columns()).values():
        client.create_table(spec)
    client.announce("rollouts", 0)


def prompts(*uids: str, media_ids: list[str]) -> pa.Table:
    """Rows of table `prompts` that all refer to the same media."""
    fillers = {pa.int64(): 0, pa.int32(): 0, pa.string(): "x"}
    columns = {
        column.name: pa.array([fillers.get(column.type, [])] * len(uids), column.type)
        for column in PROMPT_COLUMNS
    }
    columns["media_ids"] = pa.array([media_ids] * len(uids), pa.list_(pa.string()))
    return pa.table({"uid": list(uids), **columns})


def reader_of(client: QueueClient, keep: str, max_bytes: int = 1 << 20) -> MediaReader:
    return MediaReader(
        lambda ids: client.read(TABLE, uids=ids), MediaTable(MODALITIES, keep), max_bytes=max_bytes
    )


@pytest.fixture
def wired(client: QueueClient) -> Iterator[tuple[QueueClient, Traffic]]:
    """A client without shared memory, whose wire is counted."""
    with (
        counted_wire(client.uri) as traffic,
        QueueClient(traffic.uri, identity="wired", shared_memory=False) as wired,
    ):
        yield wired, traffic


@pytest.mark.parametrize("keep", ["arrays", "bytes"])
def test_picture_of_many_prompts_and_groups_crosses_once(client, wired, keep: str):
    """Sixteen prompts that share a file, their rollouts, the next epoch: one put, and one read a consumer."""
    create_tables(client, keep)
    queue, traffic = wired
    picture = item()
    size = len(picture.data) if keep == "bytes" else picture.encoded["patches"].nbytes
    writer = MediaWriter(queue, MediaTable(MODALITIES, keep), writer="preprocess")
    first = prompts(*(f"0-{index}" for index in range(16)), media_ids=[picture.media_id])
    writer.put("prompts", first, [picture] * 16, deadline_s=5.0)
    assert size < traffic.sent < size + SMALL_BYTES
    before = traffic.sent
    writer.put("prompts", prompts("1-0", media_ids=[picture.media_id]), [picture], deadline_s=5.0)
    assert traffic.sent - before < SMALL_BYTES / 2
    before = traffic.received
    reader = reader_of(queue, keep)
    lease = queue.take("prompts", "rollout", max_rows=16, deadline_s=5.0)
    media = reader.by_tower(lease.table["media_ids"].to_pylist())
    again = reader.by_tower([[picture.media_id]] * GROUP)
    assert size < traffic.received - before < size + SMALL_BYTES
    assert (reader.num_reads, len(media)) == (1, len(lease.table))
    assert all(row["image"][0] is media[0]["image"][0] for row in (*media, *again))
    stats = client.stats("media")
    assert (stats["rows"], stats["put"]) == (1, 1)


def test_arrays_that_come_back_are_those_that_were_put(client):
    """Also with shared memory, also with a cache that holds nothing: equal by hash."""
    create_tables(client, "arrays")
    pictures = [item(seed) for seed in range(3)]
    writer = MediaWriter(client, MediaTable(MODALITIES, "arrays"), writer="preprocess")
    ids = [each.media_id for each in pictures]
    writer.put("prompts", prompts("p", media_ids=ids), pictures, deadline_s=5.0)
    for max_bytes in (0, 1 << 20):
        (media,) = reader_of(client, "arrays", max_bytes).by_tower([ids])
        assert [content_hash(each) for each in media["image"]] == [
            content_hash(each.encoded) for each in pictures
        ]
        assert not any(each["patches"].flags.writeable for each in media["image"])


def test_media_are_freed_with_the_last_prompt_or_rollout(client):
    """Until then they stay, whoever has finished what; memory is given back; the same picture may come again."""
    create_tables(client, "bytes")
    writer = MediaWriter(client, MediaTable(MODALITIES, "bytes"), writer="preprocess")
    picture = item()
    for epoch in range(2):
        rows = prompts(f"{epoch}-0", f"{epoch}-1", media_ids=[picture.media_id])
        writer.put("prompts", rows, [picture], deadline_s=5.0)
        lease = client.take("prompts", "rollout", max_rows=2, deadline_s=5.0)
        client.ack("prompts", "rollout", lease_id=lease.lease_id, uids=[f"{epoch}-0"])
        assert client.missing("media", [picture.media_id, "other"]) == ["other"]
        client.ack("prompts", "rollout", lease_id=lease.lease_id)
        stats = client.stats("media")
        assert (stats["rows"], stats["bytes"], stats["unreferenced"]) == (0, 0, epoch + 1)


def test_rows_that_refer_to_nothing_are_refused(client):
    """As an error of its own kind, over the wire; a table in use is not dropped; what waits does not age at once."""
    create_tables(client, "bytes")
    with pytest.raises(MissingReferencesError) as caught:
        client.put("prompts", prompts("p", media_ids=["ab" * 16]), writer="preprocess")
    assert str(caught.value) == (
        f"put into prompts: media_ids must refer to rows of table 'media', got 1 that are not there: ['{'ab' * 16}']; "
        "put these first, then repeat"
    )
    picture = item()
    writer = MediaWriter(client, MediaTable(MODALITIES, "bytes"), writer="preprocess")
    writer.put("prompts", prompts("p", media_ids=[picture.media_id]), [picture], deadline_s=5.0)
    with pytest.raises(
        InvalidRequestError, match="drop_table media: rows of other tables must not refer to it"
    ):
        client.drop_table("media")
    assert client.describe("prompts").columns_by_name["media_ids"].references == "media"
    reader = reader_of(client, "bytes")
    with pytest.raises(
        ServiceError, match=r"media: table 'media' must have every id .* got 1 that it lacks: \['cd"
    ):
        reader.by_tower([[picture.media_id, "cd" * 16]])


class _Forgetful(QueueClient):
    """A fake: says once that nothing is missing, as if the media went away right after the question."""

    is_wrong = True

    def missing(self, table, uids):
        found = [] if self.is_wrong else super().missing(table, uids)
        self.is_wrong = False
        return found


def test_media_that_went_away_meanwhile_are_put_again(client):
    """The server's refusal is what counts, not the answer before it."""
    create_tables(client, "bytes")
    picture = item()
    with _Forgetful(client.uri, identity="forgetful") as queue:
        writer = MediaWriter(queue, MediaTable(MODALITIES, "bytes"), writer="preprocess")
        writer.put("prompts", prompts("p", media_ids=[picture.media_id]), [picture], deadline_s=5.0)
    assert client.stats("prompts")["rows"] == 1


def test_row_whose_content_is_another_is_refused_by_the_reader(client):
    """A producer that put something else under an id is found out by whoever reads it."""
    create_tables(client, "bytes")
    picture = item()
    rows = MediaTable(MODALITIES, "bytes").to_arrow([picture])
    wrong = rows.set_column(3, "data", pa.array([item(1).data], pa.large_binary()))
    client.put("media", wrong, writer="preprocess")
    got = content_hash({"data": item(1).data})
    with pytest.raises(DamagedMediaError) as caught:
        reader_of(client, "bytes").by_tower([[picture.media_id]])
    assert str(caught.value) == (
        f"media {picture.media_id}: content must hash to {content_hash({'data': picture.data})}, got {got}; "
        "it was damaged after it was put"
    )


def test_producer_that_waits_for_room_is_woken_by_the_last_reference(client):
    """The table of media is full; a prompt elsewhere is finished; the put goes on."""
    create_tables(client, "bytes", capacity_bytes=60_000)
    writer = MediaWriter(client, MediaTable(MODALITIES, "bytes"), writer="preprocess")
    first, second = item(0), item(1)
    writer.put("prompts", prompts("p", media_ids=[first.media_id]), [first], deadline_s=5.0)
    lease = client.take("prompts", "rollout", max_rows=1, deadline_s=5.0)
    ids = [second.media_id]
    waiting = threading.Thread(
        target=writer.put,
        args=("prompts", prompts("q", media_ids=ids), [second]),
        kwargs={"deadline_s": 20.0},
    )
    waiting.start()
    client.ack("prompts", "rollout", lease_id=lease.lease_id)
    waiting.join(20.0)
    assert client.read("prompts", columns=["media_ids"])["media_ids"].to_pylist() == [ids]


def test_references_may_be_added_to_a_table_in_use(client):
    """A new column that refers holds what it names from then on."""
    create_tables(client, "bytes")
    column = Column(
        name="mask_id", type=pa.string(), meaning="a mask", writer="judge", nullable=True, references="media"
    )
    picture = item()
    writer = MediaWriter(client, MediaTable(MODALITIES, "bytes"), writer="preprocess")
    writer.put("prompts", prompts("p", media_ids=[]), [], deadline_s=5.0)
    client.alter_table("prompts", columns=[column])
    with pytest.raises(MissingReferencesError):
        client.put("prompts", pa.table({"uid": ["p"], "mask_id": [picture.media_id]}), writer="judge")
    client.put("media", MediaTable(MODALITIES, "bytes").to_arrow([picture]), writer="preprocess")
    client.put("prompts", pa.table({"uid": ["p"], "mask_id": [picture.media_id]}), writer="judge")
    assert client.stats("media")["awaiting_reference"] == 0
    client.truncate_table("prompts")
    assert client.stats("media")["rows"] == 0
