"""The check before anything starts: files, plug-ins, memory, and every role's columns against the tables.

It starts no process, opens no media and imports no torch; what it refuses would have been a hang or a crash later.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path

import psutil

from flight.errors import FlightQueueError
from flight.schema import KEY_COLUMNS, TableSpec
from modalities.base import EncodingProfile, Modality
from modalities.errors import ModalityError
from modalities.media import MediaTable
from modalities.profile import TOWERS
from modalities.registry import load_modalities
from modalities.routing import layer_groups, routing_columns
from relax.agents.registry import check_agent
from relax.config import RunConfig
from relax.data.errors import ManifestError
from relax.data.manifest import Manifest, Record, check_source
from relax.data.mixing import Mixture
from relax.errors import ConfigError, WiringError
from relax.models.layout import read_layout
from relax.models.spec import ThinkerSpec
from relax.records import WRITES, RunShape, table_specs
from relax.rewards.registry import load_reward
from relax.rollout.sglang_config import check_installation
from relax.run.snapshots import SHARED_MEMORY
from relax.served_columns import with_writes
from relax.train.layout import ModelSizes, check_layout

MAX_HEADER_BYTES = 100 << 20
"""Longest header that the safetensors format allows."""
ROWS_LOOKED_AT = 64
"""Of each source, for media that the model cannot take; a later row of that kind is a row error."""
TRAINING_BYTES = {"fp32": 4 * 4, "bf16": 2 + 4 * 4}
"""Of a parameter in the actor: weight, gradient and two Adam moments; with bf16 weights their fp32 masters too."""
ENGINE_BYTES = 4
"""Of a parameter in the embedded engine."""
SAVED_COPIES = 3
"""Copies that a checkpoint on its way to the disk is made of: parameters and two Adam moments, in 32 bits."""


def check_wiring(config: RunConfig) -> dict[str, TableSpec]:
    """Return the tables of the run, or say what does not fit.

    Raises:
        ConfigError: a file, a plug-in or a number of the configuration cannot be.
        WiringError: a role writes or needs a column that its table lacks, or the engine is not installed.
    """
    _check_sources(config)
    _check_model_files(config)
    _check_towers(config)
    try:
        for part in config.rollout.reward.parts:
            load_reward(part).check()
    except (ValueError, ImportError, AttributeError) as error:
        raise ConfigError(f"rollout.reward: {error}") from error
    try:
        check_agent(config.rollout.agent)
    except WiringError as error:
        raise ConfigError(str(error)) from error
    if config.prompts_per_step < config.rollout.num_workers:
        raise ConfigError(
            f"prompts_per_step: must be at least rollout.num_workers={config.rollout.num_workers}, "
            f"got {config.prompts_per_step}"
        )
    _check_engine(config)
    _check_critic(config)
    _check_layout(config)
    specs = build_tables(config)
    check_columns(specs, with_writes(WRITES, config.served.writes()))
    _check_memory(config)
    return specs


def _check_engine(config: RunConfig) -> None:
    rollout = config.rollout
    if rollout.engine != "sglang":
        return
    if config.num_evaluators and rollout.engine_urls:
        raise ConfigError(
            f"evaluation.num_workers: must be 0 with rollout.engine_urls, got {config.num_evaluators}; "
            "those servers belong to the rollout services"
        )
    if not rollout.engine_urls:
        check_installation(rollout.sglang)
    elif len(rollout.engine_urls) < rollout.num_workers:
        raise ConfigError(
            f"rollout.engine_urls: must be at least rollout.num_workers={rollout.num_workers}, "
            f"got {len(rollout.engine_urls)}; a server's weights belong to one rollout service"
        )


def _check_critic(config: RunConfig) -> None:
    """Refuse a critic that could not follow the actor's weights, version by version, also after a restart."""
    least = config.max_staleness + 2
    if "critic" in config.roles.services and config.checkpoint.keep_snapshots < least:
        raise ConfigError(
            f"checkpoint.keep_snapshots: must be at least max_staleness + 2 = {least} with roles.critic=service, "
            f"got {config.checkpoint.keep_snapshots}"
        )


