"""The reference role: logprobs of all rollouts under the model that training started from, as a column of their own."""

from __future__ import annotations

import pyarrow as pa

from relax.roles.given_columns import packed
from relax.roles.scoring import Columns, RowReader, RowService, make_scorer
from relax.roles.service import Service


def run(service: Service) -> None:
    """Score rows until the role has to leave. The model routes by itself, as the actor's own reference does."""
    scorer = make_scorer(service, replays_routing=False)
    reader, rows = RowReader(service, scorer, replays_routing=False), RowService(service)

    def made_of(table: pa.Table) -> Columns:
        return {"ref_logprobs": packed(scorer.score(reader.read(table)).logprobs)}

    service.report(state="ready")
    while not service.leaving:
        service.wait_while_paused()
        rows.serve(made_of)
