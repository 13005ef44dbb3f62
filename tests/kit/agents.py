"""Environments of the tests, and a fake engine that says what a test wrote down. Real engines are in relax/rollout."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from relax.agents.environment import Medium, Observation, Step, Task
from relax.agents.turns import TurnEncoder
from relax.rollout.engine import Completion, FinishReason, GenerateRequest
from tests.kit.engine import FakeEngine
from tests.kit.media import picture_bytes

END = "<|im_end|>"


class Shower:
    """Shows pictures for as long as the agent says "look"; the reward is 1 for the reference answer.

    "raise" raises, "hang" waits until `released`, "strange" returns what is no step, and "special" shows a word that is
    a special token.
    """

    released = threading.Event()
    num_closed = 0

    def __init__(self, greeting: str = "", modality: str = "image") -> None:
        self._greeting = greeting
        self._modality = modality
        self._num_shown = 0
        self._task: Task | None = None

    def reset(self, task: Task) -> Observation:
        """Begin."""
        self._task = task
        return Observation(text=self._greeting)

    def step(self, action_text: str) -> Step:
        """Do what the agent says."""
        match action_text.strip():
            case "raise":
                raise RuntimeError("the world broke")
            case "hang":
                self.released.wait(30.0)
            case "strange":
                return "no step"  # type: ignore[return-value]
            case "special":
                return Step(observation=Observation(text=END))
            case "look":
                self._num_shown += 1
                shown = Medium(self._modality, picture_bytes(seed=self._num_shown))
                words = Observation(text="look again", media=(shown,))
                return Step(observation=words, reward=0.25, info={"num_shown": self._num_shown})
        right = self._task is not None and action_text.strip() == self._task.reference_answer
        return Step(reward=float(right), done=True, info={"num_shown": self._num_shown})

    def close(self) -> None:
        """Count."""
        Shower.num_closed += 1


def saying(turns: TurnEncoder, script: Callable[[GenerateRequest, int], str]) -> TalkingEngine:
    """Return an engine that says `script(request, sample)`; a text that ends with … is cut off by its length."""
    return TalkingEngine(turns, script)


class TalkingEngine(FakeEngine):
    """Says texts as tokens, with logprobs -1, -2, ... and routes that count calls; it keeps its requests."""

    def __init__(self, turns: TurnEncoder, script: Callable[[GenerateRequest, int], str]) -> None:
        super().__init__(self._say)
        self._turns = turns
        self._text = script
        self.requests: list[GenerateRequest] = []

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Answer, and keep what was asked."""
        self.requests += requests
        return super().generate(requests)

    def tokens(self, text: str) -> np.ndarray:
        """Return the tokens of a text and of its end, unless it is cut off."""
        chat = self._turns.chat
        words = chat.encode(
            [{"role": "user", "content": [{"type": "text", "text": text.rstrip("…")}]}], _words
        )
        end = [] if text.endswith("…") else [chat.token_id(END)]
        return np.concatenate((words, np.array(end, np.int32)))

    def _say(self, request: GenerateRequest) -> list[Completion]:
        return [self._completion(request, sample) for sample in range(request.num_samples)]

    def _completion(self, request: GenerateRequest, sample: int) -> Completion:
        text = self._text(request, sample)
        reasons: dict[str, FinishReason] = {"…": "length", "!": "abort"}
        ids = self.tokens(text)
        count = len(ids)
        return Completion(
            uid=request.uid,
            sample_index=sample,
            token_ids=ids,
            logprobs=-np.arange(1, count + 1, dtype=np.float32),
            token_policy_versions=np.full(count, self.policy_version, np.int32),
            routed_experts=np.full((len(request.token_ids) + count - 1, 2, 2), len(self.requests), np.uint8),
            finish_reason=reasons.get(text[-1:], "stop"),
            text=text.rstrip("…"),
        )


def _words(messages: Sequence[dict]) -> str:
    return messages[0]["content"][0]["text"]
