"""Real files of every format and layout: rows as they come, what is read of them, and what is refused."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from modalities.base import MediaLimits
from modalities.registry import load_modalities
from modalities.sources import read_bytes
from modalities.text import Part
from relax.data.config import SourceConfig
from relax.data.errors import ManifestError, RowError
from relax.data.manifest import Manifest, Record, check_source
from relax.data.prompts import Prompt, PromptBuilder
from relax.data.sources import open_rows
from relax.data.sources import parquet as parquet_rows
from tests.kit.media import PROFILE, picture_bytes, sound_bytes, tone, write_model_dir

GOLDEN = Path(__file__).parents[3] / "golden" / "huggingface"
"""Written by the `datasets` library 5.2.0: save_to_disk of three rows in two files, and to_parquet of the same."""

PICTURE_COLUMNS = {"prompt": "question", "answer": "label", "images": "picture"}


def _table(num_rows: int = 10) -> pa.Table:
    return pa.table(
        {
            "question": [f"Question {row}?" for row in range(num_rows)],
            "label": [f"answer {row}" for row in range(num_rows)],
            "picture": [picture_bytes() for _ in range(num_rows)],
            "unused": ["x" * 1000] * num_rows,
        }
    )


def _config(path: Path, layout: str = "columns", fields: dict[str, str] | None = None) -> SourceConfig:
    return SourceConfig(path=str(path), layout=layout, fields=PICTURE_COLUMNS if fields is None else fields)


def _good(row: Record | RowError) -> Record:
    assert isinstance(row, Record), row
    return row


@pytest.mark.parametrize("kept_bytes", [1 << 30, 1, 0])
def test_parquet_rows_come_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_bytes: int
) -> None:
    """Over files and row groups; whether groups are kept, pushed out by the next, or streamed."""
    monkeypatch.setattr(parquet_rows, "MAX_KEPT_BYTES", kept_bytes)
    monkeypatch.setattr(parquet_rows, "STREAMED_ROWS", 2)
    table = _table()
    pq.write_table(table.slice(0, 7), tmp_path / "a-0.parquet", row_group_size=3)
    pq.write_table(table.slice(7), tmp_path / "a-1.parquet", row_group_size=3)
    manifest = Manifest(_config(tmp_path))
    assert len(manifest) == 10
    for row in (9, 0, 6, 7, 3, 0):
        record = _good(manifest[row])
        assert record.answer == f"answer {row}"
        assert record.place == (f"a-0.parquet[{row}]" if row < 7 else f"a-1.parquet[{row - 7}]")
        assert record.media[0].data == picture_bytes()


def test_only_columns_of_use_are_read(tmp_path: Path) -> None:
    """A column that the layout has no name for costs nothing."""
    pq.write_table(_table(), tmp_path / "a.parquet")
    assert list(open_rows(tmp_path / "a.parquet", ["label", "gone"]).read(2)) == ["label"]


def test_data_set_saved_by_the_datasets_library_is_read() -> None:
    """Two Arrow files in order, pictures as bytes with a path, class labels by name, a placeholder or none."""
    manifest = Manifest(_config(GOLDEN / "train"))
    rows = [_good(row) for row in manifest]
    assert [row.answer for row in rows] == ["blue", "red", "green"]
    assert [row.place for row in rows] == [
        "data-00000-of-00002.arrow[0]",
        "data-00000-of-00002.arrow[1]",
        "data-00001-of-00002.arrow[0]",
    ]
    assert [row.media[0].source for row in rows[:2]] == [
        "data-00000-of-00002.arrow[0]#0 blue.png",
        "data-00000-of-00002.arrow[1]#0 red.png",
    ]
    assert rows[0].messages[0].parts[1] == Part("text", "Colour?")
    assert [part.kind for part in rows[2].messages[0].parts] == ["image", "text"]
    assert all(row.media[0].data.startswith(b"\x89PNG") for row in rows if row.media[0].data)


def test_parquet_of_the_datasets_library_is_read_as_messages() -> None:
    """Chat messages as lists of structs whose picture is a column of its own; the score is no answer."""
    manifest = Manifest(
        _config(
            GOLDEN / "pictures.parquet",
            "messages",
            {"messages": "chat", "answer": "label", "images": "picture"},
        )
    )
    record = _good(manifest[1])
    assert [part.kind for part in record.messages[0].parts] == ["image", "text"]
    assert (record.answer, record.media[0].source) == ("green", "pictures.parquet[1]#0 green.png")
    scored = Manifest(_config(GOLDEN / "pictures.parquet", fields={**PICTURE_COLUMNS, "answer": "score"}))
    assert scored[0] == RowError(
        "pictures.parquet[0]", 'answer must be a string, got number 0.5; write "0.5"'
    )


def test_prompts_are_built_from_bytes_in_columns(tmp_path: Path) -> None:
    """Up to token ids and encoded media; one over the limit or broken costs its row."""
    write_model_dir(tmp_path / "model")
    limits = MediaLimits(max_bytes=5000)
    builder = PromptBuilder(tmp_path / "model", load_modalities(PROFILE, limits), max_prompt_tokens=512)
    table = pa.table(
        {
            "prompt": ["A?", "B?", "C?"],
            "answer": ["a", "b", "c"],
            "images": [[picture_bytes()], [b"no picture"], [b"x" * 5001]],
            "audios": [[sound_bytes(tone(0.02))], [], None],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    built = [
        row if isinstance(row, RowError) else builder.build(row)
        for row in Manifest(_config(tmp_path / "a.parquet", fields={}), name="mine")
    ]
    assert isinstance(built[0], Prompt), built[0]
    assert (built[0].modality, built[0].source) == ("audio+image", "mine")
    assert built[0].media_paths == ("a.parquet[0]#0", "a.parquet[0]#1")
    assert "a.parquet[0]#0" in built[0].messages
    assert "a.parquet[1]#0" in str(built[1])
    assert "file must have at most 5000 bytes, got 5001" in str(built[2])


@pytest.mark.parametrize("typed", [False, True])
def test_sharegpt_turns_become_messages(tmp_path: Path, typed: bool) -> None:
    """The last turn of gpt is the answer, unless the row has one."""
    (tmp_path / "a.png").write_bytes(picture_bytes())
    turns = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "<image>\nWhat?"},
        {"from": "gpt", "value": "red"},
    ]
    rows: list[dict[str, Any]] = [
        {"conversations": turns, "images": ["a.png"], "solution": None},
        {"conversations": turns, "images": ["a.png"], "solution": "dark red"},
        {"conversations": [{"from": "robot", "value": "hi"}], "images": None, "solution": "a"},
        {"conversations": [], "images": [], "solution": "a"},
    ]
    path = tmp_path / ("a.parquet" if typed else "a.jsonl")
    if typed:
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    manifest = Manifest(_config(path, "sharegpt", {"answer": "solution"}))
    first, second = _good(manifest[0]), _good(manifest[1])
    assert (first.answer, second.answer) == ("red", "dark red")
    assert [message.role for message in first.messages] == ["system", "user"]
    assert first.media[0].source == "a.png"
    assert "conversations[0] must be an object whose from is one of system, human" in str(manifest[2])
    assert "conversations must be a list with at least one turn, got list []" in str(manifest[3])


def test_openai_parts_are_read(tmp_path: Path) -> None:
    """image_url and input_audio, beside parts of ours; media by data URI and by path in one message."""
    picture = base64.b64encode(picture_bytes()).decode()
    sound = base64.b64encode(sound_bytes(tone())).decode()
    (tmp_path / "b.png").write_bytes(picture_bytes())
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
        {"type": "text", "text": "then"},
        {"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}},
        {"type": "image", "image": {"path": "b.png", "bytes": None}},
    ]
    row = {"messages": [{"role": "user", "content": content}], "answer": "a"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    record = _good(Manifest(tmp_path / "a.jsonl")[0])
    assert [ref.modality for ref in record.media] == ["image", "audio", "image"]
    data = [read_bytes(ref.source, base_dir=tmp_path, limits=MediaLimits()) for ref in record.media]
    assert data == [picture_bytes(), sound_bytes(tone()), picture_bytes()]


def test_parts_hold_bytes_in_typed_columns(tmp_path: Path) -> None:
    """A list of structs, where a part without media has nulls."""
    picture = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    part = pa.struct([("type", pa.string()), ("text", pa.string()), ("image", picture)])
    message = pa.struct([("role", pa.string()), ("content", pa.list_(part))])
    parts = [
        {"type": "text", "text": "What is", "image": None},
        {"type": "image", "text": None, "image": {"bytes": picture_bytes(), "path": None}},
    ]
    rows = [
        [{"role": "user", "content": parts}],
        [{"role": "user", "content": [*parts[:1], {"type": "image"}]}],
    ]
    table = pa.table({"messages": pa.array(rows, pa.list_(message)), "answer": ["a", "b"]})
    pq.write_table(table, tmp_path / "a.parquet")
    manifest = Manifest(_config(tmp_path / "a.parquet", "messages", {}))
    assert _good(manifest[0]).media[0].data == picture_bytes()
    assert "images must hold one path for each <image>" in str(manifest[1])


def test_fields_reach_into_objects(tmp_path: Path) -> None:
    """A dot in a column's name, in JSON and in Parquet; whole numbers of a typed column are their digits."""
    rows = [{"prompt": "1 + 1?", "reward_model": {"ground_truth": "2"}}]
    (tmp_path / "a.jsonl").write_text(json.dumps(rows[0]))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        manifest = Manifest(_config(tmp_path / name, fields={"answer": "reward_model.ground_truth"}))
        assert _good(manifest[0]).answer == "2"
    pq.write_table(pa.table({"prompt": ["1 + 1?"], "answer": [2]}), tmp_path / "b.parquet")
    assert _good(Manifest(_config(tmp_path / "b.parquet", fields={}))[0]).answer == "2"


