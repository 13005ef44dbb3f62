"""What sets one family of models apart from another, as data. No torch, no transformers, no sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from modalities.profile import Tower

FilmTimes = Callable[[int, float, float], np.ndarray]
"""(temporal patches, seconds from one to the next, steps a second) -> each one's place on the rotary time axis."""

VISUAL, AUDIO = "visual", "audio_tower"
"""What we call the two towers, whatever a checkpoint calls them."""


@dataclass(frozen=True, kw_only=True)
class CheckpointNames:
    """How a directory names its tensors: what stands before our names of each part."""

    text: str
    """Before `layers.0...`, `embed_tokens.weight` and `norm.weight`."""
    head: str
    """Of the output matrix, whole."""
    towers: Mapping[str, str] = field(default_factory=dict)
    """Before the names of a tower's own tensors."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family: where its parts are, and which of the known ways of doing things are its own."""

    model_types: tuple[str, ...]
    """`model_type` of the configurations that are of this family; the first is its name."""
    hf_class: str
    """Class of transformers that has the language model and the towers."""
    text_module: str = "model"
    """Where the class keeps its language model."""
    tower_modules: Mapping[str, str] = field(default_factory=dict)
    """Where the class keeps each tower."""
    towers: tuple[Tower, ...] = ()
    """Kinds of media that it takes."""
    names: tuple[CheckpointNames, ...]
    """Ways in which directories name the tensors; the one whose embedding is there is taken."""
    config_key: str | None = None
    """Part of config.json that is about this model, where a directory holds further models."""
    foreign: tuple[str, ...] = ()
    """What the names of those further models' tensors start with; they are kept as they are."""
    rotary: Literal["interleaved", "blocks"] = "interleaved"
    """How time, height and width share the rotary frequencies; with one axis both are the same."""
    qk_norm: bool = True
    """Whether queries and keys are normalised, each head for itself."""
    qkv_bias: bool = False
    """Whether queries, keys and values have biases, whatever the configuration says."""
    stacked_experts: bool = False
    """Whether a checkpoint has all experts of a layer in one tensor, [experts, in, out], gate beside up."""
    has_deepstack: bool = False
    """Whether the vision tower also feeds the first layers of the language model."""
    film_times: FilmTimes | None = None
    """Places of a film's frames on the time axis; None with towers: every frame is a picture of its own."""
    text_follows_side: bool = False
    """Text after a medium goes on after its longer side, whatever its places in time; else after its largest place."""
    hf_film_seconds: str | None = None
    """Argument by which the class is told the seconds between two temporal patches."""
    hf_token_types: bool = False
    """Whether the class wants to be told which tokens are of pictures and films."""

    @property
    def name(self) -> str:
        """The family's name."""
        return self.model_types[0]

    @property
    def has_visual(self) -> bool:
        """Whether there is a vision tower."""
        return VISUAL in self.tower_modules

    @property
    def film_in_frames(self) -> bool:
        """Whether each temporal patch of a film has placeholders of its own."""
        return self.has_visual and self.film_times is None
