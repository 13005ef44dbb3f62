"""What a table says about itself: counts, ages and members as plain dictionaries for people and dashboards."""

from __future__ import annotations

from collections import Counter
from typing import Any

from flight.staleness import StalenessGate
from flight.state.cursor import Cursor
from flight.table import TableState


def table_statistics(table: TableState, gate: StalenessGate | None, num_bytes: int) -> dict[str, Any]:
    """Return counts of one table. Rows are rows, ages are policy versions, `num_bytes` is what is retained."""
    spec = table.spec
    return {
        "rows": len(table.rows),
        "bytes": num_bytes,
        "capacity_rows": spec.capacity_rows,
        "capacity_bytes": spec.capacity_bytes,
        "reserved_rows": table.num_reserved,
        "put": table.num_put,
        "duplicates": table.counts["duplicates"],
        "retired": table.counts["retired"],
        "dropped": table.counts["dropped"],
        "abandoned": table.counts["abandoned"],
        "retracted": table.counts["retracted"],
        "uniform": table.counts["uniform"],
        "expired": table.counts["expired"],
        "truncated": table.counts["truncated"],
        "lost": table.counts["lost"],
        "unreferenced": table.counts["unreferenced"],
        "awaiting_reference": len(table.unreferenced or ()),
        "dead_rows": table.dead.num_rows,
        "dead_discarded": table.counts["dead_discarded"],
        "expected_rows": table.end.expected_rows,
        "never_coming": table.end.num_never,
        "sealed": table.is_closed,
        "consumers": {
            consumer.name: {"sampler": consumer.sampler, "last_step": table.last_step.get(consumer.name)}
            | (
                _cursor_statistics(table.cursors[consumer.name])
                if consumer.name in table.cursors
                else {"acked": table.counts[f"acked:{consumer.name}"]}
            )
            for consumer in spec.consumers
        },
        "dead_letters": [
            {"uid": uid, "consumer": consumer, "reason": reason}
            for uid, consumer, reason in table.dead_letters[-20:]
        ],
        "staleness": None if gate is None else gate_statistics(gate),
    }


def _cursor_statistics(cursor: Cursor) -> dict[str, Any]:
    members = Counter[str]()
    for lease in cursor.leases.values():
        members[lease.member] += len(lease.units) * cursor.unit_size
    return {
        "ready": cursor.num_ready(),
        "leased": cursor.num_leased(),
        "unready": cursor.unready.total(),
        "taken": cursor.counts["taken"],
        "acked": cursor.counts["acked"],
        "skipped": cursor.counts["skipped"],
        "dead": cursor.counts["dead"],
        "requeued": cursor.counts["requeued"],
        "redelivered": cursor.counts["redelivered"],
        "expired_leases": cursor.counts["expired_leases"],
        "leased_by": dict(members),
    }


def gate_statistics(gate: StalenessGate) -> dict[str, Any]:
    """Return the books of a staleness bound; `bound_rows` is what may be outstanding at most."""
    return {
        "policy_version": gate.policy_version,
        "max_staleness": gate.max_staleness,
        "policy": gate.spec.policy,
        "rows_per_version": gate.spec.rows_per_version,
        "bound_rows": gate.most_room(),
        "bound": f"max_staleness {gate.max_staleness} policy versions, so at most {gate.most_room()} rows outstanding",
        "outstanding": gate.outstanding,
        "in_flight": gate.in_flight.total(),
        "waiting": gate.num_waiting,
        "trained_uncredited": gate.trained.total(),
        "trained": gate.counts["trained"],
        "stale": gate.counts["stale"],
        "dropped": gate.counts["dropped"],
        "uniform": gate.counts["uniform"],
        "unticketed": gate.counts["unticketed"],
        "trained_age": _by_key(gate.trained_age),
        "stale_age": _by_key(gate.stale_age),
        "dropped_age": _by_key(gate.dropped_age),
        **{
            f"{kind}_completion_tokens_log2": _by_key(histogram)
            for kind, histogram in gate.completion_tokens.items()
        },
        "units": _GATE_UNITS,
    }


_GATE_UNITS = {
    "policy_version, max_staleness": "policy versions",
    "*_age": "rows by age in policy versions",
    "*_completion_tokens_log2": "rows by n: 2 ** (n - 1) <= tokens < 2 ** n",
    "all other numbers": "rows",
}


def _by_key(histogram: Counter[int]) -> dict[str, int]:
    return {str(key): histogram[key] for key in sorted(histogram)}
