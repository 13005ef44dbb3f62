"""The actor_fwd role: logprobs of rollouts under the policy before the step, computed while others still generate.

Which weights is said in `relax.roles.scoring.WeightFollower`. Rows that wait for their step meanwhile fall behind: the
column `proximal_policy_version` says whose logprobs they are, and the actor, that knows the version of its step, scores
a batch itself that is too far behind (`roles.max_proximal_lag`).
"""

from __future__ import annotations

import pyarrow as pa

from relax.roles.given_columns import packed
from relax.roles.scoring import Columns, RowReader, RowService, WeightFollower, make_scorer
from relax.roles.service import Service


def run(service: Service) -> None:
    """Score rows until the role has to leave."""
    scorer = make_scorer(service, replays_routing=True)
    reader, rows = RowReader(service, scorer, replays_routing=True), RowService(service)
    weights = WeightFollower(service, scorer)

    def made_of(table: pa.Table) -> Columns | None:
        if not weights.adopt_for(table):
            return None
        versions = [scorer.policy_version] * table.num_rows
        return {
            "proximal_logprobs": packed(scorer.score(reader.read(table)).logprobs),
            "proximal_policy_version": pa.array(versions, pa.int64()),
        }

    service.report(state="ready")
    while not service.leaving:
        service.wait_while_paused()
        if weights.adopt_newest():
            rows.serve(made_of, scorer.policy_version)
