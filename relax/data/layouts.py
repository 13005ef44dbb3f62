"""How a source's row is understood: `messages`, `sharegpt` or `columns`, chosen by the configuration and never guessed.

Each layout turns a row into one shape, that of `messages`: {"messages": [...], "images": [...], "answer": "..."}.

    messages  {"messages": [{"role": "user", "content": "..."}], "answer": "..."}
    sharegpt  {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
              a last turn of gpt is not part of the prompt; it is the answer where the row has no other
    columns   {"prompt": "...", "answer": "..."}, and `system` if there is one;
              media that the prompt has no placeholder for come before its words

`fields` says which column stands for which of these names: {"answer": "solution"}; a dot goes into an object,
{"answer": "reward_model.ground_truth"}. No file is read and nothing is checked but what the layout needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from relax.data.errors import LineError, ManifestError
from relax.data.shown import brief

_OWN_NAMES = {
    "messages": {"messages": "messages"},
    "sharegpt": {"messages": "conversations"},
    "columns": {"prompt": "prompt", "system": "system"},
}
"""Names of a layout beside the answer and the media, with the columns that they stand for by default."""

_OPTIONAL = ("system",)
_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}


class Layout:
    """One way to read rows.

    Args:
        name: `messages`, `sharegpt` or `columns`.
        fields: Column by our name, where the two differ.
        placeholders: Modality name by placeholder, such as {"<image>": "image"}.

    Raises:
        ManifestError: `fields` has a name that the layout does not know.
    """

    def __init__(self, name: str, fields: Mapping[str, str], placeholders: Mapping[str, str]) -> None:
        self.name = name
        self._placeholders = {modality: each for each, modality in placeholders.items()}
        self._media = [f"{modality}s" for modality in self._placeholders]
        names = {**_OWN_NAMES[name], "answer": "answer", **{each: each for each in self._media}}
        unknown = sorted(set(fields) - set(names))
        if unknown:
            raise ManifestError(
                f"fields: names must be of {', '.join(names)} with layout {name}, got {unknown}"
            )
        self._given = dict(fields)
        self._columns = {**names, **fields}

    def columns(self) -> list[str]:
        """Return the columns of a source that are of use."""
        return [part for path in self._columns.values() for part in (path, path.partition(".")[0])]

    def check_columns(self, present: Sequence[str]) -> None:
        """Check a source whose rows all have the same columns.

        Raises:
            ManifestError: one that the layout needs is not there.
        """
        optional = {*_OPTIONAL, *self._media} | ({"answer"} if self.name == "sharegpt" else set())
        for name, column in self._columns.items():
            is_there = column in present or column.partition(".")[0] in present
            if not is_there and (name in self._given or name not in optional):
                raise ManifestError(
                    f"column {column!r} must be there for {name} with layout {self.name}, got columns "
                    f"{', '.join(present)}; name another in fields"
                )

    def read(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row in the shape of `messages`; keys without a meaning stay.

        Raises:
            LineError: the layout cannot make a conversation of it.
        """
        content = {key: value for key, value in row.items() if key not in self._given.values()}
        content |= {name: _at(row, column) for name, column in self._columns.items()}
        for key in self._media:
            content[key] = self._listed(content[key])
        if self.name == "sharegpt":
            self._read_turns(content)
        elif self.name == "columns":
            self._read_prompt(content)
        return content

    def _listed(self, media: Any) -> Any:
        """Return a single item of a column as a list; a list and what is neither as it is."""
        is_single = isinstance(media, bytes | Mapping) or (self.name == "columns" and isinstance(media, str))
        return [media] if is_single else media

    def _read_turns(self, content: dict[str, Any]) -> None:
        turns = content["messages"]
        if not isinstance(turns, list) or not turns:
            raise LineError(
                f"{self._columns['messages']} must be a list with at least one turn, got {brief(turns)}"
            )
        messages = []
        for number, turn in enumerate(turns):
            role = turn.get("from") if isinstance(turn, Mapping) else None
            if not isinstance(turn, Mapping) or role not in _ROLES:
                raise LineError(
                    f"{self._columns['messages']}[{number}] must be an object whose from is one of "
                    f"{', '.join(_ROLES)}, got {brief(turn)}"
                )
            messages.append({"role": _ROLES[role], "content": turn.get("value")})
        if messages[-1]["role"] == "assistant":
            last = messages.pop()["content"]
            if content["answer"] is None:
                content["answer"] = last
        content["messages"] = messages

    def _read_prompt(self, content: dict[str, Any]) -> None:
        prompt, system = content["prompt"], content["system"]
        if not isinstance(prompt, str) or not prompt:
            raise LineError(
                f"{self._columns['prompt']} must be a string with something in it, got {brief(prompt)}"
            )
        before = ""
        for modality, placeholder in self._placeholders.items():
            listed = content[f"{modality}s"]
            if isinstance(listed, list) and placeholder not in prompt:
                before += placeholder * len(listed)
        messages = [{"role": "user", "content": before + prompt}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        content["messages"] = messages


def _at(row: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column, or of a path of keys; None where there is none."""
    if column in row:
        return row[column]
    value: Any = row
    for key in column.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
