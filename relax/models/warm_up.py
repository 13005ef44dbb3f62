"""Teach a random thinker the answer format alone, so that training starts from a model that speaks, at chance.

Each question of a manifest is followed by one of the answers that fit it, uniformly at random, and the end token.
The media of the questions are never read: a step is either text only, or has noise in place of the media. So the
model can learn how answers look and when to stop, and nothing of which answer is right.

Loss: cross-entropy to the distribution of the next token over the answers that share the tokens so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from modalities.base import num_encoded_tokens
from modalities.profile import TOWERS, EncodingProfile, Tower
from relax.data.chat import ChatError, ChatTokenizer
from relax.data.manifest import Record
from relax.models.batch import collate
from relax.models.errors import CheckpointError
from relax.models.inputs import PromptInputs
from relax.models.thinker import Thinker, embed, language_model, load_thinker
from relax.models.tiny import save_weights


@dataclass(frozen=True, kw_only=True)
class WarmUpConfig:
    """The procedure. The defaults leave the tiny thinker at chance with nearly every answer well formed."""

    num_steps: int = 150
    learning_rate: float = 3e-3
    """Peak; rises over `rise_steps`, then falls linearly to a twentieth."""
    rise_steps: int = 5
    questions_per_step: int = 24
    noise_share: float = 0.5
    """Share of steps with noise in place of media; the others are text only."""
    trained: tuple[str, ...] = ("thinker.model.*", "thinker.lm_head.*")
    """Patterns of checkpoint names; the towers stay random."""
    max_grad_norm: float = 1.0
    noise_audio_frames: int = 50
    """Length of a noise clip in log-mel frames."""

    def __post_init__(self) -> None:
        for name in ("num_steps", "rise_steps", "questions_per_step", "noise_audio_frames"):
            if getattr(self, name) < 1:
                raise CheckpointError(f"WarmUpConfig: {name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.noise_share <= 1:
            raise CheckpointError(f"WarmUpConfig: noise_share must be in [0, 1], got {self.noise_share}")


Turn = tuple[str, tuple[tuple[str, str], ...]]
"""(role, parts); a part is ("text", words) or (tower, "")."""


@dataclass(frozen=True)
class Question:
    """A question's wording, where its media belong, and the answers that fit it."""

    turns: tuple[Turn, ...]
    answers: tuple[str, ...]
    """At least one, sorted."""


@dataclass(frozen=True, kw_only=True)
class FormatReport:
    """How a warmed-up model answers, from exact probabilities; means over the questions."""

    num_questions: int
    format_share: float
    """Probability that a completion is one of the answers that fit, with the end token right after."""
    chance_accuracy: float
    """Probability of the right answer if each is as likely to be right."""
    largest_share: float
    """Largest share that one answer has of `format_share`; 1 / number of answers when uniform."""


def questions_of(records: Iterable[Record]) -> list[Question]:
    """Return the distinct questions of manifest rows with the answers that fit them.

    Answers fit a wording when any row with that wording has them. A wording with one answer only gets the answers
    of all rows with the same media instead, or the format could not be taught without the answer. Media sources
    are not looked at.
    """
    by_turns: dict[tuple[Turn, ...], set[str]] = {}
    by_towers: dict[tuple[Tower, ...], set[str]] = {}
    for record in records:
        turns = tuple(
            (
                message.role,
                tuple((part.kind, part.value if part.kind == "text" else "") for part in message.parts),
            )
            for message in record.messages
        )
        by_turns.setdefault(turns, set()).add(record.answer)
        by_towers.setdefault(_towers(turns), set()).add(record.answer)
    questions = []
    for turns, answers in sorted(by_turns.items()):
        fitting = answers if len(answers) > 1 else by_towers[_towers(turns)]
        questions.append(Question(turns, tuple(sorted(fitting))))
    return questions


