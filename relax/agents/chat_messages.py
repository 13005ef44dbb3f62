"""Messages of the chat protocol: what a request may hold, whether two say the same, and an answer as one.

Only data URIs are read: a request must not make this service read anything else.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from modalities.base import MediaLimits
from modalities.errors import MediaError
from modalities.sources import read_bytes
from relax.agents.environment import Medium
from relax.rollout.engine import Completion

NOT_OFFERED = ("stop", "logit_bias", "response_format", "functions", "logprobs")
"""Fields of a request that would change what is sampled, or answered, in a way that is not kept."""
ROLES = ("system", "developer", "user", "assistant", "tool")
TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
Message = dict[str, Any]


class ChatRequestError(ValueError):
    """A request that is not answered.

    Args:
        message: The rule and what came.
        status: Of the HTTP answer.
        code: For programs, as OpenAI's.
    """

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def checked_request(body: Any) -> tuple[list[Message], int]:
    """Return the messages of a request, and the longest answer that it wants in tokens, 0 for none.

    Raises:
        ChatRequestError: it is not a request, or wants what is not offered.
    """
    if not isinstance(body, dict):
        raise ChatRequestError(f"request: must be a JSON object, got {type(body).__name__}")
    for name in NOT_OFFERED:
        if body.get(name):
            raise ChatRequestError(
                f"{name}: must be absent, got {body[name]!r}; the policy samples as the run says"
            )
    if body.get("n", 1) not in (None, 1):
        raise ChatRequestError(f"n: must be 1, got {body['n']!r}")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ChatRequestError("messages: must be a list with at least one message")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ChatRequestError(f"messages[{number}].role: must be one of {', '.join(ROLES)}")
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or 0
    if not isinstance(limit, int) or limit < 0:
        raise ChatRequestError(f"max_tokens: must be at least 1, got {limit!r}")
    return messages, limit


def parts_of(content: Any) -> list[dict[str, Any]]:
    """Return the parts of a message, text being one."""
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise ChatRequestError(f"content: must be text or a list of parts, got {type(content).__name__}")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and not isinstance(part.get("text"), str):
            raise ChatRequestError("content: a part of type text must have text")
        if kind not in ("text", "input_audio") and not str(kind).endswith("_url"):
            raise ChatRequestError(
                f"content: a part must be text, image_url, audio_url, video_url or input_audio, got {kind!r}"
            )
    return content


def medium_of(part: dict[str, Any]) -> Medium:
    """Return the medium of a part.

    Raises:
        ChatRequestError: it is no data URI, or one that is broken.
    """
    kind = part["type"]
    if kind == "input_audio":
        sound = part.get("input_audio") or {}
        return _read("audio", f"data:audio/{sound.get('format')};base64,{sound.get('data')}")
    url = part.get(kind)
    return _read(kind.removesuffix("_url"), url.get("url") if isinstance(url, dict) else url)


def _read(modality: str, url: Any) -> Medium:
    if not isinstance(url, str) or not url.startswith("data:"):
        raise ChatRequestError(f"content: {modality} must be a data URI, got {str(url)[:40]!r}")
    try:
        return Medium(modality, read_bytes(url, base_dir=Path(), limits=MediaLimits()))
    except MediaError as error:
        raise ChatRequestError(f"content: {modality}: {error}") from error


def canonical(message: Message) -> Message:
    """Return what a message says, alike for the forms in which clients write the same."""
    parts: list[tuple[str, str]] = []
    for part in parts_of(message.get("content")):
        if part["type"] != "text":
            digest = hashlib.blake2b(json.dumps(part, sort_keys=True).encode(), digest_size=16).hexdigest()
            parts.append((part["type"], digest))
        elif parts and parts[-1][0] == "text":
            parts[-1] = ("text", parts[-1][1] + part["text"])
        elif part["text"]:
            parts.append(("text", part["text"]))
    return {
        "role": message["role"],
        "parts": parts,
        "calls": [_call(each) for each in message.get("tool_calls") or ()],
    }


def _call(call: Any) -> tuple[str, str]:
    function = call.get("function", {}) if isinstance(call, dict) else {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return str(function.get("name")), str(arguments)
    return str(function.get("name")), json.dumps(arguments, sort_keys=True)


def answer_message(completion: Completion) -> tuple[Message, str]:
    """Return the assistant's message, its tool calls (as Qwen writes them) taken out of the text, and why it ended."""
    text, calls = completion.text, []
    for number, match in enumerate(TOOL_CALL.finditer(text)):
        try:
            call = json.loads(match[1])
            function = {"name": call["name"], "arguments": json.dumps(call.get("arguments", {}))}
        except (ValueError, LookupError, TypeError, AttributeError):
            return {"role": "assistant", "content": text}, completion.finish_reason
        calls.append({"id": f"call_{len(completion.uid)}_{number}", "type": "function", "function": function})
    if not calls:
        return {"role": "assistant", "content": text}, completion.finish_reason
    rest = TOOL_CALL.sub("", text).strip()
    return {"role": "assistant", "content": rest or None, "tool_calls": calls}, "tool_calls"
