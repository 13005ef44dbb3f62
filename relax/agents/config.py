"""Options of agents. It loads no plug-in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from relax.errors import ConfigError

REWARDS = ("environment", "rewards")
BRANCHES = ("refuse", "last")


@dataclass(kw_only=True)
class AgentConfig:
    """Episodes of several turns. Off unless `environment` or `program` is given."""

    environment: str | None = None
    """The environment as `package.module:Class`; each episode gets an instance of its own."""
    program: str | None = None
    """An agent of yours as `package.module:function`, which talks to the policy through an OpenAI-style endpoint."""
    options: dict[str, Any] = field(default_factory=dict)
    """What the environment's class or the program takes beside."""
    max_turns: int = 8
    """Most turns of the policy in an episode. Each is `rollout.max_new_tokens` long at most."""
    max_episode_tokens: int = 4096
    """Longest episode in tokens, prompt, answers and observations with their media together."""
    call_limit_s: float = 30.0
    """Longest time of one call of the environment, in seconds."""
    episode_limit_s: float = 600.0
    """Longest time of an episode in seconds; a program that runs longer is killed."""
    max_parallel: int = 16
    """Environments called, or programs running, at the same time."""
    reward: str = "environment"
    """`environment`: the sum of what the steps gave, or what the program returned; `rewards`: the parts of
    `rollout.reward`, of the last turn's text."""
    branches: str = "refuse"
    """What becomes of a program's request that does not go on from the conversation so far: `refuse`: an HTTP error;
    `last`: a new conversation begins, and the row is the last one."""

    def __post_init__(self) -> None:
        if self.environment is not None and self.program is not None:
            raise ConfigError(
                f"rollout.agent: must have an environment or a program, got both: {self.environment!r} and "
                f"{self.program!r}"
            )
        for name in ("max_turns", "max_episode_tokens", "max_parallel"):
            if getattr(self, name) < 1:
                raise ConfigError(f"rollout.agent.{name}: must be at least 1, got {getattr(self, name)}")
        for name in ("call_limit_s", "episode_limit_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"rollout.agent.{name}: must be above 0, got {getattr(self, name)}")
        for name, choices in (("reward", REWARDS), ("branches", BRANCHES)):
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"rollout.agent.{name}: must be one of {', '.join(choices)}, got {getattr(self, name)!r}"
                )

    @property
    def is_on(self) -> bool:
        """Whether rollouts are episodes."""
        return self.environment is not None or self.program is not None
