"""Chat template and tokenizer of a model directory, without transformers (whose import brings torch along).

Text that a user wrote can never become a special token: a conversation whose text would add one is refused.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
import numpy as np
from tokenizers import Tokenizer

from relax.data.errors import ModelDirectoryError

ChatMessage = dict[str, Any]
"""{"role": ..., "content": [{"type": "text", "text": ...} | {"type": "image"} | ...]}, or a text as the content.

Templates of models without towers know no lists.
"""


class ChatError(ValueError):
    """A conversation cannot be rendered or would smuggle in special tokens."""


class ChatTokenizer:
    """Renders and tokenizes conversations as the model's own tokenizer does.

    Args:
        model_dir: Directory with tokenizer.json and a chat template.

    Raises:
        ModelDirectoryError: one of the two is missing or damaged.
    """

    def __init__(self, model_dir: str | Path) -> None:
        directory = Path(model_dir)
        self._tokenizer = _load_tokenizer(directory)
        self._template = _load_template(directory)
        config = _read_json(directory / "tokenizer_config.json")
        self._names = {
            key: value if isinstance(value, str) else value["content"]
            for key, value in config.items()
            if key.endswith("_token")
            and (isinstance(value, str) or (isinstance(value, dict) and "content" in value))
        }
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = np.array(
            sorted(number for number, token in added.items() if token.special), np.int32
        )

    def token_id(self, token: str) -> int | None:
        """Return the id of one token, None if the vocabulary lacks it."""
        return self._tokenizer.token_to_id(token)

    def render(self, messages: Sequence[ChatMessage], *, answered: bool = True, **also: Any) -> str:
        """Return the conversation as the model reads it, up to where its answer begins.

        Args:
            messages: The conversation.
            answered: False: without what begins the model's answer.
            also: What else the template is told, such as `tools`.

        Raises:
            ChatError: the template refuses the conversation.
        """
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=answered, **{**self._names, **also}
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            ArithmeticError,
            AttributeError,
        ) as error:
            raise ChatError(
                f"chat template must accept the messages, got {type(error).__name__}: {error}"
            ) from error

    def encode(
        self, messages: Sequence[ChatMessage], render: Callable[[Sequence[ChatMessage]], str] | None = None
    ) -> np.ndarray:
        """Return the token ids of the rendered conversation, int32 [num_tokens].

        Args:
            messages: The conversation.
            render: Returns the text to encode for a conversation; None: all of it, `render`.

        Raises:
            ChatError: the template refuses the conversation, or its text holds the model's special tokens.
        """
        render = render or self.render
        token_ids = self.encode_rendered(render(messages))
        plain = self.encode_rendered(render(_without_text(messages)))
        smuggled = Counter(self._specials(token_ids)) - Counter(self._specials(plain))
        if smuggled:
            names = ", ".join(self._tokenizer.id_to_token(int(token)) for token in sorted(smuggled))
            raise ChatError(f"the messages' text must not hold special tokens of the model, got {names}")
        return token_ids

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of `token_ids`, special tokens left out."""
        return self._tokenizer.decode(np.asarray(token_ids).tolist(), skip_special_tokens=True)

    def encode_rendered(self, text: str) -> np.ndarray:
        """Return the token ids of text that may hold special tokens, int32 [num_tokens]."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def _specials(self, token_ids: np.ndarray) -> list[int]:
        return token_ids[np.isin(token_ids, self._special_ids)].tolist()


def _without_text(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the same conversation with a harmless word for each text."""
    return [{**message, "content": _content_without_text(message["content"])} for message in messages]


def _content_without_text(content: str | list[dict[str, str]]) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return "a"
    return [part | {"text": "a"} if "text" in part else part for part in content]


def _load_tokenizer(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelDirectoryError(
            f"{directory}: must have tokenizer.json, got none; AutoTokenizer.from_pretrained(...).save_pretrained(...) "
            "writes it"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception for every kind of damage
        raise ModelDirectoryError(f"{path}: must be a tokenizer, got: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _load_template(directory: Path) -> jinja2.Template:
    path = directory / "chat_template.jinja"
    text: Any = path.read_text(encoding="utf-8") if path.is_file() else None
    for name in ("chat_template.json", "tokenizer_config.json", "processor_config.json"):
        text = text or _read_json(directory / name).get("chat_template")
    if not isinstance(text, str):
        raise ModelDirectoryError(
            f"{directory}: must have a chat template, got none in chat_template.jinja, chat_template.json or "
            "tokenizer_config.json"
        )
    # The options are those that templates on the Hugging Face hub are written for.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise ModelDirectoryError(f"{directory}: chat template must be Jinja, got: {error}") from error


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelDirectoryError(f"{path}: must be JSON, got: {error}") from error
    return content if isinstance(content, dict) else {}