def build_tables(config: RunConfig) -> dict[str, TableSpec]:
    """Return the specifications of the run's tables, with the columns of every modality in use."""
    profile, routing = EncodingProfile(), routing_columns()
    if config.model.path is not None:
        try:
            profile = EncodingProfile.from_pretrained(config.model.path)
            thinker = ThinkerSpec.from_pretrained(config.model.path)
            groups = layer_groups(thinker.num_layers, config.rollout.layers_per_column)
            routing = routing_columns(thinker.num_experts, groups)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path: {error}") from error
    modalities = _load_modalities(config, profile)
    shape = RunShape(
        prompts_per_step=config.prompts_per_step,
        group_size=config.group_size,
        max_staleness=config.max_staleness,
        staleness_policy=config.staleness_policy,  # type: ignore[arg-type]  # checked by RunConfig
        lookahead_steps=config.data.lookahead_steps,
        num_eval_prompts=config.evaluation.max_prompts * max(1, len(config.data.eval)),
        capacity_bytes=config.queue.capacity_bytes,
        record_media=config.media.record,
        reward_labels=config.rollout.reward.labels,
        num_reward_readers=config.data.num_workers if config.data.curriculum.enabled else 0,
        served=config.served,
        max_continuations=config.rollout.partial.max_continuations if config.rollout.partial.enabled else 0,
        num_samples=config.group_size + config.rollout.oversample,
        agents=config.rollout.agent.is_on,
    )
    media = MediaTable(modalities, config.media.keep)
    try:
        return table_specs(shape, media.columns(), routing)
    except FlightQueueError as error:
        raise WiringError(f"tables: {error}") from error


def _load_modalities(config: RunConfig, profile: EncodingProfile) -> dict[str, Modality]:
    try:
        return load_modalities(profile, config.modalities.limits, config.modalities.extra)
    except (ModalityError, ValueError, ImportError, AttributeError) as error:
        raise ConfigError(f"modalities.extra: {error}") from error


def check_columns(specs: Mapping[str, TableSpec], writes: Mapping[str, Mapping[str, Iterable[str]]]) -> None:
    """Check that what each role writes exists, and that somebody writes what each consumer needs.

    Raises:
        WiringError: names the role, the table and the column.
    """
    written: dict[str, set[str]] = {name: set() for name in specs}
    for role, tables in writes.items():
        for table, columns in tables.items():
            if table not in specs:
                raise WiringError(f"role {role!r}: table must be one of {sorted(specs)}, got {table!r}")
            unknown = sorted(set(columns) - set(specs[table].columns_by_name))
            if unknown:
                raise WiringError(f"role {role!r}: columns of table {table!r} must exist, got {unknown}")
            written[table] |= set(columns)
    for name, spec in specs.items():
        optional = {column.name for column in spec.columns if column.nullable}
        for consumer in spec.consumers:
            missing = sorted(set(consumer.columns) - written[name] - optional - set(KEY_COLUMNS))
            if missing:
                raise WiringError(
                    f"consumer {consumer.name!r} of table {name!r}: nobody writes its columns {missing}"
                )


def _check_sources(config: RunConfig) -> None:
    modalities = _load_modalities(config, EncodingProfile())
    data = config.data
    train = "data.manifest" if data.manifest is not None else "data.sources"
    for key, sources in ((train, data.train_sources()), ("data.eval", data.eval)):
        for name, source in sources.items():
            try:
                check_source(source, modalities)
            except ManifestError as error:
                where = key if key == "data.manifest" else f"{key}.{name}"
                raise ConfigError(f"{where}: {error}") from error
    try:
        Mixture([each.weight for each in data.train_sources().values()] or [1.0], config.seed)
    except ValueError as error:
        raise ConfigError(f"data.sources: {error}") from error


def _check_model_files(config: RunConfig) -> None:
    if config.model.path is not None:
        model_dir = Path(config.model.path)
        for name in ("config.json", "tokenizer_config.json"):
            if not (model_dir / name).is_file():
                raise ConfigError(
                    f"model.path: must be a Hugging Face directory with {name}, got {config.model.path!r}"
                    + _how_to_fetch(config)
                )
        if not list(model_dir.glob("*.safetensors")):
            raise ConfigError(f"model.path: must hold safetensors files, got none in {config.model.path!r}")


