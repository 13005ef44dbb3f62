"""Agent programs of a user: plain urllib clients of the chat endpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

QUESTION = {"role": "user", "content": "What is it?"}


def chat(base_url: str, messages: list[dict[str, Any]], **also: Any) -> dict[str, Any]:
    """Return the answer to a request, or the error's body with its status."""
    data = json.dumps({"model": "policy", "messages": messages, **also}).encode()
    request = urllib.request.Request(
        f"{base_url}/chat/completions", data, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=30.0) as answer:
            body = answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return json.loads(error.read()) | {"status": error.code}
    return {"stream": body.decode()} if also.get("stream") else json.loads(body)


def two_turns(base_url: str, task: Any, bonus: float = 0.0) -> dict[str, Any]:
    """Ask, ask again with the answer, and compare with the reference."""
    print("a program may print")
    first = chat(base_url, [QUESTION])["choices"][0]["message"]
    again = [QUESTION, first, {"role": "user", "content": "Are you sure?"}]
    second = chat(base_url, again, temperature=0.3)["choices"][0]["message"]
    right = float(second["content"] == task.reference_answer)
    return {"reward": right + bonus, "info": {"num_questions": 2, "num_media": len(task.media)}}


def raises(base_url: str, task: Any) -> float:
    """Ask once and fail."""
    chat(base_url, [QUESTION])
    raise RuntimeError("the program broke")


def hangs(base_url: str, task: Any) -> float:
    """Start another process, and never end."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with open(task.prompt_text, "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    chat(base_url, [QUESTION])
    time.sleep(60.0)
    return 1.0


def silent(base_url: str, task: Any) -> float:
    """Ask nothing."""
    return 1.0


def no_reward(base_url: str, task: Any) -> None:
    """Ask, and leave the reward to others."""
    chat(base_url, [QUESTION])


def exits(base_url: str, task: Any) -> None:
    """End without a word."""
    os._exit(3)
