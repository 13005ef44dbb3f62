"""Options of rollouts that are interrupted and gone on with; see docs/rollouts.md."""

from __future__ import annotations

from dataclasses import dataclass

from relax.errors import ConfigError

ON_LIMIT = ("anew", "drop")
TRAIN_ON = ("all", "newest")


@dataclass(kw_only=True)
class PartialConfig:
    """What becomes of training rollouts that are unfinished when new weights are announced."""

    enabled: bool = False
    """Interrupt generation at an update and go on under the new weights, on any worker; off: finish under the old."""
    max_age_versions: int | None = None
    """Policy versions since its first token after which a rollout is not gone on with; absent: `max_staleness`."""
    max_continuations: int = 8
    """Interruptions of one rollout after which it is not gone on with."""
    on_limit: str = "anew"
    """What becomes of the prompt then: `anew`, it is answered from the beginning; `drop`, it is a row error."""
    train_on: str = "all"
    """`all` tokens of a rollout, or those of the `newest` policy in it alone, the others masked in the loss."""
    straggler_timeout_s: float = 0.0
    """Seconds of one generate call after which what is unfinished goes back to the queue; 0: none."""

    def __post_init__(self) -> None:
        for key, word, choices in (
            ("on_limit", self.on_limit, ON_LIMIT),
            ("train_on", self.train_on, TRAIN_ON),
        ):
            if word not in choices:
                raise ConfigError(f"rollout.partial.{key}: must be one of {', '.join(choices)}, got {word!r}")
        for key, value, least in (
            ("max_age_versions", self.max_age_versions, 0),
            ("max_continuations", self.max_continuations, 1),
            ("straggler_timeout_s", self.straggler_timeout_s, 0),
        ):
            if value is not None and value < least:
                raise ConfigError(f"rollout.partial.{key}: must be at least {least}, got {value}")
        if self.straggler_timeout_s and not self.enabled:
            raise ConfigError(
                f"rollout.partial.straggler_timeout_s: must be 0 without rollout.partial.enabled, got "
                f"{self.straggler_timeout_s}; what is aborted would be lost"
            )

    def max_age(self, max_staleness: int) -> int:
        """Return the bound on age in policy versions."""
        return max_staleness if self.max_age_versions is None else self.max_age_versions


def check_partial(config: PartialConfig, max_staleness: int, staleness_policy: str) -> None:
    """Refuse what contradicts the staleness bound of the run.

    Raises:
        ConfigError: rollouts would be gone on with that the queue drops, or masked tokens would be reweighted.
    """
    keeps_old = staleness_policy in ("mask", "reweight")
    if config.enabled and not keeps_old and config.max_age(max_staleness) > max_staleness:
        raise ConfigError(
            f"rollout.partial.max_age_versions: must be at most max_staleness={max_staleness} with "
            f"staleness_policy={staleness_policy}, which drops what is older, got {config.max_age_versions}"
        )
    if config.train_on == "newest" and staleness_policy == "reweight":
        raise ConfigError(
            "rollout.partial.train_on: must be all with staleness_policy=reweight, which trains on old tokens, "
            "got 'newest'; mask is the policy that leaves them out"
        )
