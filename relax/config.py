"""The configuration of a run: structured defaults, then YAML files, then `key=value` words. The home of omegaconf.

`algorithm=NAME`, on the command line or in a file, stands for the file `conf/algorithm/NAME.yaml`, `model=NAME` for
`conf/model/NAME.yaml`. It comes just before the other words, or the other keys of its file, so that these have the last
word. An algorithm sets back every choice of an algorithm that an earlier file made, but keeps the coefficients, which
belong to the problem (`KEPT_BY_PRESETS`).

It checks types, names and numbers; it does not open files and starts nothing (that is `relax.run.wiring`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from modalities.base import MediaLimits
from relax.agents.config import AgentConfig
from relax.algorithms.combinations import check_staleness
from relax.algorithms.config import KEPT_BY_PRESETS, AlgorithmConfig
from relax.data.config import DataConfig
from relax.errors import ConfigError
from relax.rewards.config import RewardConfig, RewardPart
from relax.roles.config import RolesConfig, check_roles
from relax.rollout.partial_config import PartialConfig, check_partial
from relax.rollout.sglang_config import SGLangConfig
from relax.run.evaluation_schedule import EvaluationSchedule
from relax.run.restarts import RestartsConfig
from relax.served_columns import ServedColumns
from relax.train.config import TrainerConfig

PRESETS = Path(__file__).resolve().parents[1] / "conf" / "algorithm"
"""Where the files are that `algorithm=NAME` stands for."""
MODEL_PRESETS = PRESETS.parent / "model"
"""Where the files are that `model=NAME` stands for."""
PRESET_WORDS = ("algorithm=", "algorithm.preset=", "model=", "model.preset=")
NAMED_BY_USERS = ("data.sources", "data.eval", "data.fields", "rollout.agent.options")
"""Keys whose own keys are names that users choose; they are checked where they are read."""


@dataclass(kw_only=True)
class ModelConfig:
    """The checkpoint to start from, in Hugging Face format."""

    path: str | None = None
    """Directory with config.json and safetensors; absent: a tiny Qwen3-Omni-MoE thinker is made under `data/`."""
    root: str = "models"
    """Directory under which `model=NAME` looks for its checkpoint, by the last part of its name on the hub."""
    hub_name: str | None = None
    """What the checkpoint is called on the Hugging Face hub; for messages, nothing is fetched."""


@dataclass(kw_only=True)
class ModalitiesConfig:
    """Encoders and their limits."""

    extra: list[str] = field(default_factory=list)
    """Encoders of yours as `package.module:Class`, beside those found by entry point."""
    limits: MediaLimits = field(default_factory=MediaLimits)
    """What a single media file may cost before it is refused."""


@dataclass(kw_only=True)
class MediaConfig:
    """How media lie in the queue: each file once, whatever number of rows refers to it."""

    keep: str = "arrays"
    """`arrays`: encoded by the preprocess service; `bytes`: the file, which every service that needs it encodes."""
    cache_bytes: int = 256 << 20
    """Encoded media kept by each service that reads them, so that one that comes again is not read again."""
    record: bool = False
    """Whether the recorder keeps what the media table held, each row once, under `media/`."""


@dataclass(kw_only=True)
class QueueConfig:
    """The TransferQueue server."""

    uri: str | None = None
    """grpc://host:port of a running server, whose tables of this run are dropped when it ends well; absent: the run
    starts its own."""
    credentials: str | None = None
    """Directory of the token and certificate that the whole run shows to the server at `uri`, which must then be
    grpc+tls://host:port; absent: none."""
    capacity_bytes: int = 1 << 30
    """Most bytes a table may keep."""
    lease_s: float = 120.0
    """Seconds after which rows of a silent consumer are given to another."""
    journal: bool | None = None
    """Whether the run's own server keeps a journal, under `journal/`, so that it can be started again and taken back to
    a checkpoint; absent: if the run keeps checkpoints (`checkpoint.interval_steps`)."""