def warm_up_format(
    model_dir: Path | str, questions: Sequence[Question], *, seed: int, config: WarmUpConfig | None = None
) -> FormatReport:
    """Train the model in `model_dir` on the answer format and write its weights back.

    The same arguments give the same weights on the same machine. Uses as many threads as torch is set to.

    Raises:
        CheckpointError: There is no usable question, no parameter is trained, or the directory is not a thinker.
    """
    chosen = config or WarmUpConfig()
    thinker = load_thinker(model_dir)
    prompts = _PromptMaker(thinker, questions, chosen, np.random.default_rng(seed))
    thinker.hf.requires_grad_(False)
    trained = [
        parameter.requires_grad_(True)
        for name, parameter in thinker.hf.named_parameters()
        if any(fnmatchcase(f"thinker.{name}", pattern) for pattern in chosen.trained)
    ]
    if not trained:
        raise CheckpointError(f"warm_up_format: trained must match a parameter, got {list(chosen.trained)}")
    optimizer = torch.optim.Adam(trained, lr=chosen.learning_rate, betas=(0.9, 0.99))
    for step in range(chosen.num_steps):
        fraction = min((step + 1) / chosen.rise_steps, max(0.05, 1 - step / chosen.num_steps))
        optimizer.param_groups[0]["lr"] = chosen.learning_rate * fraction
        loss = _loss(thinker, prompts.draw(step))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, chosen.max_grad_norm)
        optimizer.step()
    save_weights(thinker, model_dir)
    return _report(thinker, prompts)


@dataclass(frozen=True)
class _Example:
    prompt: PromptInputs
    """The question and the answer but for the answer's last token."""
    num_question_tokens: int
    answer: list[int]
    """Tokens of the chosen answer, end token included."""
    answers: list[list[int]]


