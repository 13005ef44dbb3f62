"""Which of the actor's computations are services of their own, and which choices go together. It imports no torch.

    reference    logprobs under the model that training started from
    actor_fwd    logprobs under the policy before the step (proximal)
    advantages   advantages, and with a critic returns, from the columns of whole groups
    critic       values, and the training of the head that gives them

Folded, the actor computes them itself. As a service each is a process that takes rows of `rollouts` as a consumer of
its own and puts its columns; the actor then takes a row once they are there. The numbers are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from relax.algorithms.config import AlgorithmConfig
from relax.errors import ConfigError

SERVABLE = ("reference", "actor_fwd", "critic", "advantages")
"""Roles that may be services, in the order in which a row passes them."""
PLACES = ("folded", "service")


@dataclass(kw_only=True)
class RolesConfig:
    """Where each of the computations around the actor's step is done: `folded` into the actor, or as a `service`."""

    reference: str = "folded"
    """Logprobs under the model that training started from; needs `algorithm.kl_coef`."""
    actor_fwd: str = "folded"
    """Logprobs under the policy before the step, for algorithms that look at them."""
    advantages: str = "folded"
    """Advantages of whole groups."""
    critic: str = "folded"
    """Values, with `algorithm.advantage=gae`."""
    max_proximal_lag: int = 0
    """Policy versions that the logprobs of `actor_fwd` may be behind the weights that a step begins with; a batch with
    rows further behind is scored by the actor itself. 0: the numbers are those of the folded form."""

    def __post_init__(self) -> None:
        for role in SERVABLE:
            place = getattr(self, role)
            if place not in PLACES:
                raise ConfigError(f"roles.{role}: must be one of {', '.join(PLACES)}, got {place!r}")
        if self.max_proximal_lag < 0:
            raise ConfigError(f"roles.max_proximal_lag: must be at least 0, got {self.max_proximal_lag}")

    @property
    def services(self) -> tuple[str, ...]:
        """The roles that are services."""
        return tuple(role for role in SERVABLE if getattr(self, role) == "service")


def looks_at_proximal(algorithm: AlgorithmConfig, staleness_policy: str) -> bool:
    """Return whether the loss depends on the trainer's logprobs before the step."""
    correction = algorithm.correction
    return (
        algorithm.proximal == "trainer"
        or correction.weight != "none"
        or correction.reject != "none"
        or correction.opsm_delta is not None
        or correction.m2_budget is not None
        or staleness_policy == "reweight"
    )


def check_roles(roles: RolesConfig, algorithm: AlgorithmConfig, staleness_policy: str) -> None:
    """Refuse services whose columns nobody needs, or that need columns which nobody writes.

    Raises:
        ConfigError: names the role, the reason and the way out.
    """
    for role, reason in _objections(roles, algorithm, staleness_policy):
        raise ConfigError(f"roles.{role}: must be folded {reason}, got service")


def _objections(
    roles: RolesConfig, algorithm: AlgorithmConfig, staleness_policy: str
) -> Iterator[tuple[str, str]]:
    served = roles.services
    penalised = algorithm.kl_coef > 0 and algorithm.kl_placement == "reward"
    if "reference" in served and not algorithm.kl_coef:
        yield "reference", "without a penalty (algorithm.kl_coef=0), for nobody would read its logprobs"
    if "actor_fwd" in served and not looks_at_proximal(algorithm, staleness_policy):
        yield (
            "actor_fwd",
            "unless the loss looks at the trainer's logprobs before the step (algorithm.proximal=trainer, "
            "algorithm.correction or staleness_policy=reweight)",
        )
    if "critic" in served:
        if not algorithm.has_critic:
            yield (
                "critic",
                f"without a critic (algorithm.advantage={algorithm.advantage}; it is gae that has one)",
            )
        if algorithm.critic.trunk_gradient:
            yield "critic", "with algorithm.critic.trunk_gradient, for its loss trains the actor's layers"
        if staleness_policy in ("mask", "reweight"):
            yield (
                "critic",
                f"with staleness_policy={staleness_policy}, for marks of stale tokens reach the actor alone",
            )
    if "advantages" in served:
        if penalised and "reference" not in served:
            yield "advantages", "with algorithm.kl_placement=reward unless roles.reference is a service, too"
        if algorithm.has_critic and "critic" not in served:
            yield "advantages", "with algorithm.advantage=gae unless roles.critic is a service, too"