def _how_to_fetch(config: RunConfig) -> str:
    """Return how to get the checkpoint that a preset names."""
    hub_name = config.model.hub_name
    return f"; hf download {hub_name} --local-dir {config.model.path} fetches it" if hub_name else ""


def _check_towers(config: RunConfig) -> None:
    """Refuse media that the model has no tower for, as far as the sources' first rows show them."""
    if config.model.path is None:
        return
    try:
        profile = EncodingProfile.from_pretrained(config.model.path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {error}") from error
    if set(profile.tower_tokens) == set(TOWERS):
        return
    modalities = _load_modalities(config, profile)
    for source in (*config.data.train_sources().values(), *config.data.eval.values()):
        for row in islice(Manifest(source, modalities), ROWS_LOOKED_AT):
            for ref in row.media if isinstance(row, Record) else ():
                tower = modalities[ref.modality].tower
                if tower not in profile.tower_tokens:
                    towers = ", ".join(profile.tower_tokens) or "none, it reads text alone"
                    raise ConfigError(
                        f"{row.place}: media must be for a tower of model.path {config.model.path!r} ({towers}), "
                        f"got {ref.modality!r} for {tower!r}; choose another model or leave such rows out"
                    )


def _check_layout(config: RunConfig) -> None:
    """Refuse a layout of the trainer that the batch or the model cannot be cut by."""
    layout = config.actor.layout
    if config.prompts_per_step < layout.data_parallel:
        raise ConfigError(
            f"prompts_per_step: must be at least actor.layout.dp={layout.data_parallel}, for each rank trains whole "
            f"groups, got {config.prompts_per_step}"
        )
    if config.model.path is None or layout.num_procs == 1:
        return
    try:
        model = ThinkerSpec.from_pretrained(config.model.path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {error}") from error
    sizes = ModelSizes(
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_groups=model.num_key_value_heads,
        dense_width=model.dense_width,
        num_experts=model.num_experts or None,
        num_deepstack=model.num_deepstack,
        tied=model.tied,
    )
    check_layout(layout, sizes)


def _check_memory(config: RunConfig) -> None:
    if config.model.path is None:
        return
    weight_bytes = sum(_tensor_bytes(path) for path in Path(config.model.path).glob("*.safetensors"))
    layout = config.actor.layout
    holders = layout.data_parallel * layout.cp
    checkpoint = config.checkpoint
    saved = SAVED_COPIES if checkpoint.asynchronous and checkpoint.interval_steps else 0
    num_parameters = sum(math.prod(each.shape) for each in read_layout(config.model.path).values())
    copies = TRAINING_BYTES[config.actor.dtype] * holders + ENGINE_BYTES * config.rollout.num_workers
    scorers = len(set(config.roles.services) - {"advantages"}) + config.num_evaluators
    needed = num_parameters * (copies + 4 * saved + ENGINE_BYTES * scorers)
    available = psutil.virtual_memory().available
    if needed > available:
        raise ConfigError(
            f"model.path: weights of {weight_bytes / 1e9:.1f} GB need about {needed / 1e9:.1f} GB for one actor and "
            f"{config.rollout.num_workers} rollout service(s), got {available / 1e9:.1f} GB of free memory"
        )
    if config.weights.where == "shm" and SHARED_MEMORY.is_dir():
        num_snapshots = checkpoint.keep_snapshots + 1
        free = shutil.disk_usage(SHARED_MEMORY).free
        if weight_bytes * num_snapshots > free:
            raise ConfigError(
                f"weights.where: shm must have room for {num_snapshots} snapshots of {weight_bytes / 1e9:.1f} GB, got "
                f"{free / 1e9:.1f} GB; lower checkpoint.keep_snapshots or set weights.where=disk"
            )


def _tensor_bytes(path: Path) -> int:
    """Return the bytes of all tensors from the file's header alone."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, MAX_HEADER_BYTES)))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        return max(ends, default=0)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, struct.error) as error:
        raise ConfigError(
            f"model.path: {path} must be a safetensors file, got another header ({error})"
        ) from error
