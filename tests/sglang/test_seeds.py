"""Seeds: a server with deterministic inference gives a sample the same tokens whatever else runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relax.errors import WiringError
from relax.rollout.sglang_config import SGLangConfig
from relax.rollout.sglang_engine import SGLangEngine


def test_servers_without_deterministic_inference_are_refused(attach) -> None:
    """They would ignore every seed."""
    with pytest.raises(
        WiringError, match="must be started with --enable-deterministic-inference for rollout"
    ):
        attach(seeded=True)


def test_same_seed_same_samples(home, requests, tmp_path) -> None:
    """Alone or in company, in one call or another; the samples of a group differ."""
    config = SGLangConfig(device="cpu", max_total_tokens=8192, seeded=True)
    engine = SGLangEngine(config, replace(home.launch, run_dir=tmp_path))
    try:
        changes = {"greedy": False, "temperature": 1.0, "num_samples": 3, "seed": 7}
        asked = [replace(request, **changes) for request in requests[:4]]
        alone = engine.generate(asked[:1])
        together = engine.generate(asked)
        assert [each.token_ids.tolist() for each in together[:3]] == [
            each.token_ids.tolist() for each in alone
        ]
        assert len({tuple(each.token_ids.tolist()) for each in alone}) > 1
        other = engine.generate([replace(asked[0], seed=8)])
        assert [each.token_ids.tolist() for each in other] != [each.token_ids.tolist() for each in alone]
    finally:
        engine.close()
