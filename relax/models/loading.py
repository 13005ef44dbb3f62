"""Models of a directory in torch: the whole one for sampling, or the towers alone for the trainer.

It knows no family: what is where says `relax.models.families`. Nothing is fetched from the network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.utils import logging as hf_logging

from relax.models.checkpoint_files import read_tensors
from relax.models.errors import CheckpointError
from relax.models.expert_stacks import ExpertStacks, is_stack, split_stack
from relax.models.families import CheckpointNames
from relax.models.families.base import AUDIO, VISUAL
from relax.models.layout import TensorLayout, read_layout
from relax.models.spec import ThinkerSpec


@dataclass(frozen=True)
class Thinker:
    """A loaded model: the Hugging Face module and what must be known of it."""

    hf: Any
    """The family's class of transformers, in evaluation mode (it has no dropout)."""
    spec: ThinkerSpec
    model_dir: Path
    names: CheckpointNames
    """How the directory names the tensors."""
    stacks: ExpertStacks
    """Of its experts."""

    @property
    def text(self) -> Any:
        """The language model, without the output matrix."""
        return self.hf.get_submodule(self.spec.family.text_module)

    @property
    def towers(self) -> dict[str, nn.Module]:
        """The towers by our name of them: `visual`, `audio_tower`."""
        return {name: self.hf.get_submodule(path) for name, path in self.spec.family.tower_modules.items()}

    @property
    def visual(self) -> Any:
        """The vision tower."""
        return self.towers[VISUAL]

    @property
    def audio_tower(self) -> Any:
        """The audio tower."""
        return self.towers[AUDIO]

    @property
    def dtype(self) -> torch.dtype:
        return self.hf.lm_head.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.hf.lm_head.weight.device


def load_thinker(
    model_dir: Path | str, dtype: torch.dtype = torch.float32, *, device: torch.device | str = "cpu"
) -> Thinker:
    """Load the language model with its towers from a directory in Hugging Face layout.

    Raises:
        CheckpointError: The family is unknown; or the directory lacks a file, a tensor of the model, or has one of
            another shape.
    """
    where = Path(model_dir)
    spec = ThinkerSpec.from_pretrained(where)
    with _no_progress_bar():
        try:
            loaded: Any = _hf_class(spec).from_pretrained(
                where, dtype=dtype, local_files_only=True, output_loading_info=True
            )
            hf, info = loaded
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"load_thinker: {where} must hold the tensors of a {spec.family.name}, got {error}"
            ) from error
    if info["missing_keys"]:
        names = sorted(info["missing_keys"])
        raise CheckpointError(
            f"load_thinker: {where} must hold every tensor of a {spec.family.name}, "
            f"lacks {len(names)}, first {names[0]}"
        )
    return _thinker(hf.eval().to(device), spec, where)


def load_towers(model_dir: Path | str, dtype: torch.dtype = torch.float32, *, empty: bool = False) -> Thinker:
    """Load the towers alone, on the CPU; the language model has no memory (it is on torch's meta device).

    With `empty` the towers have none either.

    Raises:
        CheckpointError: As `load_thinker`.
    """
    where = Path(model_dir)
    shell = model_skeleton(where)
    hf, spec = shell.hf, shell.spec
    thinker = _thinker(hf, spec, where)
    if empty:
        return thinker
    tensors = read_tensors(
        where, [name for name in read_layout(where) if name.startswith(tuple(thinker.names.towers.values()))]
    )
    for tower, path in spec.family.tower_modules.items():
        tower_shell: Any = hf.get_submodule(path)
        prefix = thinker.names.towers[tower]
        with torch.random.fork_rng(devices=[]):  # building draws weights, which are then replaced
            module = type(tower_shell)._from_config(tower_shell.config, dtype=dtype)
        own = {
            name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)
        }
        try:
            module.load_state_dict(own)
        except RuntimeError as error:
            raise CheckpointError(
                f"load_towers: {where} must hold every tensor of {tower} and no other, got: {error}"
            ) from error
        hf.set_submodule(path, module.eval().requires_grad_(True))
    return thinker


def model_skeleton(model_dir: Path | str) -> Thinker:
    """Return a directory's model without memory (on torch's meta device); its configuration is enough."""
    where = Path(model_dir)
    spec = ThinkerSpec.from_pretrained(where)
    hf_class = _hf_class(spec)
    # Of a directory that holds further models the class takes its own part of the configuration.
    config = hf_class.config_class.from_pretrained(where, local_files_only=True)
    with torch.device("meta"):
        hf = hf_class(config).eval().requires_grad_(True)
    return Thinker(hf, spec, where, spec.family.names[0], ExpertStacks({}, 0))


def checkpoint_views(thinker: Thinker) -> dict[str, Tensor]:
    """Return the weights under the names of the checkpoint, as views: writing into one changes the model.

    A module keeps all experts of a layer in one tensor; most checkpoints have a tensor for each of their matrices.
    An output matrix that is the token embedding is left out.
    """
    views: dict[str, Tensor] = {}
    for name, parameter in thinker.hf.state_dict(keep_vars=True).items():
        if thinker.spec.tied and name == "lm_head.weight":
            continue
        stored, value = checkpoint_name(thinker, name), parameter.detach()
        if not is_stack(stored):
            views[stored] = value
        elif thinker.stacks:
            views[stored] = thinker.stacks.turned(stored, value)
        else:
            views |= split_stack(stored, value)
    return views


def checkpoint_name(thinker: Thinker, name: str) -> str:
    """Return the checkpoint's name of one of the module's tensors."""
    family, names = thinker.spec.family, thinker.names
    for tower, path in family.tower_modules.items():
        if name.startswith(f"{path}."):
            return names.towers[tower] + name.removeprefix(f"{path}.")
    if name.startswith(f"{family.text_module}."):
        return names.text + name.removeprefix(f"{family.text_module}.")
    return names.head


def names_of(spec: ThinkerSpec, stored: Mapping[str, TensorLayout], where: object) -> CheckpointNames:
    """Return which of the family's ways of naming a directory has.

    Raises:
        CheckpointError: There is no token embedding under any of them.
    """
    for names in spec.family.names:
        if f"{names.text}embed_tokens.weight" in stored:
            return names
    wanted = " or ".join(f"{names.text}embed_tokens.weight" for names in spec.family.names)
    raise CheckpointError(f"{where}: must hold a tensor {wanted}, as a {spec.family.name} has, got none")


def _thinker(hf: Any, spec: ThinkerSpec, where: Path) -> Thinker:
    stored = read_layout(where)
    shapes = {name: layout.shape for name, layout in stored.items()} if spec.family.stacked_experts else {}
    return Thinker(
        hf=hf,
        spec=spec,
        model_dir=where,
        names=names_of(spec, stored, where),
        stacks=ExpertStacks(shapes, spec.hidden_size),
    )


def _hf_class(spec: ThinkerSpec) -> Any:
    return getattr(transformers, spec.family.hf_class)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    showed_progress = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if showed_progress:
            hf_logging.enable_progress_bar()
