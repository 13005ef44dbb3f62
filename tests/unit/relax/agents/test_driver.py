"""Episodes on an engine that says what is written down."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from relax.agents.config import AgentConfig
from relax.agents.driver import EpisodeDriver
from relax.agents.episode import Episode, Sampling, Start
from relax.agents.turns import TurnEncoder
from relax.rollout.engine import GenerateRequest
from tests.kit.agents import Shower, TalkingEngine, saying

SAMPLING = Sampling(max_new_tokens=8)


def run(
    turns: TurnEncoder, starts: list[Start], script: Callable[[GenerateRequest, int], str], **options
) -> tuple[list[Episode], TalkingEngine]:
    """Run episodes with the test's environment."""
    engine = saying(turns, script)
    greeting = options.pop("greeting", "")
    config = AgentConfig(**{"environment": "tests.kit.agents:Shower", "call_limit_s": 10.0, **options})
    driver = EpisodeDriver(engine, lambda: Shower(greeting), turns, config)
    return driver.run(starts, SAMPLING), engine


def by_turn(*texts: str) -> Callable[[GenerateRequest, int], str]:
    """Say the n-th text in turn n; turns are told by the number of pictures."""
    return lambda request, _: texts[len(request.media.get("image", ()))]


def test_tokens_of_a_turn_are_the_engines_and_are_asked_again_as_they_are(turns, start) -> None:
    """Each request is the last one, its answer's ids and the observation; the trace is what was sampled."""
    (episode,), engine = run(turns, [start()], by_turn("look", "look", "red"))
    first, second, third = engine.requests
    look, red = engine.tokens("look"), engine.tokens("red")
    before = np.concatenate((first.token_ids, look))
    np.testing.assert_array_equal(second.token_ids[: len(before)], before)
    before = np.concatenate((second.token_ids, look))
    np.testing.assert_array_equal(third.token_ids[: len(before)], before)
    trace = episode.transcript.trace()
    np.testing.assert_array_equal(trace.token_ids[trace.loss_mask], np.concatenate((look, look, red)))
    np.testing.assert_array_equal(
        np.concatenate((first.token_ids, trace.token_ids)), np.concatenate((third.token_ids, red))
    )
    assert len(trace.routed_experts) == len(third.token_ids) + len(red) - 1
    assert (episode.reward, episode.finish_reason, episode.texts) == (1.5, "stop", ["look", "look", "red"])
    assert episode.info == {"num_shown": 2.0}
    assert len(trace.media_ids) == len(third.media["image"]) == 2


def test_samples_of_a_prompt_are_one_request_while_they_are_alike(turns, start) -> None:
    """The prompt is read once for a group; after the first turn each history has a request of its own."""
    starts = [start("a", sample) for sample in range(4)] + [start("b")]

    def script(request: GenerateRequest, sample: int) -> str:
        return "red" if request.media else ("look", "look", "red", "blue")[sample]

    episodes, engine = run(turns, starts, script)
    assert [request.num_samples for request in engine.requests] == [4, 1, 2, 1]
    assert [episode.reward for episode in episodes] == [1.25, 1.25, 1.0, 0.0, 1.25]
    assert len({request.seed for request in engine.requests}) == 4


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("raise", "environment: step: RuntimeError: the world broke"),
        ("strange", "environment: step: must return a Step, got 'no step'"),
        ("special", "environment: observation: the messages' text must not hold special tokens"),
        ("hang", "environment: step: must answer within 0.5 s, got no end"),
    ],
)
def test_environment_that_fails_costs_its_episode_alone(turns, start, text: str, error: str) -> None:
    """The others go on; what was said so far is kept, and every environment is closed."""
    Shower.released.clear()
    closed = Shower.num_closed
    episodes, _ = run(
        turns,
        [start("a"), start("b")],
        lambda request, _: text if request.uid == "a/0" else "red",
        call_limit_s=0.5,
    )
    Shower.released.set()
    assert error in episodes[0].error
    assert (episodes[0].finish_reason, episodes[0].transcript.num_turns) == ("stop", 1)
    assert (episodes[1].error, episodes[1].reward) == ("", 1.0)
    assert Shower.num_closed == closed + 2


def test_limits_end_an_episode_with_what_it_has(turns, start) -> None:
    """Turns; tokens; a turn that is cut off is not shown to the environment."""
    (turned,), _ = run(turns, [start()], lambda *_: "look", max_turns=3)
    assert (turned.finish_reason, turned.transcript.num_turns, turned.reward) == ("length", 3, 0.75)
    (full,), _ = run(turns, [start()], lambda *_: "look", max_episode_tokens=40)
    assert full.finish_reason == "length"
    assert full.transcript.num_tokens <= 40
    (cut,), _ = run(turns, [start()], lambda *_: "red…")
    assert (cut.finish_reason, cut.reward, cut.texts) == ("length", 0.0, ["red"])


def test_room_that_is_left_limits_a_turn(turns, start) -> None:
    """The last turn may be shorter than the others."""
    (_,), engine = run(turns, [start()], lambda *_: "red", max_episode_tokens=len(start().token_ids) + 3)
    assert engine.requests[0].max_new_tokens == 3


def test_aborted_turn_ends_the_episode_without_a_step(turns, start) -> None:
    """Its prompt is asked again as a whole."""
    (episode,), _ = run(turns, [start()], lambda *_: "look!")
    assert (episode.finish_reason, episode.reward) == ("abort", 0.0)


def test_what_reset_shows_is_of_the_prompt(turns, start) -> None:
    """As a message between the prompt and the first answer."""
    (episode,), engine = run(turns, [start()], lambda *_: "red", greeting="begin")
    plain = turns.without_beginning(start().token_ids)
    shown = engine.requests[0].token_ids
    np.testing.assert_array_equal(shown[: len(plain)], plain)
    assert turns.chat.decode(shown).endswith("user\nbegin\nassistant\n")
    np.testing.assert_array_equal(episode.transcript.prompt_token_ids, shown)
