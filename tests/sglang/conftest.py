"""Two real SGLang servers for all tests, started by the engine under test, and a tiny model with all media."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from modalities.base import EncodingProfile, MediaLimits, Modality
from modalities.registry import load_modalities
from pipelines.toy_omni import ToySpec, make_toy_omni
from relax.data.manifest import Manifest
from relax.data.prompts import Prompt, PromptBuilder
from relax.models.checkpoint_files import file_names
from relax.models.snapshot import SnapshotWriter, WeightFile
from relax.models.tensor_file import file_bytes
from relax.models.thinker import checkpoint_views, load_thinker
from relax.models.tiny import make_tiny_omni
from relax.rollout.engine import GenerateRequest
from relax.rollout.sglang_config import SGLangConfig
from relax.rollout.sglang_engine import SGLangEngine
from relax.rollout.sglang_server import Launch
from relax.rollout.torch_engine import TorchEngine

CORPUS = ("What colour is the shape?", "Which pitch do you hear?", "Which direction does the square move?")
NUM_SERVERS = 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs SGLang."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.sglang)


@dataclass(frozen=True)
class Home:
    """A model directory, a toy data set, and where runs go."""

    directory: Path

    @property
    def model(self) -> Path:
        return self.directory / "model"

    @property
    def toy(self) -> Path:
        return self.directory / "toy"

    @property
    def launch(self) -> Launch:
        return Launch(model_dir=self.model, run_dir=self.directory / "run", dtype="auto")


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A tiny model with random weights and a toy data set."""
    torch.set_num_threads(1)
    made = Home(tmp_path_factory.mktemp("sglang"))
    make_toy_omni(made.toy, ToySpec(num_train=4, num_eval=4, seed=0))
    make_tiny_omni(made.model, seed=0, corpus=CORPUS)
    return made


@pytest.fixture(scope="session")
def servers(home: Home) -> Iterator[SGLangEngine]:
    """The engine that started the servers; tests of other options attach engines of their own to its URLs."""
    config = SGLangConfig(device="cpu", max_total_tokens=8192)
    engine = SGLangEngine(config, home.launch, num_servers=NUM_SERVERS)
    yield engine
    engine.close()


@pytest.fixture
def attach(servers: SGLangEngine, home: Home) -> Iterator[Callable[..., SGLangEngine]]:
    """Factory of engines with options of their own on the running servers."""
    made: list[SGLangEngine] = []

    def make(*, num_servers: int = 1, **options) -> SGLangEngine:
        urls = [server.client.url for server in servers.servers[:num_servers]]
        made.append(SGLangEngine(SGLangConfig(device="cpu", **options), home.launch, urls=urls))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="session")
def modalities(home: Home) -> dict[str, Modality]:
    """The encoders of the tiny model."""
    return load_modalities(EncodingProfile.from_pretrained(home.model), MediaLimits(), [])


@pytest.fixture(scope="session")
def prompts(home: Home, modalities: dict[str, Modality]) -> list[Prompt]:
    """Prompts with a picture, a sound or a film."""
    builder = PromptBuilder(home.model, modalities, max_prompt_tokens=2048)
    manifest = Manifest(home.toy / "train.jsonl", modalities)
    built = [builder.build(manifest[line]) for line in range(len(manifest))]
    return [prompt for prompt in built if isinstance(prompt, Prompt)]


@pytest.fixture(scope="session")
def requests(prompts: list[Prompt], modalities: dict[str, Modality]) -> list[GenerateRequest]:
    """A greedy request for each prompt, the first once more as text alone."""
    made = []
    for prompt in prompts:
        media: dict[str, list] = {}
        for item in prompt.media:
            media.setdefault(modalities[item.modality].tower, []).append(item.encoded)
        made.append(request_of(prompt.modality + str(prompt.index), prompt.token_ids, media))
    plain = prompts[0].token_ids[-6:]
    return [*made, request_of("text", plain, {})]


def request_of(uid, token_ids, media, **options) -> GenerateRequest:
    """Return a greedy request of a few tokens."""
    asked = {"max_new_tokens": 5, "greedy": True, "temperature": 0.0} | options
    return GenerateRequest(uid=uid, token_ids=token_ids, media=media, **asked)


@pytest.fixture
def torch_engine(home: Home) -> Iterator[TorchEngine]:
    """The embedded engine on the same checkpoint."""
    engine = TorchEngine(home.model)
    yield engine
    engine.close()


_versions = itertools.count(1)


@pytest.fixture
def publish(home: Home, tmp_path: Path) -> Callable[[], tuple[Path, int]]:
    """Factory of snapshots of two files: other weights each time, under the next version."""
    weights = {name: view.clone() for name, view in checkpoint_views(load_thinker(home.model)).items()}

    def make(**changes: torch.Tensor) -> tuple[Path, int]:
        version = next(_versions)
        generator = torch.Generator().manual_seed(version)
        tensors = {
            name: weight + 0.02 * torch.randn(weight.shape, generator=generator)
            for name, weight in weights.items()
        }
        tensors |= changes
        names = sorted(tensors)
        parts = names[::2], names[1::2]
        with SnapshotWriter(tmp_path / f"{version:06d}", version) as writer:
            for file, part in zip(file_names(2), parts, strict=True):
                content = file_bytes({name: tensors[name] for name in part})
                writer.add(WeightFile(name=file, tensors=tuple(part), content=content))
            return writer.finish().directory, version

    return make