@pytest.mark.parametrize(
    ("column", "values", "reason"),
    [
        ("prompt", [None, "x"], "prompt must be a string with something in it, got nothing"),
        ("answer", ["", "x"], 'answer must be a string with something in it, got string ""'),
        ("images", [[None], []], "images must be a list of paths, got list [null]"),
        ("images", [["gone.png"], []], "image path must be a file, got gone.png: No such file or directory"),
        ("audios", [["<", "<"], []], "audio path must be a file, got <: No such file or directory"),
    ],
)
def test_broken_row_of_columns_costs_itself(tmp_path: Path, column: str, values: list, reason: str) -> None:
    """Its place and the rule; the next row is read."""
    table = {"prompt": ["a?", "b?"], "answer": ["a", "b"], column: values}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    manifest = Manifest(_config(tmp_path / "a.parquet", fields={}))
    assert manifest[0] == RowError("a.parquet[0]", reason)
    assert isinstance(manifest[1], Record)


def test_damaged_row_group_costs_its_rows(tmp_path: Path) -> None:
    """Bytes changed inside one group of a file that opens well."""
    path = tmp_path / "a.parquet"
    pq.write_table(_table(), path, row_group_size=5, compression="zstd", use_dictionary=False)
    start = pq.ParquetFile(path).metadata.row_group(0).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[start : start + 60] = b"\xff" * 60
    path.write_bytes(content)
    manifest = Manifest(_config(path))
    assert "row group 0 must be readable" in str(manifest[0])
    assert isinstance(manifest[7], Record)