@dataclass(kw_only=True)
class RolloutConfig:
    """Generation and scoring."""

    engine: str = "torch"
    """`torch`: the embedded engine; `sglang`: SGLang servers."""
    num_workers: int = 1
    """Rollout services."""
    num_engines: int = 1
    """SGLang servers that each rollout service starts."""
    engine_urls: list[str] = field(default_factory=list)
    """SGLang servers that run already, shared out among the rollout services; then none is started."""
    sglang: SGLangConfig = field(default_factory=SGLangConfig)
    """Options of the SGLang servers."""
    max_new_tokens: int = 4
    """Longest completion in tokens."""
    temperature: float = 1.0
    """Sampling temperature of training rollouts; evaluation is greedy."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """How completions are scored; `reward: NAME` stands for one part of that name."""
    agent: AgentConfig = field(default_factory=AgentConfig)
    """Episodes of several turns with an environment, or with an agent program of yours."""
    num_threads: int = 1
    """CPU threads of each service."""
    oversample: int = 0
    """Completions of a training prompt beyond `group_size`; once `group_size` have finished the others are aborted."""
    partial: PartialConfig = field(default_factory=PartialConfig)
    """Interruption of rollouts at an update."""
    layers_per_column: int = 0
    """Layers whose routes share a column, so that a stage of a pipeline reads only those of its own layers; 0: all."""

    def check_agent(self, services: Sequence[str]) -> None:
        """Refuse what episodes of several turns cannot be combined with yet."""
        others = {
            "rollout.partial.enabled": self.partial.enabled,
            "rollout.oversample": self.oversample > 0,
            f"roles.{services[0]}=service" if services else "roles": bool(services),
        }
        for key, is_asked in others.items():
            if self.agent.is_on and is_asked:
                raise ConfigError(
                    f"rollout.agent: must be off with {key}, got both; episodes are made as a whole"
                )


@dataclass(kw_only=True)
class EvaluationConfig:
    """Held-out prompts, answered greedily."""

    interval_steps: int = 50
    """Optimizer steps between evaluations; 0: only before the first and after the last step."""
    versions: list[int] = field(default_factory=list)
    """Further policy versions to evaluate, whatever the interval."""
    num_workers: int = 0
    """Services of their own that answer held-out prompts; 0: the rollout services do, between training prompts."""
    max_waiting: int = 4
    """Versions that may wait for the evaluation in hand, their snapshots kept; beyond, the oldest of the interval's are
    left out."""
    max_prompts: int = 192
    """Held-out prompts an evaluation asks."""
    deadline_s: float = 120.0
    """Longest wait for the last evaluation."""


@dataclass(kw_only=True)
class WeightsConfig:
    """How new weights reach the rollout services."""

    where: str = "disk"
    """Snapshots lie on `disk`, in the run's directory, or in shared memory, `shm`: for engines on this machine."""
    bucket_bytes: int = 512 << 20
    """Most weights that are gathered at a time, and lie in one file; a larger parameter goes alone."""
    max_waiting: int = 2
    """Buckets in the memory of the trainer's first process that wait to be written; the gather waits for room."""


@dataclass(kw_only=True)
class CheckpointConfig:
    """What is kept of the model."""

    interval_steps: int = 0
    """Optimizer steps between checkpoints; 0: only at the end."""
    keep: int = 2
    """Checkpoints kept on disk, the newest ones."""
    keep_best: int = 0
    """Checkpoints kept beside those: with the highest mean training reward since the checkpoint before them."""
    keep_every: int = 0
    """Checkpoints kept for good: of each step that this divides; 0: none for that."""
    asynchronous: bool = True
    """Write checkpoints while training goes on, from a copy of the state in host memory."""
    huggingface: str = "final"
    """Hugging Face directories: `final`, of the last weights alone, or `every`, in each checkpoint too."""
    keep_snapshots: int = 4
    """Published weight snapshots kept on disk."""


