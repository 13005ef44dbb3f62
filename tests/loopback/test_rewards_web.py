"""Remote and generative rewards against a real HTTP server: slow, silent, failing, huge and well-behaved ones."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from relax.errors import ConfigError
from relax.rewards.base import RewardFailedError
from relax.rewards.config import RewardPart
from relax.rewards.generative import Generative
from relax.rewards.remote import Remote
from relax.rewards.scorer import Score
from tests.kit.rewards import sample, scorer
from tests.kit.web_server import Reply, chat_reply, fake_web

GOOD = Reply(b'{"reward": 0.5}')


def failure(reward: Remote | Generative, time_limit_s: float = 20.0) -> RewardFailedError:
    with pytest.raises(RewardFailedError) as caught:
        reward.bounded(sample("red"), time_limit_s)
    return caught.value


def test_http_sends_the_sample_and_its_token(tmp_path: Path):
    """All that a reward may see, as JSON; the token comes from a file."""
    token = tmp_path / "token"
    token.write_text("secret\n")
    with fake_web(GOOD) as web:
        reward = Remote(url=f"{web.url}/score?kind=1", token_file=str(token))
        assert reward.bounded(sample("blue"), 20.0) == 0.5
    ((path, headers, body),) = web.asked
    assert path == "/score?kind=1"
    assert headers["Authorization"] == "Bearer secret"
    assert body == {
        "prompt_text": "What colour?",
        "completion_text": "blue",
        "reference_answer": "red",
        "finish_reason": "stop",
        "modality": "",
        "num_completion_tokens": 0,
    }
    with pytest.raises(ConfigError, match=r"^token_file: must be a file that can be read, got "):
        Remote(url=web.url, token_file=str(tmp_path / "none")).check()


@pytest.mark.parametrize(
    ("reply", "message", "retry"),
    [
        (Reply(b"busy", status=503), "must answer with status 200, got 503: busy", True),
        (Reply(b"slower", status=429), "must answer with status 200, got 429: slower", True),
        (Reply(b"what?", status=400), "must answer with status 200, got 400: what?", False),
        (Reply(b"", status=302), "must answer with status 200, got 302: ", False),
        (Reply(b"x" * 5000), "answer must have at most 1000 bytes, got more", True),
    ],
)
def test_http_answer_that_is_none_is_a_failure(reply: Reply, message: str, retry: bool):
    """With the address; some are worth another attempt."""
    with fake_web(reply) as web:
        error = failure(Remote(url=f"{web.url}/score", max_answer_bytes=1000))
        assert (str(error), error.retry) == (f"{web.url}/score: {message}", retry)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": "no model"}', "no model"),
        (b"{}", "the answer must be {'reward': number}, got none"),
        (b"[1]", "the answer must be {'reward': number}, got Expected `object`, got `array`"),
        (b"<html>", "the answer must be {'reward': number}, got JSON is malformed"),
    ],
)
def test_http_answer_without_a_reward_is_a_failure(body: bytes, message: str):
    """The service's reason, or what came instead."""
    with fake_web(Reply(body)) as web:
        assert str(failure(Remote(url=web.url))).startswith(message)


@pytest.mark.parametrize(
    "reply", [Reply(silent=True), Reply(b" " * 10_000, drip=True)], ids=["silent", "drip"]
)
def test_http_keeps_its_deadline(reply: Reply):
    """A byte now and then does not buy time."""
    with fake_web(reply) as web:
        assert str(failure(Remote(url=f"{web.url}/score"), 0.4)) == (
            f"{web.url}/score: must answer within 0.4 s, got no end"
        )


def test_http_without_a_server_is_a_failure():
    """It may come up later."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    error = failure(Remote(url=f"http://127.0.0.1:{port}/score"))
    assert str(error).startswith(f"http://127.0.0.1:{port}/score: must answer, got ConnectionRefusedError")
    assert error.retry


def test_scorer_retries_a_service_that_recovers():
    """Two failures, two pauses, one reward."""
    pauses: list[float] = []
    with fake_web(Reply(status=500), Reply(status=502), GOOD) as web:
        with scorer(RewardPart(name="http", options={"url": web.url}), pauses=pauses) as made:
            assert made.score([sample("red")]) == [Score(reward=0.5, parts={"http": 0.5})]
        assert (len(web.asked), len(pauses)) == (3, 2)


def test_scorer_does_not_retry_what_stays_wrong():
    """A refused request is refused again."""
    with fake_web(Reply(b"unknown model", status=404)) as web:
        with scorer(RewardPart(name="http", label="judge", options={"url": web.url})) as made:
            (score,) = made.score([sample("red")])
        assert len(web.asked) == 1
    assert score.error == f"judge: {web.url}: must answer with status 200, got 404: unknown model"


def test_scorer_asks_a_service_for_many_at_the_same_time():
    """As many as may be in flight: here all, each on its own connection, in the order of the samples."""
    with fake_web(GOOD) as web:
        with scorer(RewardPart(name="http", options={"url": web.url})) as made:
            scores = made.score([sample(str(number)) for number in range(20)])
        assert sorted(int(body["completion_text"]) for _, _, body in web.asked) == list(range(20))
    assert {score.reward for score in scores} == {0.5}


def test_generative_asks_a_chat_endpoint():
    """Question, reference and completion are filled in once: braces in them mean nothing."""
    with fake_web(chat_reply("It says red. Score: 3\nNo, better:\nScore: 7.5")) as web:
        reward = Generative(url=f"{web.url}/v1", model="judge", system="Be just.", max_tokens=99)
        assert reward.bounded(sample("{reference}"), 20.0) == 0.75
    ((path, _, body),) = web.asked
    assert path == "/v1/chat/completions"
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("judge", 0.0, 99)
    system, user = body["messages"]
    assert system == {"role": "system", "content": "Be just."}
    assert (
        "Question:\nWhat colour?\n\nReference answer:\nred\n\nAnswer to grade:\n{reference}\n"
        in user["content"]
    )


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (chat_reply("Score: 11"), "the judge must end with a score from 0 to 10, got 'Score: 11'"),
        (chat_reply("good"), "the judge must end with a score from 0 to 10, got 'good'"),
        (chat_reply(None), "the judge must say something, got nothing; allow more max_tokens"),
        (Reply(b'{"choices": []}'), "the judge must say something, got nothing; allow more max_tokens"),
        (
            Reply(b'{"detail": 1}'),
            "the answer must be a chat completion, got Object missing required field `choices`",
        ),
    ],
)
def test_generative_verdict_without_a_score_is_a_failure(reply: Reply, message: str):
    """It is asked again, as a sampled judge may find its words."""
    with fake_web(reply) as web:
        error = failure(Generative(url=web.url))
        assert str(error) == message
        assert error.retry


def test_generative_scale_is_the_configuration_s():
    """Letters for numbers are no score; the least is 0 and the most 1."""
    reward = Generative(url="http://a:1", score_pattern=r"<(-?\d+)>", min_score=-1.0, max_score=1.0)
    assert [reward.reward_of(text) for text in ("<-1>", "<0>", "<1> and <1>")] == [0.0, 0.5, 1.0]
    with pytest.raises(ConfigError, match=r"min_score: must be below max_score, got 2.0 and 2.0"):
        Generative(url="http://a:1", min_score=2.0, max_score=2.0)
