"""Options of interrupted rollouts that contradict one another, or the run's staleness bound, are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax.config import load_config
from relax.errors import ConfigError
from relax.run.wiring import build_tables


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["rollout.partial.on_limit=keep"],
            "rollout.partial.on_limit: must be one of anew, drop, got 'keep'",
        ),
        (["rollout.partial.train_on=old"], "rollout.partial.train_on: must be one of all, newest, got 'old'"),
        (
            ["rollout.partial.max_continuations=0"],
            "rollout.partial.max_continuations: must be at least 1, got 0",
        ),
        (
            ["rollout.partial.straggler_timeout_s=5"],
            "rollout.partial.straggler_timeout_s: must be 0 without rollout.partial.enabled, got 5.0; "
            "what is aborted would be lost",
        ),
        (
            ["rollout.partial.enabled=true", "rollout.partial.max_age_versions=3", "max_staleness=2"],
            "rollout.partial.max_age_versions: must be at most max_staleness=2 with staleness_policy=pace, "
            "which drops what is older, got 3",
        ),
        (
            ["rollout.partial.train_on=newest", "staleness_policy=reweight"],
            "rollout.partial.train_on: must be all with staleness_policy=reweight, which trains on old tokens, "
            "got 'newest'; mask is the policy that leaves them out",
        ),
        (["rollout.oversample=-1"], "rollout.oversample: must be at least 0, got -1"),
    ],
)
def test_contradictions_are_refused(words, message):
    """By whole messages."""
    with pytest.raises(ConfigError) as caught:
        load_config([], words)
    assert message in str(caught.value)


def test_old_rollouts_may_be_gone_on_with_where_the_queue_keeps_them():
    """Under mask nothing is dropped by age."""
    words = [
        "rollout.partial.enabled=true",
        "rollout.partial.max_age_versions=9",
        "max_staleness=2",
        "staleness_policy=mask",
    ]
    assert load_config([], words).rollout.partial.max_age(2) == 9
    assert load_config([], ["rollout.partial.enabled=true"]).rollout.partial.max_age(4) == 4


def test_table_of_partial_rollouts_is_there_if_it_is_needed(tmp_path: Path):
    """With the columns of the routes, and prompts that may be delivered more often."""
    config = load_config([], ["rollout.partial.enabled=true", "rollout.partial.max_continuations=3"])
    tables = build_tables(config)
    names = set(tables["partial_rollouts"].columns_by_name)
    assert {"completion_token_ids", "token_policy_versions", "routed_experts", "sample_index"} <= names
    assert tables["prompts"].max_attempts == 8 * 4
    plain = build_tables(load_config([]))
    assert "partial_rollouts" not in plain
    assert plain["prompts"].max_attempts == 8
