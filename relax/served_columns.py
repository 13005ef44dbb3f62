"""The columns of `rollouts` that the roles beside the actor write when they are services. It holds no rows.

    rollout's part --> reference     --> ref_logprobs
                   --> actor_fwd     --> proximal_logprobs
                   --> critic        --> values
                       + those two --> advantages --> raw_advantages, returns
                                       all of these --> actor --> its columns --> critic (learns), recorder

Each is a consumer of its own that needs whole groups; a row is ready for it once the columns that it reads are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from flight.schema import Column, ConsumerSpec

PER_TOKEN = pa.list_(pa.float32())
LEARNER = "critic_learner"
"""Consumer that gives the critic what the actor has trained on."""
CREDIT_READS = ("completion_token_ids", "rollout_logprobs", "reward")
"""What advantages are made of, beside the columns of other services."""


def _per_token(writer: str, name: str, meaning: str, unit: str = "") -> Column:
    shape = "[num_completion_tokens]"
    return Column(name=name, type=PER_TOKEN, meaning=meaning, unit=unit, shape=shape, writer=writer)


REF_LOGPROBS = _per_token(
    "reference", "ref_logprobs", "log-probability under the model that training started from", "nats"
)
PROXIMAL_LOGPROBS = _per_token(
    "actor_fwd", "proximal_logprobs", "log-probability under the policy of proximal_policy_version", "nats"
)
PROXIMAL_VERSION = Column(
    name="proximal_policy_version",
    type=pa.int64(),
    meaning="weights under which proximal_logprobs were computed",
    unit="policy versions",
    writer="actor_fwd",
)
VALUES = _per_token("critic", "values", "value of what stands before the token, when the row was scored")
RAW_ADVANTAGES = _per_token(
    "advantages", "raw_advantages", "advantage of the token, before it is whitened over a training batch"
)


def _returns(writer: str) -> Column:
    return _per_token(writer, "returns", "what the value of the token should have been")


@dataclass(frozen=True, kw_only=True)
class ServedColumns:
    """What follows for table `rollouts` from the roles that are services.

    services: their names. has_critic: whether advantages come with returns. penalises_rewards: whether advantages need
    the reference's logprobs. replays_routing: whether forward passes of the policy use the rollout's experts.
    """

    services: tuple[str, ...] = ()
    has_critic: bool = False
    penalises_rewards: bool = False
    replays_routing: bool = False

    def columns(self) -> tuple[Column, ...]:
        """Return the services' columns, and the returns that the actor writes for a critic elsewhere."""
        made = {
            "reference": (REF_LOGPROBS,),
            "actor_fwd": (PROXIMAL_LOGPROBS, PROXIMAL_VERSION),
            "critic": (VALUES,) if "advantages" in self.services else (VALUES, _returns("actor")),
            "advantages": (RAW_ADVANTAGES, *((_returns("advantages"),) if self.has_critic else ())),
        }
        return tuple(column for service in self.services for column in made[service])

    def names(self) -> tuple[str, ...]:
        """Return the names of `columns`."""
        return tuple(column.name for column in self.columns())

    def actor_reads(self) -> tuple[str, ...]:
        """Return what the actor reads of them."""
        return tuple(column.name for column in self.columns() if column.name != "returns")

    def actor_writes(self) -> tuple[str, ...]:
        """Return what the actor writes beyond its usual columns."""
        return tuple(column.name for column in self.columns() if column.writer == "actor")

    def reads(self, service: str, rollout_columns: Sequence[str], routing: Sequence[str]) -> tuple[str, ...]:
        """Return what a service reads of a row.

        Args:
            service: One of `services`.
            rollout_columns: What a forward pass over a row needs.
            routing: Columns of the experts that the rollout used.
        """
        if service == "advantages":
            more = ("values",) if self.has_critic else ()
            return (*CREDIT_READS, *more, *(("ref_logprobs",) if self.penalises_rewards else ()))
        if service == "reference":
            return tuple(rollout_columns)
        return (*rollout_columns, "policy_version_end", *(routing if self.replays_routing else ()))

    def consumers(self, rollout_columns: Sequence[str], routing: Sequence[str]) -> tuple[ConsumerSpec, ...]:
        """Return the consumers of the services; arguments as for `reads`."""
        made = [
            ConsumerSpec(name=each, columns=self.reads(each, rollout_columns, routing), sampler="groups")
            for each in self.services
        ]
        if "critic" in self.services:
            made.append(ConsumerSpec(name=LEARNER, columns=self.learner_reads(rollout_columns, routing)))
        return tuple(made)

    def learner_reads(self, rollout_columns: Sequence[str], routing: Sequence[str]) -> tuple[str, ...]:
        """Return what the critic reads of a row that was trained on."""
        return (*self.reads("critic", rollout_columns, routing), "values", "returns", "optimizer_step")

    def writes(self) -> dict[str, dict[str, list[str]]]:
        """Return the columns of `rollouts` that each role writes more than in a run without services, by table."""
        written: dict[str, list[str]] = {}
        for column in self.columns():
            written.setdefault(column.writer, []).append(column.name)
        return {writer: {"rollouts": names} for writer, names in written.items()}


def with_writes(
    writes: Mapping[str, Mapping[str, Iterable[str]]], more: Mapping[str, Mapping[str, Iterable[str]]]
) -> dict[str, dict[str, list[str]]]:
    """Return two statements of who writes what as one."""
    merged = {role: {name: list(cols) for name, cols in tables.items()} for role, tables in writes.items()}
    for role, tables in more.items():
        for table, columns in tables.items():
            merged.setdefault(role, {}).setdefault(table, []).extend(columns)
    return merged
