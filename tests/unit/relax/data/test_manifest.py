"""A manifest's lines: the shapes that users have, and one named error for each line that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modalities.registry import load_modalities
from modalities.text import Part
from relax.data.errors import ManifestError, RowError
from relax.data.manifest import Manifest, MediaRef, Record
from tests.kit.media import LIMITS, PROFILE

GOOD = {
    "messages": [{"role": "user", "content": "<image>What colour is the shape?"}],
    "images": ["a.png"],
    "answer": "red",
}


def _write(folder: Path, *lines: str | dict) -> Path:
    for name in ("a.png", "b.png", "c.wav"):
        (folder / name).touch()
    path = folder / "train.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def _read(folder: Path, line: str | dict, **options: Any) -> Record | RowError:
    return Manifest(_write(folder, line), **options)[0]


def test_manifest_reads_placeholders_in_text(tmp_path: Path) -> None:
    """Media are taken from their lists in the order of the placeholders."""
    line = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "<audio>First <image>, then<image>?"},
        ],
        "images": ["a.png", "b.png"],
        "audios": ["c.wav"],
        "answer": "yes",
        "source": "other keys are left alone",
    }
    record = _read(tmp_path, line)
    assert isinstance(record, Record)
    assert record.media == (
        MediaRef("audio", "c.wav"),
        MediaRef("image", "a.png"),
        MediaRef("image", "b.png"),
    )
    assert record.messages[1].parts == (
        Part("audio", "c.wav"),
        Part("text", "First "),
        Part("image", "a.png"),
        Part("text", ", then"),
        Part("image", "b.png"),
        Part("text", "?"),
    )
    assert (record.modality, record.answer, record.index, record.place) == (
        "audio+image",
        "yes",
        0,
        "train.jsonl:1",
    )


@pytest.mark.parametrize("part", [{"image": "a.png"}, {"path": "a.png"}, {"url": "a.png"}, {}])
def test_manifest_reads_lists_of_parts(tmp_path: Path, part: dict) -> None:
    """A part names its file, or takes the next one of the list."""
    content = [{"type": "image", **part}, {"type": "text", "text": "A literal <image>?"}]
    line = {"messages": [{"role": "user", "content": content}], "answer": "no"}
    record = _read(tmp_path, line | ({} if part else {"images": ["a.png"]}))
    assert isinstance(record, Record)
    assert record.media == (MediaRef("image", "a.png"),)
    assert record.messages[0].parts[1] == Part("text", "A literal <image>?")


def test_manifest_reads_a_question_without_media(tmp_path: Path) -> None:
    """Its modality is text."""
    record = _read(tmp_path, {"messages": [{"role": "user", "content": "1 + 1?"}], "answer": "2"})
    assert isinstance(record, Record)
    assert (record.modality, record.media) == ("text", ())


def test_manifest_reads_an_encoder_of_yours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Named depth, it reads <depth> and depths; without it the row says what is missing."""
    monkeypatch.syspath_prepend(Path(__file__).parents[4] / "examples" / "depth_modality")
    modalities = load_modalities(PROFILE, LIMITS, ["depth_modality.depth:Depth"])
    line = {"messages": [{"role": "user", "content": "<depth>Near?"}], "depths": ["a.png"], "answer": "yes"}
    record = _read(tmp_path, line, modalities=modalities)
    assert isinstance(record, Record)
    assert record.media == (MediaRef("depth", "a.png"),)
    assert _read(tmp_path, line) == RowError(
        "train.jsonl:1",
        "<depth> must belong to a loaded modality (image, audio, video), got depths; "
        "name its encoder in modalities.extra",
    )


def test_manifest_counts_lines_and_skips_blank_ones(tmp_path: Path) -> None:
    """Places are line numbers of the file; blank lines and a byte order mark are no rows."""
    manifest = Manifest(_write(tmp_path, "\ufeff" + json.dumps(GOOD), "", "   ", "{", GOOD, ""))
    assert len(manifest) == 3
    rows = list(manifest)
    assert [row.place for row in rows] == ["train.jsonl:1", "train.jsonl:4", "train.jsonl:5"]
    assert [isinstance(row, RowError) for row in rows] == [False, True, False]
    with pytest.raises(IndexError):
        manifest[3]


def test_manifest_reads_a_last_line_without_newline_and_very_long_lines(tmp_path: Path) -> None:
    """The index is built in pieces; a line longer than a piece is still one row."""
    path = _write(tmp_path, GOOD)
    long_line = json.dumps(GOOD | {"note": "x" * 3_000_000})
    path.write_text(f"{long_line}\n{json.dumps(GOOD)}\n{long_line}")
    rows = list(Manifest(path))
    assert [row.place for row in rows] == ["train.jsonl:1", "train.jsonl:2", "train.jsonl:3"]
    assert all(isinstance(row, Record) for row in rows)


