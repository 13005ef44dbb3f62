"""The load test's figures: latencies in few bytes, memory that grew or did not, the page."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _tools_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tool's parts be imported as they are when it runs."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


def test_latencies_tell_percentiles_to_nine_percent():
    """From a few classes, and added up over processes."""
    from busload.figures import Latencies

    source = random.Random(0)
    taken = [source.lognormvariate(-5, 1) for _ in range(2000)]
    first, second = Latencies(), Latencies()
    for at, seconds in enumerate(taken):
        (first if at % 2 else second).add(seconds)
    first.merge(json.loads(json.dumps(second.counts)))
    assert first.total == 2000
    assert len(first.counts) < 100
    for percent in (50, 99, 100):
        exact = sorted(taken)[-(-len(taken) * percent // 100) - 1]
        assert exact <= first.percentile_s(percent) <= 1.1 * exact


def test_latencies_of_nothing_have_no_percentile():
    """Refused."""
    from busload.figures import Latencies

    with pytest.raises(ValueError, match=r"^latencies: operations must be at least one, got none$"):
        Latencies().percentile_s(50)


def test_growth_compares_the_second_quarter_with_the_last():
    """What the first quarter fills does not count."""
    from busload.figures import growth

    filled = [10.0, 50.0, *[100.0] * 6, *[104.0] * 4]
    assert (growth(filled).second, growth(filled).last) == (100.0, 104.0)
    assert str(growth([1e6, 1e6, 2e6, 2e6, 3e6, 3e6, 4e6, 4e6])) == "2 to 4 MB (+100.0%)"
    with pytest.raises(ValueError, match=r"^growth: samples must be at least 8, got 3$"):
        growth([1.0, 2.0, 3.0])


def test_replace_block_keeps_the_rest_of_the_page():
    """What is between the markers is replaced; without them it is refused."""
    from busload.figures import replace_block

    page = "a\n<!-- load_bus -->\nold\n<!-- /load_bus -->\nb\n"
    assert replace_block(page, "new\n") == "a\n<!-- load_bus -->\n\nnew\n\n<!-- /load_bus -->\nb\n"
    with pytest.raises(ValueError, match="must have"):
        replace_block("a", "new")


def test_load_finds_errors_and_growth():
    """Either makes a run a failed one."""
    import load_bus

    load = load_bus.Load(mode="memory", num_clients=2, server=[1e9] * 8, clients=[1e9] * 8)
    assert load.problems(0.05) == []
    load.server[-2:] = [1.2e9] * 2
    load.errors, load.told = 1, ["load-1: no answer"]
    assert load.problems(0.05) == [
        "errors must be none, got 1: load-1: no answer",
        "the server must stay flat, got 1000 to 1200 MB (+20.0%)",
    ]
