"""The weights on their way out: whole tensors gathered by rank 0 in buckets, each the bytes of one safetensors file.

    all ranks   parts of a bucket's parameters --gather--> rank 0: whole, under the directory's names and types
    rank 0      one buffer of its own for each bucket, which training does not change any more

No rank has more of the model at a time than its own part and a bucket. The plan of the buckets is made once and is the
same on all ranks: what is trained and what is not lie in different ones, and the latter are gathered once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from relax.models.checkpoint_files import file_names
from relax.models.snapshot import SnapshotWriter, WeightFile
from relax.models.tensor_file import file_bytes
from relax.train.policy import LANGUAGE_MODEL, OmniPolicy
from relax.train.ranks import World
from relax.train.shards import cut_of


@dataclass(frozen=True)
class Parameter:
    """One of the weights: its name on all ranks, its bytes when whole, and whether it is ever changed.

    stack: what it must not be parted from, see `OmniPolicy.stack_of`.
    """

    name: str
    num_bytes: int
    is_trained: bool
    stack: str = ""


@dataclass(frozen=True)
class Bucket:
    """Weights that are gathered together, and the file that they make."""

    file: str
    names: frozenset[str]
    is_trained: bool


def plan_buckets(parameters: Sequence[Parameter], max_bytes: int) -> list[Bucket]:
    """Return buckets of at most `max_bytes`, larger parameters and stacks alone, in order; trained and fixed apart."""
    units: dict[str, list[Parameter]] = {}
    for parameter in parameters:
        units.setdefault(parameter.stack or parameter.name, []).append(parameter)
    groups: list[tuple[bool, list[str]]] = []
    for is_trained in (False, True):
        held = max_bytes
        for unit in units.values():
            if any(each.is_trained for each in unit) is not is_trained:
                continue
            num_bytes = sum(each.num_bytes for each in unit)
            held += num_bytes
            if held > max_bytes:
                groups.append((is_trained, []))
                held = num_bytes
            groups[-1][1].extend(each.name for each in unit)
    return [
        Bucket(file, frozenset(names), is_trained)
        for file, (is_trained, names) in zip(file_names(len(groups)), groups, strict=True)
    ]


class WeightExport:
    """Gathers a policy's weights. All ranks must make one, and call it together."""

    def __init__(self, policy: OmniPolicy, max_bytes: int) -> None:
        self._policy = policy
        self.buckets = plan_buckets(_parameters(policy), max_bytes)

    def files(self, *, again: bool = False) -> Iterator[WeightFile]:
        """Yield the files of the weights as they are, on rank 0; all ranks must go on to the end.

        Args:
            again: What is not trained has been gathered before: its files come without content.
        """
        held = self._policy.held_parts()
        for bucket in self.buckets:
            if again and not bucket.is_trained:
                if not self._policy.world.rank:
                    yield WeightFile(name=bucket.file)
                continue
            part = dict(held[name] for name in held if name in bucket.names)
            whole = self._policy.checkpoint_part(part)
            if not self._policy.world.rank:
                content = file_bytes(whole)
                yield WeightFile(name=bucket.file, tensors=tuple(whole), content=content)


def write_weights(export: WeightExport, world: World, directory: Path, policy_version: int) -> None:
    """Write the weights as a snapshot that appears whole or not at all, and wait. All ranks must call it."""
    with ExitStack() as stack:
        writer = None
        if world.rank == 0:
            writer = stack.enter_context(SnapshotWriter(directory, policy_version))
        for file in export.files():
            if writer is not None:
                writer.add(file)
        if writer is not None:
            writer.finish()
    world.wait_for_all()


def _parameters(policy: OmniPolicy) -> list[Parameter]:
    """Return the weights of the whole model, on all ranks alike."""
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    own = []
    for name, (here, tensor) in policy.held_parts().items():
        cut = cut_of(name.removeprefix(LANGUAGE_MODEL)) if name.startswith(LANGUAGE_MODEL) else None
        ranks = policy.world.layout.tp if cut is not None and cut.dim is not None else 1
        own.append([name, tensor.nbytes * ranks, here in trained, policy.stack_of(name)])
    found = {told[0]: Parameter(*told) for each in policy.world.collect(own) for told in each}
    return list(found.values())