def _message(content: object, role: object = "user") -> dict:
    return GOOD | {"messages": [{"role": role, "content": content}]}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{'messages': 1}", "line must be JSON, got \"{'messages': 1}\": Expecting property name"),
        ("[" * 100_000, "line must be JSON, got one that is nested too deeply"),
        ("[1, 2]", "line must be a JSON object, got list [1, 2]"),
        ({"answer": "red"}, "messages must be a list with at least one message, got nothing"),
        (GOOD | {"messages": []}, "messages must be a list with at least one message, got list []"),
        (GOOD | {"messages": ["hi"]}, 'messages[0] must be an object with role and content, got string "hi"'),
        (
            _message("hi", "robot"),
            'messages[0].role must be one of system, user, assistant, got string "robot"',
        ),
        (_message(7), "messages[0].content must be text or a list of parts, got number 7"),
        (_message(""), 'messages[0].content must not be empty, got string ""'),
        (
            _message([{"type": "smell"}]),
            "messages[0].content[0] must be an object whose type is one of text, image, audio, video, "
            'got object {"type": "smell"}',
        ),
        (_message([{"type": "text"}]), "messages[0].content[0].text must be a string, got nothing"),
        (
            _message("done", "assistant") | {"images": []},
            "the last message must be the user's, got role 'assistant'",
        ),
        (GOOD | {"images": "a.png"}, 'images must be a list of paths, got string "a.png"'),
        (GOOD | {"images": [1]}, "images must be a list of paths, got list [1]"),
        (
            GOOD | {"images": []},
            "images must hold one path for each <image> of the messages, got none left for messages[0]",
        ),
        (
            GOOD | {"images": ["a.png", "b.png"]},
            "images must hold one path for each <image> of the messages, got 2 paths for 1",
        ),
        (
            GOOD | {"audios": ["c.wav"]},
            "audios must hold one path for each <audio> of the messages, got 1 paths for 0",
        ),
        (
            GOOD | {"images": ["gone.png"]},
            "image path must be a file, got gone.png: No such file or directory",
        ),
        (GOOD | {"images": ["."]}, "image path must be a regular file, got ."),
        (
            _message("<image>" + "x" * 100_000),
            "the messages' text must have at most 32768 characters, got 100000; "
            "shorten it or raise data.max_prompt_chars",
        ),
        (GOOD | {"answer": 4}, 'answer must be a string, got number 4; write "4"'),
        (GOOD | {"answer": True}, 'answer must be a string, got boolean true; write "true"'),
        (GOOD | {"answer": ["red"]}, 'answer must be a string with something in it, got list ["red"]'),
        (GOOD | {"answer": ""}, 'answer must be a string with something in it, got string ""'),
        ({**GOOD, "answer": None}, "answer must be a string with something in it, got nothing"),
    ],
)
def test_manifest_names_what_is_wrong_with_a_line(tmp_path: Path, line: str | dict, reason: str) -> None:
    """A wrong line is a value with place, rule and what came; the rows around it are read."""
    manifest = Manifest(_write(tmp_path, GOOD, line, GOOD))
    rows = list(manifest)
    wrong = rows[1]
    assert isinstance(wrong, RowError)
    assert wrong.place == "train.jsonl:2"
    assert wrong.reason.startswith(reason)
    assert isinstance(rows[0], Record)
    assert isinstance(rows[2], Record)


def test_manifest_refuses_bytes_that_are_no_text(tmp_path: Path) -> None:
    """Latin-1 or a binary file: the byte and its place."""
    path = _write(tmp_path, GOOD)
    path.write_bytes(b'{"answer": "gr\xfcn"}\n')
    assert Manifest(path)[0] == RowError("train.jsonl:1", "line must be UTF-8, got byte 0xfc at 14")


def test_manifest_that_is_missing_or_empty_is_refused(tmp_path: Path) -> None:
    """The whole file is a matter of configuration, not of a row."""
    with pytest.raises(ManifestError) as missing:
        Manifest(tmp_path / "gone.jsonl")
    with pytest.raises(ManifestError) as empty:
        Manifest(_write(tmp_path, "", "  "))
    with pytest.raises(ManifestError):
        Manifest(tmp_path)
    gone = f"{tmp_path}/gone.jsonl: manifest must be a readable file, got: No such file or directory"
    assert str(missing.value) == gone
    assert str(empty.value) == (
        f"{tmp_path}/train.jsonl: manifest must have a row, got an empty file; write one JSON object on each line"
    )
