"""Requests of the chat protocol to tokens."""

from __future__ import annotations

import base64
import json
from dataclasses import replace

import numpy as np
import pytest

from relax.agents.chat import Conversation
from relax.agents.chat_messages import ChatRequestError
from relax.agents.config import AgentConfig
from relax.agents.episode import Episode
from relax.rollout.engine import GenerateRequest
from tests.kit.agents import saying
from tests.kit.media import picture_bytes

SYSTEM = {"role": "system", "content": "You see."}
ASKED = {"role": "user", "content": "What is it?"}
AGAIN = {"role": "user", "content": "Are you sure?"}
PICTURE = {
    "type": "image_url",
    "image_url": {"url": "data:image/png;base64," + base64.b64encode(picture_bytes()).decode()},
}


@pytest.fixture
def chat(turns, start):
    """Factory of conversations: `chat(branches="last")`."""

    def make(**options) -> Conversation:
        return Conversation(Episode(start()), turns, AgentConfig(program="a:b", **options))

    return make


def say(turns, conversation: Conversation, text: str, *messages: dict, **also) -> dict:
    """Ask with these messages, let the policy say `text`, and return the answer's message."""
    conversation.ask({"messages": list(messages), **also})
    request = GenerateRequest(uid="a/0", token_ids=conversation.transcript.token_ids)
    (completion,) = saying(turns, lambda *_: text).generate([request])
    return conversation.answer(completion)["choices"][0]["message"]


def test_conversation_that_goes_on_keeps_the_ids_of_its_answers(turns, chat) -> None:
    """What is read the second time is what was read, sampled, and what the template puts after it."""
    conversation = chat()
    first = say(turns, conversation, "red", SYSTEM, ASKED)
    assert first == {"role": "assistant", "content": "red"}
    before = conversation.transcript.token_ids
    say(turns, conversation, "blue", SYSTEM, ASKED, first, AGAIN)
    transcript = conversation.episode.transcript
    np.testing.assert_array_equal(transcript.token_ids[: len(before)], before)
    wanted = [
        {**each, "content": [{"type": "text", "text": each["content"]}]}
        for each in (SYSTEM, ASKED, first, AGAIN)
    ]
    end = len(saying(turns, lambda *_: "").tokens("blue"))
    np.testing.assert_array_equal(transcript.token_ids[:-end], turns.whole(wanted, ()).token_ids)
    np.testing.assert_array_equal(transcript.prompt_token_ids, turns.whole(wanted[:2], ()).token_ids)
    assert transcript.trace().loss_mask.sum() == 2 * end
    assert conversation.episode.texts == ["red", "blue"]


def test_answer_with_other_tokens_than_its_text_would_have_is_kept(turns, chat) -> None:
    """Nothing is tokenised again: a word that was sampled letter by letter stays so."""
    conversation = chat()
    conversation.ask({"messages": [ASKED]})
    letters = np.concatenate([saying(turns, lambda *_: "").tokens(f"{each}…") for each in "red"])
    whole = np.append(letters, saying(turns, lambda *_: "").tokens("red")[-1]).astype(np.int32)
    request = GenerateRequest(uid="a/0", token_ids=conversation.transcript.token_ids)
    (said,) = saying(turns, lambda *_: "red").generate([request])
    assert len(whole) > len(said.token_ids)
    spelled = replace(
        said,
        token_ids=whole,
        logprobs=np.zeros(len(whole), np.float32),
        token_policy_versions=np.zeros(len(whole), np.int32),
        routed_experts=None,
    )
    answer = conversation.answer(spelled)["choices"][0]["message"]
    say(turns, conversation, "blue", ASKED, answer, AGAIN)
    trace = conversation.episode.transcript.trace()
    np.testing.assert_array_equal(trace.token_ids[: len(whole)], whole)
    assert trace.loss_mask[: len(whole)].all()


def test_other_messages_are_refused_or_begin_anew(turns, chat) -> None:
    """As the configuration says; the row of a new conversation is the new one."""
    changed = {"role": "assistant", "content": "green"}
    strict = chat()
    say(turns, strict, "red", ASKED)
    with pytest.raises(ChatRequestError, match="got others from number 1 on") as raised:
        strict.ask({"messages": [ASKED, changed, AGAIN]})
    assert raised.value.status == 409
    lenient = chat(branches="last")
    say(turns, lenient, "red", ASKED)
    say(turns, lenient, "blue", ASKED, changed, AGAIN)
    transcript = lenient.episode.transcript
    assert (lenient.episode.num_branches, transcript.num_turns) == (2, 1)
    assert "green" in turns.chat.decode(transcript.prompt_token_ids)


