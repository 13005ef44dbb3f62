"""Agent programs as processes, and their chat endpoint; only the engine is a fake."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from modalities.base import EncodingProfile, MediaLimits
from modalities.registry import load_modalities
from relax.agents.chat import Conversation
from relax.agents.config import AgentConfig
from relax.agents.endpoint import ChatEndpoint
from relax.agents.environment import Task
from relax.agents.episode import Episode, Sampling, Start
from relax.agents.programs import ProgramDriver
from relax.agents.turns import TurnEncoder
from tests.kit.agents import saying
from tests.kit.job import PLUGINS
from tests.kit.plugins.my_agents import QUESTION, chat

SAMPLING = Sampling(max_new_tokens=8)


@pytest.fixture(scope="module")
def turns(job_home: Path) -> TurnEncoder:
    """Encodes for the tiny thinker."""
    model = job_home / "model"
    return TurnEncoder(model, load_modalities(EncodingProfile.from_pretrained(model), MediaLimits()))


@pytest.fixture
def drive(turns: TurnEncoder, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable]:
    """Run a program for some tasks on an engine that says texts: `drive("two_turns", tasks, script)`."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PLUGINS), os.environ.get("PYTHONPATH", "")]))
    drivers: list[ProgramDriver] = []

    def run(program: str, tasks: list[Task], script: Callable, **options) -> list[Episode]:
        config = AgentConfig(program=f"my_agents:{program}", **{"episode_limit_s": 60.0, **options})
        drivers.append(ProgramDriver(saying(turns, script), turns, config))
        return drivers[-1].run([Start(task=task, token_ids=()) for task in tasks], SAMPLING)

    yield run
    for driver in drivers:
        driver.close()


def task(uid: str = "a", **changes) -> Task:
    """Return a task whose answer is red."""
    return replace(Task(uid=uid, prompt_text="What is it?", reference_answer="red"), **changes)


def test_programs_have_rows_with_the_tokens_of_all_their_turns(drive) -> None:
    """Several at once; what is trained on is what was sampled, the rest is masked."""
    right = {"a/0": "red", "b/0": "blue", "c/0": "red"}
    episodes = drive("two_turns", [task(uid) for uid in "abc"], lambda request, _: right[request.uid])
    assert [(each.reward, each.error, each.finish_reason) for each in episodes] == [
        (1.0, "", "stop"),
        (0.0, "", "stop"),
        (1.0, "", "stop"),
    ]
    for episode in episodes:
        trace = episode.transcript.trace()
        assert (episode.transcript.num_turns, episode.info) == (2, {"num_questions": 2.0, "num_media": 0.0})
        assert 0 < trace.loss_mask.sum() < len(trace.loss_mask)
        assert trace.loss_mask[0]
        assert trace.loss_mask[-1]


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("raises", "program: RuntimeError: the program broke"),
        ("silent", "program: must ask the policy at least once"),
        ("no_reward", "program: must return a reward, or rollout.agent.reward be rewards, got none"),
        ("exits", "program: exit code 3"),
    ],
)
def test_program_that_fails_costs_its_episode(drive, program: str, error: str) -> None:
    """With the reason."""
    (episode,) = drive(program, [task()], lambda *_: "red")
    assert error in episode.error


def test_program_that_hangs_is_killed_with_all_that_it_started(drive, tmp_path: Path) -> None:
    """At the time limit of the episode."""
    note = tmp_path / "pids"
    (episode,) = drive("hangs", [task(prompt_text=str(note))], lambda *_: "red", episode_limit_s=6.0)
    assert episode.error == "program: must end within 6 s, got no end"
    pids = [int(each) for each in note.read_text().split()]
    _, alive = psutil.wait_procs(
        [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=10.0
    )
    assert [each for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []


def test_abort_of_the_engine_ends_all_programs(drive) -> None:
    """Their prompts are asked again as a whole."""
    episodes = drive("two_turns", [task("a"), task("b")], lambda *_: "red!")
    assert [each.finish_reason for each in episodes] == ["abort", "abort"]


@pytest.fixture
def endpoint() -> Iterator[ChatEndpoint]:
    """An endpoint of its own."""
    own = ChatEndpoint(limit_s=20.0)
    yield own
    own.close()


def test_endpoint_answers_a_plain_client(turns: TurnEncoder, endpoint: ChatEndpoint) -> None:
    """As a whole and as a stream; other paths, sessions and broken requests have an error in OpenAI's form."""
    episode = Episode(Start(task=task(), token_ids=()))
    conversation = Conversation(episode, turns, AgentConfig(program="a:b"))
    base_url = endpoint.open(conversation)
    engine = saying(turns, lambda *_: "red")
    driver = threading.Thread(target=lambda: [answer(endpoint, engine) for _ in range(2)], daemon=True)
    driver.start()
    made = chat(base_url, [QUESTION])
    assert made["choices"][0] == {
        "index": 0,
        "message": {"role": "assistant", "content": "red"},
        "finish_reason": "stop",
        "logprobs": None,
    }
    assert made["usage"]["total_tokens"] == conversation.transcript.num_tokens
    again = [QUESTION, made["choices"][0]["message"], QUESTION]
    stream = chat(base_url, again, stream=True)["stream"]
    assert '"delta": {"role": "assistant", "content": "red"}' in stream
    assert stream.endswith("data: [DONE]\n\n")
    driver.join(10.0)
    refused = chat(base_url, [QUESTION])
    assert (refused["status"], refused["error"]["code"]) == (409, "conversation_changed")
    assert chat(base_url[:-3] + "x/v1", [QUESTION])["status"] == 404
    assert chat(f"{base_url}/other", [QUESTION])["status"] == 404
    assert chat(base_url, ["no message"])["status"] == 400  # type: ignore[list-item]
    endpoint.close_session(base_url)
    assert chat(base_url, again)["error"]["code"] == "session_not_found"


def answer(endpoint: ChatEndpoint, engine) -> None:
    """Answer the next request as a driver does."""
    from relax.rollout.engine import GenerateRequest

    asked = endpoint.asked.get(timeout=20.0)
    request = GenerateRequest(uid="a/0", token_ids=asked.conversation.transcript.token_ids)
    asked.give(asked.conversation.answer(engine.generate([request])[0]))