@dataclass(kw_only=True)
class RunConfig:
    """One run, whole. Only programs see it; components get their own part."""

    name: str | None = None
    """Directory under `run_root`; absent: `omni_grpo`, numbered when taken."""
    run_root: str = "runs"
    """Directory of all runs."""
    overwrite: bool = False
    """Replace an existing run of that name, and with `queue.uri` the tables that another run left on that server."""
    seed: int = 0
    """Seed of data order, initial weights and sampling."""
    num_steps: int = 200
    """Optimizer steps."""
    prompts_per_step: int = 24
    """Prompts (groups) in a training batch."""
    group_size: int = 8
    """Rollouts of each prompt."""
    max_staleness: int = 1
    """Policy versions a rollout may be behind when it is trained on: 0 on-policy, 1 near, more asynchronous."""
    staleness_policy: str = "pace"
    """`pace`: wait so that no row grows too old; `drop`: count and drop what did; `mask`: train on it without its stale
    tokens; `reweight`: train on it, its stale tokens under a truncated importance weight."""
    security: bool = False
    """`on`: queue and control plane with keys of this run, made under `security/` in its directory."""
    progress: str = "auto"
    """`live` display, `plain` lines, or `auto`: live on a terminal."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    modalities: ModalitiesConfig = field(default_factory=ModalitiesConfig)
    media: MediaConfig = field(default_factory=MediaConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    actor: TrainerConfig = field(default_factory=TrainerConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    roles: RolesConfig = field(default_factory=RolesConfig)
    """Which computations around the actor's step are services of their own."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    """How new weights leave the trainer."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    restarts: RestartsConfig = field(default_factory=RestartsConfig)

    @property
    def keeps_journal(self) -> bool:
        """Whether the queue outlives its server, and can be taken back to a checkpoint."""
        if self.queue.journal is None:
            return self.queue.uri is None and self.checkpoint.interval_steps > 0
        return self.queue.journal

    @property
    def num_evaluators(self) -> int:
        """Services that answer held-out prompts and nothing else."""
        return self.evaluation.num_workers if self.data.eval else 0

    @property
    def evaluation_schedule(self) -> EvaluationSchedule:
        """Which policy versions are evaluated."""
        return EvaluationSchedule(
            num_steps=self.num_steps,
            interval_steps=self.evaluation.interval_steps,
            versions=frozenset(self.evaluation.versions),
            has_prompts=bool(self.data.eval),
            max_waiting=self.evaluation.max_waiting,
        )

    @property
    def served(self) -> ServedColumns:
        """What the roles that are services add to table `rollouts`."""
        return ServedColumns(
            services=self.roles.services,
            has_critic=self.algorithm.has_critic,
            penalises_rewards=self.algorithm.kl_coef > 0 and self.algorithm.kl_placement == "reward",
            replays_routing=self.actor.routing_replay,
        )

    @property
    def can_go_back(self) -> bool:
        """Whether the run can go back to a checkpoint while it goes on."""
        return self.keeps_journal and self.checkpoint.interval_steps > 0

    def __post_init__(self) -> None:
        for key, value, minimum in (
            ("num_steps", self.num_steps, 1),
            ("prompts_per_step", self.prompts_per_step, 1),
            ("group_size", self.group_size, 2),
            ("max_staleness", self.max_staleness, 0),
            ("data.lookahead_steps", self.data.lookahead_steps, 1),
            ("data.num_workers", self.data.num_workers, 1),
            ("data.max_prompt_tokens", self.data.max_prompt_tokens, 16),
            ("queue.capacity_bytes", self.queue.capacity_bytes, 1 << 20),
            ("queue.lease_s", self.queue.lease_s, 1),
            ("rollout.num_workers", self.rollout.num_workers, 1),
            ("rollout.num_engines", self.rollout.num_engines, 1),
            ("rollout.max_new_tokens", self.rollout.max_new_tokens, 1),
            ("rollout.num_threads", self.rollout.num_threads, 1),
            ("rollout.layers_per_column", self.rollout.layers_per_column, 0),
            ("rollout.oversample", self.rollout.oversample, 0),
            ("evaluation.interval_steps", self.evaluation.interval_steps, 0),
            ("evaluation.versions", min(self.evaluation.versions, default=0), 0),
            ("evaluation.num_workers", self.evaluation.num_workers, 0),
            ("evaluation.max_waiting", self.evaluation.max_waiting, 1),
            ("checkpoint.interval_steps", self.checkpoint.interval_steps, 0),
            ("weights.bucket_bytes", self.weights.bucket_bytes, 1),
            ("weights.max_waiting", self.weights.max_waiting, 1),
            ("checkpoint.keep", self.checkpoint.keep, 1),
            ("checkpoint.keep_best", self.checkpoint.keep_best, 0),
            ("checkpoint.keep_every", self.checkpoint.keep_every, 0),
            ("checkpoint.keep_snapshots", self.checkpoint.keep_snapshots, 2),
        ):
            if value < minimum:
                raise ConfigError(f"{key}: must be at least {minimum}, got {value}")
        for key, word, choices in (
            ("staleness_policy", self.staleness_policy, ("pace", "drop", "mask", "reweight")),
            ("progress", self.progress, ("auto", "live", "plain")),
            ("rollout.engine", self.rollout.engine, ("torch", "sglang")),
            ("media.keep", self.media.keep, ("arrays", "bytes")),
            ("weights.where", self.weights.where, ("disk", "shm")),
            ("checkpoint.huggingface", self.checkpoint.huggingface, ("final", "every")),
        ):
            if word not in choices:
                raise ConfigError(
                    f"{key}: must be one of {', '.join(choices)}, got {word!r}{_nearest(word, choices)}"
                )
        if self.queue.journal and self.queue.uri is not None:
            raise ConfigError(
                f"queue.journal: must be off with queue.uri, got both; that server keeps its own: {self.queue.uri}"
            )
        check_staleness(self.algorithm, self.max_staleness)
        if self.queue.credentials is not None and self.queue.uri is None:
            raise ConfigError(
                "queue.credentials: must come with queue.uri, got none; a queue of the run has its own"
            )
        if self.security and self.queue.uri is not None and self.queue.credentials is None:
            raise ConfigError(
                f"security: must come with queue.credentials for the server at queue.uri={self.queue.uri}, got none; "
                "python -m flight keys makes some"
            )
        check_roles(self.roles, self.algorithm, self.staleness_policy)
        check_partial(self.rollout.partial, self.max_staleness, self.staleness_policy)
        self.rollout.check_agent(self.roles.services)
        if not self.rollout.temperature > 0:
            raise ConfigError(f"rollout.temperature: must be above 0, got {self.rollout.temperature}")
        if self.name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise ConfigError(f"name: must be letters, digits, '.', '_' or '-', got {self.name!r}")


