"""The evaluation role: a rollout engine of its own for held-out prompts, so that the others never leave training.

It adopts the versions that rounds ask for, and no others.
"""

from __future__ import annotations

from relax.rewards.scorer import Scorer
from relax.roles.abort import abort_when_gone_back
from relax.roles.held_out import serve_held_out
from relax.roles.rollout import HELD_OUT, make_engine, make_worker
from relax.roles.service import Service

WAIT_S = 0.5


def run(service: Service) -> None:
    """Serve held-out prompts until the role has to leave."""
    config = service.config
    engine = make_engine(service, config.rollout.num_workers + service.index)
    worker = make_worker(service, engine, Scorer(config.rollout.reward))
    service.report(state="ready")
    with abort_when_gone_back(service, engine):
        while not service.leaving:
            service.wait_while_paused()
            service.follow()
            serve_held_out(worker, HELD_OUT, config.evaluation.max_prompts, deadline_s=WAIT_S)
    worker.close()
