"""A queue server for each module; a small data set, a tiny untrained model and one finished run for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from flight.client import QueueClient
from tests.kit.job import Job, shared_memory, start_job, toy_words
from tests.kit.server import queue_server

CORPUS = ("What colour is the shape?", "Which pitch do you hear?", "Which direction does the square move?")


@pytest.fixture(scope="module")
def uri() -> Iterator[str]:
    """The address of a queue server that the tests of a module share; a module may have one of its own kind."""
    with queue_server() as (address, _):
        yield address


@pytest.fixture
def client(uri: str) -> Iterator[QueueClient]:
    """A client of that server, without tables."""
    with QueueClient(uri, identity="test", deadline_s=20.0) as connected:
        tables = [connected.describe(name) for name in connected.list_tables()]
        for spec in sorted(
            tables, key=lambda spec: not spec.references()
        ):  # those that others refer to come last
            connected.drop_table(spec.name)
        yield connected


@pytest.fixture(scope="session")
def job_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with `toy/train.jsonl`, `toy/eval.jsonl` and `model/`."""
    torch = pytest.importorskip("torch")
    from pipelines.toy_omni import ToySpec, make_toy_omni
    from relax.models.tiny import make_tiny_omni

    torch.set_num_threads(1)
    home = tmp_path_factory.mktemp("jobs")
    make_toy_omni(home / "toy", ToySpec(num_train=8, num_eval=4, seed=0))
    make_tiny_omni(home / "model", seed=0, corpus=CORPUS)
    return home


@pytest.fixture
def start(job_home: Path, tmp_path: Path) -> Callable:
    """Factory of jobs on the small data set: `with start("num_steps=9") as job`."""

    def start_on_toy_data(*words: str, **options):
        return start_job(tmp_path, *toy_words(job_home), *words, **options)

    return start_on_toy_data


@dataclass(frozen=True)
class FinishedRun:
    """A run that came to its end, and what was in shared memory before it."""

    job: Job
    exit_code: int
    shared_memory_before: set[str]

    @property
    def run_dir(self) -> Path:
        return self.job.run_dir


@pytest.fixture(scope="session")
def finished_run(job_home: Path) -> Iterator[FinishedRun]:
    """A run on policy (K = 0) with a reward of the user's."""
    before = shared_memory()
    with start_job(job_home, *toy_words(job_home), "max_staleness=0", name="finished") as job:
        yield FinishedRun(job, job.wait(), before)
