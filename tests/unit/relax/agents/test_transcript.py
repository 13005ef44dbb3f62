"""Tokens of an episode, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from modalities.media import MediaItem
from relax.agents.transcript import Transcript
from relax.rollout.engine import Completion

PICTURE = {"patches": np.zeros((4, 6), np.uint8), "grid_thw": np.array([1, 2, 2], np.int32)}


def said(tokens: list[int], num_before: int, version: int, mark: int) -> Completion:
    """Return an answer whose routes are all `mark`."""
    count = len(tokens)
    return Completion(
        uid="a",
        sample_index=0,
        token_ids=np.array(tokens, np.int32),
        logprobs=np.array([-0.5 * token for token in tokens], np.float32),
        token_policy_versions=np.full(count, version, np.int32),
        routed_experts=np.full((num_before + count - 1, 1, 1), mark, np.uint8),
        finish_reason="stop",
        text="",
    )


def test_trace_has_answers_and_observations_as_they_came() -> None:
    """Mask, logprobs, versions and routes of two turns, each route of the turn that first read its token."""
    transcript = Transcript(np.array([1, 2]), {"image": [PICTURE]}, ["p"])
    transcript.answer(said([3, 4], 2, version=5, mark=1))
    transcript.observe(
        np.array([9, 9, 9]), [MediaItem(media_id="q", modality="image", data=b"", encoded=PICTURE)]
    )
    transcript.answer(said([6], 7, version=7, mark=2))
    transcript.observe(np.array([8]), [MediaItem(media_id="r", modality="image", data=b"", encoded=PICTURE)])
    trace = transcript.trace()
    assert trace.token_ids.tolist() == [3, 4, 9, 9, 9, 6]
    assert trace.loss_mask.tolist() == [True, True, False, False, False, True]
    assert trace.logprobs.tolist() == [-1.5, -2.0, 0, 0, 0, -3.0]
    assert trace.token_policy_versions.tolist() == [5, 5, 5, 5, 5, 7]
    assert trace.routed_experts.ravel().tolist() == [1, 1, 1, 2, 2, 2, 2]
    assert trace.media_ids == ("p", "q")
    assert len(transcript.media["image"]) == 3
    assert (transcript.num_turns, transcript.num_tokens, transcript.last_token) == (2, 9, 8)


def test_observation_before_the_first_turn_is_of_the_prompt() -> None:
    """It is neither in the completion nor masked."""
    transcript = Transcript(np.array([1, 2]), {}, [])
    transcript.observe(np.array([7]))
    transcript.answer(said([3], 3, version=0, mark=1))
    assert transcript.prompt_token_ids.tolist() == [1, 2, 7]
    assert transcript.trace().loss_mask.tolist() == [True]


def test_routes_are_left_out_when_a_turn_has_none() -> None:
    """Half a table would be taken for a whole one."""
    transcript = Transcript(np.array([1]), {}, [])
    transcript.answer(said([3], 1, version=0, mark=1))
    without = said([4], 2, version=0, mark=1)
    transcript.answer(Completion(**{**without.__dict__, "routed_experts": None}))
    assert transcript.trace().routed_experts is None


def test_trace_needs_a_token_that_was_sampled() -> None:
    """An episode without a turn is no row; its prompt cannot be replaced once it has one."""
    transcript = Transcript(np.array([1]), {}, [])
    with pytest.raises(ValueError, match="must have a token that was sampled, got none"):
        transcript.trace()
    transcript.answer(said([3], 1, version=0, mark=1))
    with pytest.raises(ValueError, match="before the first turn, got 1 turns"):
        transcript.replace_prompt(np.array([5]))
