"""Messages to tokens between two answers."""

from __future__ import annotations

import numpy as np
import pytest

from relax.agents.environment import Medium, Observation
from relax.agents.turns import TurnEncoder
from relax.data.chat import ChatError
from tests.kit.media import picture_bytes

ASKED = {"role": "user", "content": [{"type": "text", "text": "What is it?"}]}
ANSWER = {"role": "assistant", "content": [{"type": "text", "text": "look"}]}


def words(turns: TurnEncoder, text: str) -> list[int]:
    """Return the tokens of a text alone."""
    return turns.chat.encode([ASKED], lambda _: text).tolist()


def test_following_tokens_are_those_of_the_whole_conversation(turns: TurnEncoder) -> None:
    """Prompt, answer and what follows make what the template makes of all messages."""
    shown = Observation(text="look again", role="tool")
    message = {"role": "tool", "content": [{"type": "text", "text": "look again"}]}
    whole = turns.whole([ASKED, ANSWER, message], ()).token_ids.tolist()
    prompt = turns.whole([ASKED], ()).token_ids.tolist()
    following = turns.following(shown).token_ids.tolist()
    assert prompt + words(turns, "look") + following == whole
    end = following[0]
    assert turns.after_answer(end, turns.following(shown)).token_ids.tolist() == following[1:]
    assert turns.after_answer(end + 1, turns.following(shown)).token_ids.tolist() == following


def test_asked_observation_is_a_message_of_its_own(turns: TurnEncoder) -> None:
    """A prompt without its beginning of an answer, and the message, make the whole."""
    prompt = turns.whole([ASKED], ()).token_ids
    shown = turns.asked(Observation(text="begin")).token_ids
    begin = {"role": "user", "content": [{"type": "text", "text": "begin"}]}
    whole = turns.whole([ASKED, begin], ()).token_ids
    np.testing.assert_array_equal(np.concatenate((turns.without_beginning(prompt), shown)), whole)
    with pytest.raises(ChatError, match="prompt must end with the beginning of an answer"):
        turns.without_beginning(prompt[:-1])


def test_media_have_as_many_tokens_as_they_need(turns: TurnEncoder) -> None:
    """One pad a token of the picture, between its marks; the same file has the same id."""
    medium = Medium("image", picture_bytes())
    turn = turns.following(Observation(media=(medium, medium)))
    pad = turns.chat.token_id("<|image_pad|>")
    assert (turn.token_ids == pad).sum() == 2 * 4
    assert [item.media_id for item in turn.items] == [turn.items[0].media_id] * 2
    assert turns.names_media(np.array([1, pad]))
    assert not turns.names_media(np.array([1, 2]))


@pytest.mark.parametrize(
    ("shown", "message"),
    [
        (Observation(text="<|im_end|>"), "must not hold special tokens of the model, got <|im_end|>"),
        (
            Observation(media=(Medium("smell", b""),)),
            "modality must be one of image, audio, video, got 'smell'",
        ),
    ],
)
def test_observation_that_cannot_be_a_message_is_refused(
    turns: TurnEncoder, shown: Observation, message: str
) -> None:
    """It could end its own turn, or has no encoder."""
    with pytest.raises(ChatError) as raised:
        turns.following(shown)
    assert message in str(raised.value)