class _PromptMaker:
    """Turns questions into token ids, with noise in place of media when asked.

    Questions that the chat template refuses or that name special tokens are left out.
    """

    def __init__(
        self, thinker: Thinker, questions: Sequence[Question], config: WarmUpConfig, rng: np.random.Generator
    ) -> None:
        self._config = config
        self._rng = rng
        self._spec = thinker.spec
        self._profile = EncodingProfile.from_pretrained(thinker.model_dir)
        self._tokenizer = ChatTokenizer(thinker.model_dir)
        self._plain = Tokenizer.from_file(str(thinker.model_dir / "tokenizer.json"))
        pads = [self._tokenizer.token_id(self._profile.tower_tokens[tower][1]) for tower in TOWERS]
        self._pad_ids = [token_id for token_id in pads if token_id is not None]
        self.questions = [question for question in questions if self._renders(question)]
        if not self.questions:
            raise CheckpointError(
                f"warm_up_format: questions must have a usable one, got {len(questions)} unusable; "
                "does the manifest have questions and answers?"
            )
        by_towers: dict[tuple[Tower, ...], list[Question]] = {}
        for question in self.questions:
            by_towers.setdefault(_towers(question.turns), []).append(question)
        self._groups = list(by_towers.values())

    def draw(self, step: int) -> list[_Example]:
        """Draw a step's questions, each with one of its answers; kinds of media come equally often."""
        share = self._config.noise_share
        with_noise = int((step + 1) * share) > int(step * share)
        examples = []
        for index in range(self._config.questions_per_step):
            group = self._groups[index % len(self._groups)]
            question = group[int(self._rng.integers(len(group)))]
            answer = int(self._rng.integers(len(question.answers)))
            examples.append(self.example(question, answer, with_noise))
        return examples

    def example(self, question: Question, answer: int, with_noise: bool) -> _Example:
        """Return the question followed by its answer number `answer`."""
        media: dict[str, list[dict[str, np.ndarray]]] = {}
        counts: list[int] = []
        for tower in _towers(question.turns) if with_noise else ():
            encoded = self._noise(tower)
            media.setdefault(tower, []).append(encoded)
            counts.append(num_encoded_tokens(tower, encoded, self._profile))
        ids = self._question_ids(question, with_noise)
        repeats = np.ones(len(ids), np.int64)
        repeats[np.isin(ids, self._pad_ids)] = counts
        ids = np.repeat(ids, repeats)
        ending = [self._spec.eos_token_ids[0]]
        answers = [
            self._plain.encode(each, add_special_tokens=False).ids + ending for each in question.answers
        ]
        token_ids = np.concatenate((ids, answers[answer][:-1])).astype(np.int32)
        return _Example(PromptInputs(token_ids, media), len(ids), answers[answer], answers)

    def _question_ids(self, question: Question, with_media: bool) -> np.ndarray:
        messages = [
            {
                "role": role,
                "content": [
                    {"type": "text", "text": words} if kind == "text" else {"type": kind}
                    for kind, words in parts
                    if kind == "text" or with_media
                ],
            }
            for role, parts in question.turns
        ]
        return self._tokenizer.encode(messages)

    def _renders(self, question: Question) -> bool:
        try:
            pads = np.isin(self._question_ids(question, True), self._pad_ids).sum()
        except ChatError:
            return False
        return int(pads) == len(_towers(question.turns))

    def _noise(self, tower: Tower) -> dict[str, np.ndarray]:
        """Return random pixels or log-mel frames: a level for each patch or band, and finer noise on it."""
        if tower == "audio":
            bands = self._spec.num_mel_bins
            shape = (bands, self._config.noise_audio_frames)
            level = self._rng.normal(0, 0.5, (bands, 1))
            return {"features": (level + self._rng.normal(0, 0.3, shape)).astype(np.float32)}
        side = (
            max(1, round(self._profile.min_pixels**0.5 / self._profile.resize_factor))
            * self._profile.merge_size
        )
        depth = (
            1
            if tower == "image"
            else max(1, self._profile.video_max_frames // self._profile.temporal_patch_size)
        )
        count = depth * side * side
        level = self._rng.normal(0, 0.5, (count, 1))
        values = 127.5 + 127.5 * (level + self._rng.normal(0, 0.3, (count, self._spec.patch_values)))
        encoded: dict[str, np.ndarray] = {
            "patches": values.clip(0, 255).astype(np.uint8),
            "grid_thw": np.array([depth, side, side], np.int32),
        }
        if tower == "video":
            seconds = self._profile.temporal_patch_size / self._profile.video_fps
            encoded["second_per_grid"] = np.array(seconds, np.float32)
        return encoded


def _answer_logprobs(thinker: Thinker, examples: Sequence[_Example]) -> list[torch.Tensor]:
    """Return for each example the log-distributions [num_answer_tokens, vocabulary] of its answer's tokens."""
    batch = collate([example.prompt for example in examples], thinker.spec, pad="right")
    hidden_BTH = language_model(thinker, embed(thinker, batch), batch.attention_mask_BT)
    rows: list[int] = []
    columns: list[int] = []
    lengths: list[int] = []
    for row, example in enumerate(examples):
        first, length = example.num_question_tokens - 1, len(example.answer)
        rows += [row] * length
        columns += range(first, first + length)
        lengths.append(length)
    logprobs = thinker.hf.lm_head(hidden_BTH[rows, columns]).log_softmax(-1)
    return list(logprobs.split(lengths))


def _loss(thinker: Thinker, examples: Sequence[_Example]) -> torch.Tensor:
    total = torch.zeros(())
    for example, logprobs in zip(examples, _answer_logprobs(thinker, examples), strict=True):
        for position in range(len(example.answer)):
            prefix = example.answer[:position]
            following = [answer[position] for answer in example.answers if answer[:position] == prefix]
            total = total - logprobs[position, following].mean()
    return total / len(examples)


@torch.inference_mode()
def _report(thinker: Thinker, prompts: _PromptMaker) -> FormatReport:
    shares, chances, largest = [], [], []
    for question in prompts.questions:
        count = len(question.answers)
        examples = [
            prompts.example(question, answer, with_noise)
            for with_noise in (False, True)
            for answer in range(count)
        ]
        logprobs = [
            each.gather(1, torch.tensor(example.answer)[:, None]).sum()
            for example, each in zip(examples, _answer_logprobs(thinker, examples), strict=True)
        ]
        probabilities = torch.stack(logprobs).exp().view(2, count)
        shares.append(probabilities.sum(1).mean().item())
        chances.append(probabilities.mean().item())
        largest.append((probabilities.amax(1) / probabilities.sum(1)).mean().item())
    return FormatReport(
        num_questions=len(prompts.questions),
        format_share=float(np.mean(shares)),
        chance_accuracy=float(np.mean(chances)),
        largest_share=float(np.mean(largest)),
    )


def _towers(turns: Sequence[Turn]) -> tuple[Tower, ...]:
    """Return the towers of a question's media in the order of its parts."""
    kinds = [kind for _, parts in turns for kind, _ in parts]
    return tuple(tower for kind in kinds for tower in TOWERS if tower == kind)