def _copy_golden(tmp_path: Path) -> Path:
    return shutil.copytree(GOLDEN / "train", tmp_path / "train")


def test_source_that_cannot_be_used_is_refused_whole(tmp_path: Path) -> None:
    """Missing, of no known format, a directory of splits, damaged, empty, or without a column that is needed."""
    (tmp_path / "a.csv").write_text("a,b\n")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing")
    pq.write_table(_table(0), tmp_path / "empty.parquet")
    pq.write_table(_table(1), tmp_path / "good.parquet")
    (tmp_path / "none").mkdir()
    torn = _copy_golden(tmp_path)
    (torn / "data-00001-of-00002.arrow").write_bytes(b"no Arrow")
    away = shutil.copytree(GOLDEN / "train", tmp_path / "away")
    (away / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../train/x.arrow"}]}))
    modalities = load_modalities(PROFILE, MediaLimits())
    cases = [
        (_config(tmp_path / "gone.parquet"), "where there is none"),
        (_config(tmp_path / "a.csv"), "got suffix '.csv'"),
        (_config(tmp_path / "none"), "got a directory with neither"),
        (_config(GOLDEN), f"must be one split, got a directory of ['train']; name {GOLDEN}/SPLIT"),
        (_config(tmp_path / "a.parquet"), "must be a Parquet file, got"),
        (_config(tmp_path / "empty.parquet"), "must have a row, got an empty file"),
        (_config(torn), "data-00001-of-00002.arrow: must be an Arrow stream file, got"),
        (_config(away), "_data_files must be names in the directory, got ['../train/x.arrow']"),
        (
            _config(tmp_path / "good.parquet", fields={"prompt": "question"}),
            "column 'answer' must be there for answer with layout columns, got columns question, label",
        ),
        (_config(tmp_path / "good.parquet", fields={**PICTURE_COLUMNS, "audios": "sound"}), "column 'sound'"),
        (
            _config(tmp_path / "good.parquet", fields={"smells": "picture"}),
            "fields: names must be of prompt,",
        ),
    ]
    for config, words in cases:
        with pytest.raises(ManifestError) as caught:
            check_source(config, modalities)
        assert words in str(caught.value)


def test_directory_of_parquet_files_must_agree(tmp_path: Path) -> None:
    """The same columns in every file."""
    pq.write_table(_table(), tmp_path / "a.parquet")
    pq.write_table(_table().drop(["label"]), tmp_path / "b.parquet")
    with pytest.raises(ManifestError, match=r"b\.parquet: must have the columns of a\.parquet"):
        Manifest(_config(tmp_path))
