"""The process of one agent program: `python -m relax.agents.program_entry`.

The job is read from standard input as JSON, the result is written to standard output; what the program prints goes to
standard error.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from relax.agents.environment import Medium, Task
from relax.agents.registry import load_program


def task_to_json(task: Task) -> dict[str, Any]:
    """Return a task as JSON can hold it."""
    facts = {name: getattr(task, name) for name in ("uid", "prompt_text", "reference_answer", "modality")}
    media = [[each.modality, base64.b64encode(each.data).decode()] for each in task.media]
    rest = {"messages": task.messages, "media_paths": list(task.media_paths), "seed": task.seed}
    return {**facts, **rest, "media": media}


def task_from_json(facts: Mapping[str, Any]) -> Task:
    """Return what `task_to_json` was given."""
    media = tuple(Medium(modality, base64.b64decode(data)) for modality, data in facts["media"])
    return Task(**{**facts, "media": media, "media_paths": tuple(facts["media_paths"])})


def result_of(returned: Any) -> dict[str, Any]:
    """Return what a program returned as a reward and numbers for the metrics.

    Raises:
        TypeError: it is neither None, a number, nor a mapping with a number `reward`.
    """
    if returned is None:
        return {"reward": None, "info": {}}
    if isinstance(returned, Mapping):
        info = {str(name): float(value) for name, value in dict(returned.get("info") or {}).items()}
        reward = returned.get("reward")
        return {"reward": None if reward is None else float(reward), "info": info}
    if not isinstance(returned, int | float):
        raise TypeError(f"must return a reward or a mapping with one, got {type(returned).__name__}")
    return {"reward": float(returned), "info": {}}


def main() -> None:
    """Run the program of one episode."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    job = json.load(sys.stdin)
    try:
        program = load_program(job["program"], job["options"])
        result = result_of(program(job["base_url"], task_from_json(job["task"]), **job["options"]))
    except (Exception, SystemExit) as error:  # whatever a program raises is its episode's failure
        result = {"error": f"{type(error).__name__}: {error}"[:500]}
    json.dump(result, answer)
    answer.close()


if __name__ == "__main__":
    main()
