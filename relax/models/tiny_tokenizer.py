"""A small byte-level BPE tokenizer in the Qwen2 class, trained on a few sentences, with Qwen3-Omni's chat form.

Any text can be encoded; the words of the corpus become few tokens, the answer words one each.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

from relax.models.errors import CheckpointError

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
NAMED_TOKENS = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
"""The roles that Qwen3-Omni's processor knows the tokens by."""

ANSWER_WORDS = (
    "red", "green", "blue", "yellow", "low", "middle", "high", "top", "left", "right", "up", "down",
)  # fmt: skip
ROLE_WORDS = ("system", "user", "assistant", "tool")

CHAT_TEMPLATE = """\
{%- macro media(kind) -%}
{%- if kind == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif kind == 'audio' -%}<|audio_start|><|audio_pad|><|audio_end|>
{%- elif kind == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>
{%- else -%}{{ raise_exception('content part must be text, image, audio or video, got ' ~ kind) }}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{{- '<|im_start|>' ~ message.role ~ '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'text' -%}{{- part.text -}}{%- else -%}{{- media(part.type) -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

_WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How the Qwen2 class cuts text before it merges; training must cut alike."""


def make_tokenizer(
    vocab_size: int, corpus: Sequence[str] = (), words: Sequence[str] = ANSWER_WORDS, max_tokens: int = 32_768
) -> Qwen2Tokenizer:
    """Train a tokenizer; the same arguments give the same one.

    Args:
        vocab_size: Exact size, special tokens (the last ids) included; at least 256 bytes and the specials.
        corpus: Sentences that should become few tokens.
        words: Words that must be one token each at the start of a text.
        max_tokens: Longest input the model takes.

    Raises:
        CheckpointError: The vocabulary is too small for the words.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Weighty words are merged first, whatever the corpus repeats.
    weighty = [word for word in (*words, *ROLE_WORDS) for _ in range(10_000)]
    tokenizer.train_from_iterator([*weighty, *corpus], trainer)
    vocab = dict(sorted(tokenizer.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1]))
    merges = _merges(tokenizer)
    # A small corpus may have nothing left to merge: unreachable entries keep the size exact.
    for filler in range(vocab_size - len(SPECIAL_TOKENS) - len(vocab)):
        vocab[f"<unused{filler}>"] = len(vocab)
    qwen_class: Any = Qwen2Tokenizer  # its annotations are narrower than what it takes
    made = qwen_class(
        vocab=vocab,
        merges=merges,
        unk_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=NAMED_TOKENS,
        model_max_length=max_tokens,
        padding_side="left",
    )
    made.add_special_tokens(
        {"additional_special_tokens": list(SPECIAL_TOKENS)}, replace_extra_special_tokens=False
    )
    made.chat_template = CHAT_TEMPLATE
    _check(made, vocab_size, words)
    return made


def _merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    pairs = json.loads(tokenizer.to_str())["model"]["merges"]
    return [(first, second) for first, second in pairs]


def _check(tokenizer: Qwen2Tokenizer, vocab_size: int, words: Sequence[str]) -> None:
    if len(tokenizer) != vocab_size:
        raise CheckpointError(
            f"make_tokenizer: vocabulary must have {vocab_size} entries, got {len(tokenizer)}"
        )
    split = [word for word in words if len(tokenizer.encode(word)) != 1]
    if split:
        raise CheckpointError(
            f"make_tokenizer: answer words must be one token each, {split} are not; raise vocab_size {vocab_size}"
        )
