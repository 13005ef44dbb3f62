"""Where prompts come from and how their rows are read. Plain values; no file is opened here."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from relax.errors import ConfigError

LAYOUTS = ("messages", "sharegpt", "columns")
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


@dataclass(kw_only=True)
class SourceConfig:
    """One source of prompts."""

    path: str
    """JSON Lines (.jsonl, .ndjson) or Parquet file, directory of Parquet files, or directory of `save_to_disk`."""
    layout: str = "messages"
    """`messages`: chat messages; `sharegpt`: turns with `from` and `value`; `columns`: prompt and answer."""
    fields: dict[str, str] = field(default_factory=dict)
    """Name of the source's column by our name for it, where the two differ: {answer: solution, images: picture}."""
    weight: float = 1.0
    """Share of the training prompts among the other sources', in any unit. An evaluation set has none."""

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ConfigError(f"layout: must be one of {', '.join(LAYOUTS)}, got {self.layout!r}")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ConfigError(f"weight: must be above 0, got {self.weight}")


@dataclass(kw_only=True)
class CurriculumConfig:
    """Which prompts are preferred, by the mean reward that they lately had."""

    enabled: bool = False
    """Whether prompts outside the band are put off to a later epoch."""
    low: float = 0.1
    """Lowest mean reward of the band; a prompt below it is too hard for now."""
    high: float = 0.9
    """Highest mean reward of the band; a prompt above it is known."""
    retry: float = 0.2
    """Share of the draws outside the band that are taken all the same, so that a prompt can come back into it."""
    memory: float = 0.5
    """Weight of a prompt's newest group of rollouts in its mean; 1: only the newest counts."""

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ConfigError(f"data.curriculum.low: must be at most high={self.high}, got {self.low}")
        for key, value in (("retry", self.retry), ("memory", self.memory)):
            if not 0 < value <= 1:
                raise ConfigError(f"data.curriculum.{key}: must be above 0 and at most 1, got {value}")


@dataclass(kw_only=True)
class DataConfig:
    """Where the prompts come from. Relative media paths count from the directory of the file that names them."""

    manifest: str | None = None
    """The one source to train on; absent, with `sources` empty: the toy data set is made under `data/toy_omni`."""
    sources: dict[str, Any] = field(default_factory=dict)
    """Several sources to train on, by name, instead of `manifest`: paths, or the keys of `SourceConfig`."""
    eval: dict[str, Any] = field(default_factory=dict)
    """Held-out sets by name, in the same form; empty with `manifest` or `sources` given: no held-out evaluation."""
    layout: str = "messages"
    """Layout of the sources and sets that name none: `messages`, `sharegpt` or `columns`."""
    fields: dict[str, str] = field(default_factory=dict)
    """Column by our name, such as {answer: solution}, for the sources and sets that name none."""
    shuffle: bool = True
    """Whether the rows of a source come in another order each epoch, which the seed decides; else in file order."""
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    """Which prompts are preferred by their rewards."""
    max_prompt_tokens: int = 2048
    """Longest prompt, media tokens included; a longer one is a row error."""
    max_prompt_chars: int = 32_768
    """Longest question in characters; a longer one is a row error."""
    lookahead_steps: int = 2
    """Training batches of prompts that are prepared in advance."""
    num_workers: int = 1
    """Preprocess services."""
    cache_bytes: int = 256 << 20
    """Encoded media kept by each preprocess service, since epochs repeat them."""

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ConfigError(f"data.layout: must be one of {', '.join(LAYOUTS)}, got {self.layout!r}")
        defaults = {"layout": self.layout, "fields": self.fields}
        self.sources = read_sources("data.sources", self.sources, defaults)
        self.eval = read_sources("data.eval", self.eval, defaults)
        if self.manifest is not None and self.sources:
            raise ConfigError(
                f"data.manifest: must be absent with data.sources, got both; make {self.manifest!r} one of them"
            )

    def train_sources(self) -> dict[str, SourceConfig]:
        """Return what is trained on by name: `sources`, or `manifest` as the only one, named train."""
        if self.manifest is None:
            return dict(self.sources)
        return {"train": SourceConfig(path=self.manifest, layout=self.layout, fields=dict(self.fields))}


def read_sources(key: str, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, SourceConfig]:
    """Return sources by name; each was given as a path, or as the keys of `SourceConfig`.

    Args:
        key: Where in the configuration they stand.
        given: Paths, keys or sources by name.
        defaults: Layout and fields of those that say nothing of them.

    Raises:
        ConfigError: a name, key or value cannot be.
    """
    known = {each.name: each.type for each in fields(SourceConfig)}
    made = {}
    for name, value in given.items():
        where = f"{key}.{name}"
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ConfigError(f"{key}: a name must be a letter, then letters, digits or '_', got {name!r}")
        if isinstance(value, SourceConfig):
            made[name] = value
            continue
        words = {"path": value} if isinstance(value, str) else value
        if not isinstance(words, Mapping) or not isinstance(words.get("path"), str):
            raise ConfigError(f"{where}: must be a path or keys with path, got {value!r}")
        unknown = sorted(set(words) - set(known), key=str)
        if unknown:
            raise ConfigError(f"{where}: keys must be of {', '.join(known)}, got {unknown}")
        try:
            made[name] = SourceConfig(**{**defaults, **_checked(words)})
        except ConfigError as error:
            raise ConfigError(f"{where}.{error}") from error
    return made


def _checked(words: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys with their types looked at; configuration files hold anything."""
    weight = words.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise ConfigError(f"weight: must be a number, got {weight!r}")
    columns = words.get("fields", {})
    if not isinstance(columns, Mapping) or not all(isinstance(each, str) for each in columns.values()):
        raise ConfigError(f"fields: must be column names by our names, got {columns!r}")
    given = dict(words)
    if "fields" in given:
        given["fields"] = {str(name): column for name, column in columns.items()}
    return given
