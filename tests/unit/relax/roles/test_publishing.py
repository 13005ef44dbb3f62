"""Weights on their way out: announced once whole and released, one version at a time, errors where they count."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from relax.config import load_config
from relax.models.snapshot import WeightFile, read_snapshot
from relax.models.tensor_file import file_bytes
from relax.roles.publishing import Publisher
from tests.kit.announcements import FakeControl, FakeService


class FakeExport:
    """A fake of the trainer's export: a file that changes with each version and one that never does."""

    def __init__(self) -> None:
        self.weight = torch.zeros(64)
        self.fails = False

    def files(self, *, again: bool = False) -> Iterator[WeightFile]:
        """Yield both files, the second without content when it was there before."""
        yield WeightFile(
            name="model-00001-of-00002.safetensors", tensors=("a",), content=file_bytes({"a": self.weight})
        )
        if self.fails:
            raise RuntimeError("a rank is gone")
        fixed = None if again else file_bytes({"b": torch.ones(8)})
        yield WeightFile(name="model-00002-of-00002.safetensors", tensors=("b",), content=fixed)


@pytest.fixture
def export() -> FakeExport:
    """Weights to be published."""
    return FakeExport()


@pytest.fixture
def control() -> FakeControl:
    """Who is told."""
    return FakeControl()


@pytest.fixture
def publisher(tmp_path: Path, export: FakeExport, control: FakeControl) -> Iterator[Publisher]:
    """A publisher that keeps two snapshots and lets one bucket wait."""
    config = load_config([], ["checkpoint.keep_snapshots=2", "weights.max_waiting=1"])
    made = Publisher(FakeService(tmp_path, config, control), export, speaks=True)
    yield made
    made.close()


def publish(publisher: Publisher, version: int) -> list[dict[str, float]]:
    """Publish one version and return what was told of it."""
    told: list[dict[str, float]] = []
    publisher.publish(version)
    publisher.release(told.append)
    publisher.join()
    return told


def test_version_is_announced_after_its_release_to_control_and_queue(publisher, export, control) -> None:
    """Not before, though it is whole; and it is of the weights when they were gathered."""
    publisher.publish(0)
    export.weight.add_(1)
    assert control.told == []
    publisher.release()
    publisher.join()
    assert control.told == [("control", 0), ("rollouts", 0)]
    version, tensors = read_snapshot(control.paths[0])
    assert version == 0
    assert torch.equal(tensors["a"], torch.zeros(64))
    assert publisher.newest == control.paths[0]


def test_fixed_weights_are_not_written_again(publisher, export, control) -> None:
    """Their file is a link that outlives the snapshot that it was written for; a third version deletes the first."""
    first = publish(publisher, 0)[0]
    assert first["publish/num_bytes"] == first["publish/num_bytes_written"] > 0
    for version in (1, 2):
        export.weight.add_(1)
        later = publish(publisher, version)[0]
        assert 0 < later["publish/num_bytes_written"] < later["publish/num_bytes"]
        assert {"time/publish_s", "time/publish_write_s"} < later.keys()
    assert not control.paths[0].exists()
    assert torch.equal(read_snapshot(control.paths[2])[1]["b"], torch.ones(8))


def test_unchanged_weights_are_found_by_their_checksum(publisher, control) -> None:
    """A step that changed nothing writes nothing."""
    publish(publisher, 0)
    assert publish(publisher, 1)[0]["publish/num_bytes_written"] == 0


def test_pinned_snapshots_are_kept(publisher, control) -> None:
    """Until they are let go."""
    publisher.pinned.add(0)
    for version in range(4):
        publish(publisher, version)
    assert [version for version, path in control.paths.items() if path.exists()] == [0, 2, 3]
    publisher.pinned.clear()
    publish(publisher, 4)
    assert [version for version, path in control.paths.items() if path.exists()] == [3, 4]


def test_what_the_writer_fails_at_is_raised_in_the_actor_s_thread(publisher, control) -> None:
    """At the next publish at the latest."""
    control.error = ValueError("the hub is gone")
    publisher.publish(0)
    publisher.release()
    with pytest.raises(ValueError, match="the hub is gone"):
        publisher.publish(1)


def test_writer_that_cannot_write_ends_the_gather(publisher, control, tmp_path) -> None:
    """Though there is no room for a further bucket, nobody waits for ever."""
    (tmp_path / "weights").write_text("in the way")
    with pytest.raises(OSError, match="weights"):
        publisher.publish(0)
    assert control.told == []


def test_gather_that_fails_leaves_nothing(publisher, export, control, tmp_path) -> None:
    """No announcement, no directory, and the end does not wait."""
    export.fails = True
    with pytest.raises(RuntimeError, match="a rank is gone"):
        publisher.publish(0)
    publisher.close()
    assert control.told == []
    assert list((tmp_path / "weights").iterdir()) == []


def test_version_that_is_never_released_is_not_announced(publisher, control) -> None:
    """The actor has failed in between."""
    publisher.publish(0)
    publisher.close()
    assert control.told == []


def test_rank_that_does_not_speak_only_gathers(tmp_path, export, control) -> None:
    """Rank 0 has what it sends."""
    publisher = Publisher(FakeService(tmp_path, load_config([]), control), export, speaks=False)
    assert publish(publisher, 0) == []
    publisher.close()
    assert not (tmp_path / "weights").exists()
