"""Ranks that fetch a step's batch from a real queue and say what each of them holds: `python -m tests.kit.batch_ranks`.

`StandInService` is a fake: of a service it has what `TrainingBatches` asks for, and a phase that never changes.
`NotingClient` is a client that also notes which columns are read.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from flight.client import QueueClient
from relax.config import RunConfig, load_config
from relax.roles.service import PartClock


class NotingClient(QueueClient):
    """A client that notes the columns of each read, table by table."""

    noted: dict[str, list[str]]

    def read(self, table: str, *, columns: Any = None, **choice: Any) -> pa.Table:
        """Read, and note."""
        self.noted[table] = list(columns or ["all"])
        return super().read(table, columns=columns, **choice)


@dataclass
class StandInControl:
    """A fake: the control plane of a run that goes on."""

    phase: str = "run"


@dataclass
class StandInService:
    """A fake: a service without a hub."""

    queue: NotingClient
    config: RunConfig
    model_dir: Path
    control: StandInControl = field(default_factory=StandInControl)
    clock: PartClock = field(default_factory=PartClock)
    leaving: bool = False


def held(service: Any, layout: dict[str, int], step: int) -> dict[str, Any]:
    """Return what this rank holds of a step: the leases, the rows it trains, and where media and experts are."""
    from relax.roles.training_batch import TrainingBatches
    from relax.train.layout import LayoutConfig
    from relax.train.runtime import leave_parallel, start_parallel

    service.config.actor.layout = LayoutConfig(**layout)
    service.queue.noted = {}
    world = start_parallel(0, service.config.actor.layout)
    # As of a model of two layers with experts.
    layers = [0, 1] if world.layout.pp == 1 else [world.place.pp_rank]
    batches = TrainingBatches(service, world, layers)
    harvest = batches.collect(step - 1)
    if harvest is None:
        raise RuntimeError("held: there must be rows, got none")
    batch = batches.read(harvest)
    world.wait_for_all()
    if world.rank == 0:
        for lease_id in harvest.lease_ids:
            service.queue.ack("rollouts", "actor", lease_id=lease_id, step=step)
    leave_parallel(for_good=False)
    experts = {row: each for row, each in enumerate(batch.routed_experts) if each is not None}
    return {
        "rank": world.rank,
        "lease_ids": harvest.lease_ids,
        "uids": harvest.table["uid"].to_pylist(),
        "tokens": [tokens.tolist() for tokens in batch.completion_token_ids],
        "rewards": batch.rewards.tolist(),
        "own": batch.own_rows.tolist(),
        "own_prompts": batch.own_prompt_numbers.tolist(),
        "media": [group for group, prompt in enumerate(batch.prompts) if prompt.media],
        "experts": list(experts),
        "first_token": next(iter(experts.values()))[0].tolist(),
        "columns": harvest.table.column_names,
        "read": service.queue.noted,
        "metrics": harvest.metrics,
    }


def main(uri: str, model_dir: str, layouts: str, *words: str) -> None:
    """Fetch one step for each layout, in turn, and print what this rank held."""
    from relax.train.runtime import leave_parallel

    config = load_config([], ["prompts_per_step=4", "group_size=2", "max_staleness=9", *words])
    with NotingClient(uri, identity="rank", deadline_s=60.0) as queue:
        service = StandInService(queue, config, Path(model_dir))
        for step, layout in enumerate(json.loads(layouts), start=1):
            print(json.dumps(held(service, layout, step)), flush=True)
    leave_parallel()


if __name__ == "__main__":
    main(*sys.argv[1:])
