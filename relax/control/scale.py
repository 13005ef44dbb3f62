"""How many services of a role there are while a run goes on: what is wanted, and what the run has taken up. Pure.

    anybody: sets SCALE_KEY to a number -> driver: starts services, or has the highest ones leave, and sets WORKERS_KEY

A service that has to leave gets a phase of its own, `phase/<role>/<index>`.
"""

from __future__ import annotations

from typing import Any

from relax.control.messages import PHASE_KEY

SCALE_KEY = "scale/rollout"
"""Rollout services that somebody wants."""
WORKERS_KEY = "workers/rollout"
"""Rollout services that share the prompts, by the driver."""
SCALE_PREFIX = "scale/"
MOST = 1000
OPERATOR = "operator"
"""Role of those who look in to change something; no service of the run."""


def member_phase_key(role: str, index: int) -> str:
    """Return the key of the phase of one service, which comes before that of its role."""
    return f"{PHASE_KEY}/{role}/{index}"


def scale_objection(key: str, value: Any) -> str:
    """Return why a key that begins with `scale/` may not have a value, or ''."""
    if key != SCALE_KEY:
        return f"control key {key!r}: the role must be rollout, got {key.removeprefix(SCALE_PREFIX)!r}"
    if value is not None and (type(value) is not int or not 1 <= value <= MOST):
        return f"control key {key!r}: the number of services must be from 1 to {MOST}, got {value!r}"
    return ""