def load_config(files: Sequence[Path], overrides: Sequence[str] = ()) -> RunConfig:
    """Merge defaults, YAML files and `key=value` words, in that order.

    Raises:
        ConfigError: a file is missing or not YAML, a key is unknown, a value has the wrong type or is impossible.
    """
    merged = OmegaConf.structured(RunConfig)
    layers = [layer for path in files for layer in _with_presets(str(path), _read_yaml(path))]
    for word in sorted(overrides, key=lambda word: not word.startswith(PRESET_WORDS)):
        if "=" not in word:
            raise ConfigError(f"command line: an override must be key=value, got {word!r}")
        layers += _with_presets(f"command line {word!r}", _parse_word(word))
    layers = [(origin, _with_reward(layer)) for origin, layer in layers]
    known = sorted(_known_keys(RunConfig))
    for origin, layer in layers:
        for key in _keys(layer):
            if key not in known:
                raise ConfigError(f"{origin}: {key!r} is not a known key{_nearest(key, known)}")
        try:
            merged = OmegaConf.merge(merged, layer)
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"{origin}: {error.full_key or 'value'}: {reason}") from error
    return _build(merged)


def save_config(config: RunConfig, path: Path) -> None:
    """Write the whole configuration as YAML that `load_config` reads back."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))


def _build(merged: DictConfig) -> RunConfig:
    try:
        built = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        cause = error.__cause__ or error
        raise ConfigError(f"configuration: {str(cause).splitlines()[0]}") from error
    if not isinstance(built, RunConfig):
        raise ConfigError(f"configuration: must be a run's, got {type(built).__name__}")
    return built


def _read_yaml(path: Path) -> DictConfig:
    if not path.is_file():
        raise ConfigError(f"configuration: {path} must be a YAML file, got nothing there")
    try:
        loaded = OmegaConf.load(path)
    except Exception as error:
        raise ConfigError(f"{path}: must be YAML, got {str(error).splitlines()[0]}") from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path}: must be a mapping of keys, got {type(loaded).__name__}")
    return loaded


def _with_presets(origin: str, layer: DictConfig) -> list[tuple[str, DictConfig]]:
    """Return the layer after the presets that it names (`algorithm: NAME`, `algorithm: {preset: NAME}`), if any."""
    layers: list[tuple[str, DictConfig]] = []
    for section, directory in (("algorithm", PRESETS), ("model", MODEL_PRESETS)):
        node = layer.get(section) if section in layer else {}
        if isinstance(node, DictConfig | dict) and "preset" not in node:
            continue
        name = node.pop("preset") if isinstance(node, DictConfig) else layer.pop(section)
        choices = sorted(each.stem for each in directory.glob("*.yaml"))
        if name not in choices:
            near = difflib.get_close_matches(str(name), choices, n=1)
            hint = (
                f"; did you mean {near[0]!r}?" if near else f"; to change one value say {section}.KEY=VALUE"
            )
            raise ConfigError(f"{origin}: {section} must be one of {', '.join(choices)}, got {name!r}{hint}")
        path = directory / f"{name}.yaml"
        if section == "algorithm":
            layers.append((str(path), _preset_defaults()))
        layers.append((str(path), _read_yaml(path)))
    return [*layers, (origin, layer)]


def _with_reward(layer: DictConfig) -> DictConfig:
    """Return the layer with the short form `rollout.reward: NAME` written out, and unknown keys of parts refused."""
    rollout = layer.get("rollout")
    if not isinstance(rollout, DictConfig) or "reward" not in rollout:
        return layer
    if isinstance(rollout["reward"], str):
        rollout["reward"] = {"parts": [{"name": rollout["reward"]}]}
    parts = rollout["reward"].get("parts") if isinstance(rollout["reward"], DictConfig) else None
    known = [item.name for item in fields(RewardPart)]
    for part in parts if isinstance(parts, ListConfig) else ():
        for key in part if isinstance(part, DictConfig) else ():
            if key not in known:
                raise ConfigError(
                    f"rollout.reward.parts: {key!r} is not a known key{_nearest(str(key), known)}; "
                    "what the plug-in takes stands under options"
                )
    return layer


def _preset_defaults() -> DictConfig:
    """Return what a preset sets back: every choice that it does not make, but not what belongs to the problem."""
    defaults = OmegaConf.structured(AlgorithmConfig)
    return OmegaConf.create({"algorithm": {k: v for k, v in defaults.items() if k not in KEPT_BY_PRESETS}})


def _parse_word(word: str) -> DictConfig:
    try:
        return OmegaConf.from_dotlist([word])
    except Exception as error:
        raise ConfigError(
            f"command line: {word!r} must be key=value, got {str(error).splitlines()[0]}"
        ) from error


def _known_keys(cls: Any, prefix: str = "") -> Iterator[str]:
    for item in fields(cls):
        yield prefix + item.name
        default = item.default_factory if callable(item.default_factory) else None
        if is_dataclass(default):
            yield from _known_keys(default, f"{prefix}{item.name}.")


def _keys(layer: Any, prefix: str = "") -> Iterator[str]:
    for key in layer:
        name = f"{prefix}{key}"
        yield name
        if name in NAMED_BY_USERS:
            continue
        value = layer._get_node(key)
        if isinstance(value, DictConfig) and not value._is_none():
            yield from _keys(value, f"{name}.")


def _nearest(word: str, choices: Sequence[str]) -> str:
    """Return '; did you mean …?' for the closest choice, whole key first, then its last part."""
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    if not close:
        last = word.rsplit(".", 1)[-1]
        close = [key for key in choices if key.rsplit(".", 1)[-1] == last][:1]
    return (
        f"; did you mean {close[0]!r}?"
        if close
        else f"; known: {', '.join(key for key in choices if '.' not in key)}"
    )
