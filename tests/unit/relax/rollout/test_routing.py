"""The router: least loaded first, one engine for one prompt while that is no burden."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from relax.rollout.routing import Router


def test_router_takes_the_least_loaded_engine() -> None:
    """Loads are counted by weight and taken off again."""
    router = Router(["a", "b"])
    assert router.choose("p", 8) == "a"
    assert router.choose("q", 2) == "b"
    assert router.choose("r", 2) == "b"
    router.done("a", 8)
    assert router.choose("s", 1) == "a"
    assert (router.load("a"), router.load("b")) == (1, 4)


def test_router_keeps_a_prompt_with_its_engine() -> None:
    """The engine that has seen a prefix is preferred until it has `slack` more to do than the least loaded one."""
    router = Router(["a", "b"], slack=4)
    assert [router.choose("p") for _ in range(5)] == ["a"] * 5
    assert router.choose("p") == "b"
    assert router.choose("p") == "b"


def test_router_passes_closed_engines_over() -> None:
    """A fenced engine gets nothing, not even prompts that it knows; none at all is None."""
    router = Router(["a", "b"])
    assert router.choose("p") == "a"
    router.open(["b"])
    assert (router.choose("p"), router.engines) == ("b", ["b"])
    router.open([])
    assert router.choose("p") is None


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 4)), max_size=60))
def test_loads_stay_within_slack_and_one_request(asked) -> None:
    """However requests come, no engine is further ahead of another than affinity allows."""
    router = Router(["a", "b", "c"], slack=8)
    for key, weight in asked:
        router.choose(str(key), weight)
        loads = [router.load(name) for name in router.engines]
        assert max(loads) - min(loads) <= 8 + 4
