"""The advantages role: from the columns of whole groups to the advantage of every token, and to returns with a critic.

What looks at a whole training batch (whitening) is left to the actor, that alone knows which rows make one.
"""

from __future__ import annotations

import pyarrow as pa

from modalities.packing import unpack_present
from relax.roles.given_columns import packed
from relax.roles.scoring import Columns, RowService
from relax.roles.service import Service
from relax.train.group_credit import GroupOutcome, group_credit


def run(service: Service) -> None:
    """Give credit until the role has to leave."""
    rows, algorithm = RowService(service), service.config.algorithm

    def made_of(table: pa.Table) -> Columns:
        credit = group_credit(outcome_of(table), algorithm)
        columns = {"raw_advantages": packed(credit.advantages)}
        if credit.returns is not None:
            columns["returns"] = packed(credit.returns)
        return columns

    service.report(state="ready")
    while not service.leaving:
        service.wait_while_paused()
        rows.serve(made_of)


def outcome_of(table: pa.Table) -> GroupOutcome:
    """Return what rows of whole groups brought; scores of other services as far as they are there."""
    scores = {
        name: unpack_present(table[name]) for name in ("ref_logprobs", "values") if name in table.column_names
    }
    return GroupOutcome(
        group_ids=table["group_id"].to_pylist(),
        rewards=table["reward"].to_numpy(),
        rollout_logprobs=unpack_present(table["rollout_logprobs"]),
        **scores,
    )
