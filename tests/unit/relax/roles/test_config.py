"""Roles as services: which may be, what their columns are, and who waits for whom."""

from __future__ import annotations

import pytest

from modalities.base import MediaLimits
from modalities.media import MediaTable
from modalities.registry import load_modalities
from relax.config import RunConfig, load_config
from relax.errors import ConfigError
from relax.records import WRITES, RunShape, table_specs
from relax.run.wiring import check_columns
from relax.served_columns import LEARNER, with_writes
from tests.kit.media import PROFILE

REFERENCE, ACTOR_FWD, CRITIC, ADVANTAGES = (
    f"roles.{role}=service" for role in ("reference", "actor_fwd", "critic", "advantages")
)
ALL = (REFERENCE, ACTOR_FWD, CRITIC, ADVANTAGES)
EVERYTHING = (
    "algorithm=ppo",
    "algorithm.kl_coef=0.1",
    "algorithm.proximal=trainer",
    "algorithm.correction.weight=truncate",
)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["roles.reference=apart"], "roles.reference: must be one of folded, service, got 'apart'"),
        (["roles.max_proximal_lag=-1"], "roles.max_proximal_lag: must be at least 0, got -1"),
        (
            [REFERENCE],
            "roles.reference: must be folded without a penalty (algorithm.kl_coef=0), for nobody would read its "
            "logprobs, got service",
        ),
        (
            [ACTOR_FWD],
            "roles.actor_fwd: must be folded unless the loss looks at the trainer's logprobs before the step "
            "(algorithm.proximal=trainer, algorithm.correction or staleness_policy=reweight), got service",
        ),
        (
            [CRITIC],
            "roles.critic: must be folded without a critic (algorithm.advantage=grpo; it is gae that has one), got "
            "service",
        ),
        (
            ["algorithm=ppo", "algorithm.critic.trunk_gradient=true", CRITIC],
            "roles.critic: must be folded with algorithm.critic.trunk_gradient, for its loss trains the actor's "
            "layers, got service",
        ),
        (
            ["algorithm=ppo", "staleness_policy=mask", CRITIC],
            "roles.critic: must be folded with staleness_policy=mask, for marks of stale tokens reach the actor "
            "alone, got service",
        ),
        (
            ["algorithm=ppo", ADVANTAGES],
            "roles.advantages: must be folded with algorithm.advantage=gae unless roles.critic is a service, too, got "
            "service",
        ),
        (
            ["algorithm=reinforce_plus_plus", "algorithm.kl_coef=0.1", ADVANTAGES],
            "roles.advantages: must be folded with algorithm.kl_placement=reward unless roles.reference is a "
            "service, too, got service",
        ),
    ],
)
def test_roles_that_do_not_fit_are_refused(words, message):
    """By the role, with the reason."""
    with pytest.raises(ConfigError) as caught:
        load_config([], words)
    assert str(caught.value).endswith(message)


def tables_of(*words: str):
    """Return the configuration and its tables."""
    config = load_config([], list(words))
    shape = RunShape(prompts_per_step=2, group_size=2, max_staleness=0, served=config.served)
    media = MediaTable(load_modalities(PROFILE, MediaLimits()), "arrays").columns()
    return config, table_specs(shape, media, ())


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("algorithm.kl_coef=0.1", REFERENCE),
        ("algorithm=decoupled", ACTOR_FWD),
        ("algorithm=ppo", CRITIC),
        ("algorithm=ppo", CRITIC, ADVANTAGES),
        (ADVANTAGES,),
        (*EVERYTHING, *ALL),
    ],
)
def test_every_column_that_is_waited_for_is_written(words):
    """Whatever the roles are, the wiring holds; without the services' part it does not."""
    config, specs = tables_of(*words)
    check_columns(specs, with_writes(WRITES, config.served.writes()))
    written = {name for columns in config.served.writes().values() for name in columns["rollouts"]}
    assert written == set(config.served.names())


def test_a_row_passes_the_services_in_order():
    """Each reads what comes before it, the actor all of it, the learner what the actor writes."""
    _, specs = tables_of(*EVERYTHING, *ALL)
    reads = {each.name: set(each.columns) for each in specs["rollouts"].consumers}
    made = {"ref_logprobs", "proximal_logprobs", "proximal_policy_version", "values", "raw_advantages"}
    for name in ("reference", "actor_fwd", "critic"):
        assert not reads[name] & made
    assert reads["advantages"] & made == {"ref_logprobs", "values"}
    assert reads["actor"] & (made | {"returns"}) == made
    assert {"values", "returns", "optimizer_step"} <= reads[LEARNER]
    assert made | {"returns"} <= reads["recorder"]
    samplers = {each.name: each.sampler for each in specs["rollouts"].consumers}
    assert {samplers[name] for name in ("reference", "actor_fwd", "critic", "advantages")} == {"groups"}


def test_returns_are_written_by_whoever_gives_credit():
    """The advantages service, or the actor for a critic elsewhere; nobody without a critic."""
    writers = {
        words: [column.writer for column in tables_of(*words)[0].served.columns() if column.name == "returns"]
        for words in (("algorithm=ppo", CRITIC), ("algorithm=ppo", CRITIC, ADVANTAGES), (ADVANTAGES,))
    }
    assert list(writers.values()) == [["actor"], ["advantages"], []]


def test_folded_roles_leave_the_tables_as_they_are():
    """No column and no consumer more than before."""
    assert RunConfig().served.columns() == ()
    assert [each.name for each in tables_of()[1]["rollouts"].consumers] == ["actor", "recorder"]
