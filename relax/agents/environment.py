"""What an environment is: it sees what the agent says and answers with words, media and rewards. No model, no tokens.

    reset(task) -> Observation                 what the prompt does not say yet; empty: the prompt is the whole task
    step(action_text) -> Step                  observation, reward, whether the episode is over, facts

An environment belongs to one episode: it is made for it, is called by one thread at a time, and is closed at its end.
Whatever it raises costs its row, never the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class Medium:
    """One picture, sound or film, as a file's bytes."""

    modality: str
    """Name of the encoder that reads it: image, audio, video, or one of yours."""
    data: bytes


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What the agent sees next: media, then text. It becomes a message of the conversation."""

    text: str = ""
    media: tuple[Medium, ...] = ()
    role: str = "user"
    """Role of the message, as the model's chat template knows it, such as `user` or `tool`."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to see."""
        return not self.text and not self.media


@dataclass(frozen=True, kw_only=True)
class Step:
    """What an action led to."""

    observation: Observation = field(default_factory=Observation)
    """Not looked at when the episode is over."""
    reward: float = 0.0
    """Added to the episode's."""
    done: bool = False
    info: Mapping[str, float] = field(default_factory=dict)
    """Numbers for the metrics; their means over the episodes of a batch are recorded as `agent/<name>`."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One prompt, as an environment or a program sees it."""

    uid: str
    prompt_text: str
    """The user's words, media as `<image>`, `<audio>`, `<video>`."""
    reference_answer: str
    modality: str = ""
    messages: str = "[]"
    """The conversation in chat form, as JSON; media by their sources, those of a data URI left out."""
    media_paths: tuple[str, ...] = ()
    media: tuple[Medium, ...] = ()
    """The prompt's media in order, as files, where the queue keeps files (`media.keep=bytes`); else none."""
    seed: int = 0
    """Another for each sample of a group."""


@runtime_checkable
class Environment(Protocol):
    """One episode's world. It may have a method `close`, which is called at the end."""

    def reset(self, task: Task) -> Observation:
        """Begin; return what the prompt does not say yet."""
        ...

    def step(self, action_text: str) -> Step:
        """Answer one turn of the agent; `action_text` is the turn without special tokens."""
        ...


EnvironmentMaker = Callable[[], Any]
"""Returns a new environment."""