def test_same_words_in_another_form_go_on(turns, chat) -> None:
    """Parts for text, no content for an empty one: clients write what they were given in their own way."""
    conversation = chat()
    answer = say(turns, conversation, "red", ASKED)
    parts = {
        "role": "user",
        "content": [{"type": "text", "text": "What "}, {"type": "text", "text": "is it?"}],
    }
    say(turns, conversation, "blue", parts, {**answer, "refusal": None}, AGAIN)
    assert conversation.episode.transcript.num_turns == 2


def test_pictures_are_data_uris(turns, chat) -> None:
    """In any message; a later one is observed. Nothing else is read."""
    conversation = chat()
    answer = say(
        turns, conversation, "red", {"role": "user", "content": [PICTURE, {"type": "text", "text": "What?"}]}
    )
    first = {"role": "user", "content": [PICTURE, {"type": "text", "text": "What?"}]}
    say(turns, conversation, "blue", first, answer, {"role": "user", "content": [PICTURE]})
    transcript = conversation.episode.transcript
    assert len(transcript.media["image"]) == len(transcript.media_ids) == 2
    for url in ("file:///etc/passwd", "http://example.org/1.png", None):
        with pytest.raises(ChatRequestError, match="image must be a data URI"):
            chat().ask(
                {
                    "messages": [
                        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
                    ]
                }
            )


def test_tool_calls_are_taken_out_of_the_text(turns, chat) -> None:
    """As OpenAI has them; the program sends them back and its tool's answer after them."""
    conversation = chat()
    said = '<tool_call>\n{"name": "zoom", "arguments": {"quadrant": 2}}\n</tool_call>'
    answer = say(turns, conversation, said, ASKED)
    (call,) = answer["tool_calls"]
    assert (answer["content"], call["type"], call["function"]["name"]) == (None, "function", "zoom")
    assert json.loads(call["function"]["arguments"]) == {"quadrant": 2}
    spaced = {**call, "function": {"name": "zoom", "arguments": '{"quadrant":2}'}}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "a corner"}
    say(turns, conversation, "red", ASKED, {**answer, "tool_calls": [spaced]}, result)
    assert conversation.episode.transcript.num_turns == 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "request: must be a JSON object, got list"),
        ({"messages": []}, "messages: must be a list with at least one message"),
        ({"messages": [{"role": "robot"}]}, "messages[0].role: must be one of system"),
        ({"messages": [ASKED], "n": 2}, "n: must be 1, got 2"),
        ({"messages": [ASKED], "stop": ["x"]}, "stop: must be absent, got ['x']"),
        ({"messages": [ASKED], "max_tokens": "many"}, "max_tokens: must be at least 1, got 'many'"),
        ({"messages": [{"role": "user", "content": 5}]}, "content: must be text or a list of parts, got int"),
        ({"messages": [{"role": "user", "content": "<|im_end|>"}]}, "must not hold special tokens"),
    ],
)
def test_requests_that_cannot_be_answered_are_refused(chat, body, message: str) -> None:
    """With the rule and what came; the conversation is as before."""
    conversation = chat()
    with pytest.raises(ChatRequestError) as raised:
        conversation.ask(body)
    assert message in str(raised.value)
    assert conversation.transcript.num_tokens == 0


def test_limits_refuse_and_mark_the_episode(turns, chat) -> None:
    """Turns and tokens."""
    conversation = chat(max_turns=1)
    answer = say(turns, conversation, "red", ASKED)
    with pytest.raises(ChatRequestError, match="at most 1 answers"):
        conversation.ask({"messages": [ASKED, answer, AGAIN]})
    assert conversation.episode.cut
    with pytest.raises(ChatRequestError, match="fewer than 5 tokens, got") as raised:
        chat(max_episode_tokens=5).ask({"messages": [ASKED]})
    assert raised.value.code == "context_length_exceeded"
