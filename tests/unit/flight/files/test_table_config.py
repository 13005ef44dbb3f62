"""Tables declared in YAML."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from flight.errors import InvalidRequestError
from flight.files.table_config import ServerConfig, load_config, load_tables
from flight.journal.config import JournalConfig
from flight.schema import Column, ConsumerSpec, StalenessSpec, TableSpec, TicketSpec

GOOD = """\
tables:
  prompts:
    columns:
      text: {type: string, meaning: the question, writer: preprocess}
    consumers:
      rollout: {columns: [text]}
      actor: {columns: [text], sampler: keyed}
    tickets: {table: rollouts, rows_per_ticket: 2}
  rollouts:
    columns:
      policy_version_start: {type: int64, meaning: weights that wrote it, unit: policy versions}
      tokens: {type: list<int32>, meaning: the answer, shape: [num_tokens], nullable: true}
    consumers:
      actor: {columns: [tokens, uid], sampler: groups}
    group_size: 2
    staleness: {max_staleness: 1, rows_per_version: 4, consumer: actor, policy: drop}
    capacity_rows: 64
    capacity_bytes: 16 MiB
"""


def write(folder: Path, text: str) -> Path:
    """Return a file with a text."""
    path = folder / "tables.yaml"
    path.write_text(text)
    return path


def refusal(folder: Path, text: str) -> str:
    """Return what is said about a file, without its folder."""
    with pytest.raises(InvalidRequestError) as caught:
        load_tables(write(folder, text))
    return str(caught.value).replace(f"{folder}/", "")


def test_load_tables_reads_every_field(tmp_path):
    """Columns and consumers by name; defaults are those of the classes."""
    assert load_tables(write(tmp_path, GOOD)) == [
        TableSpec(
            name="prompts",
            columns=(Column(name="text", type=pa.string(), meaning="the question", writer="preprocess"),),
            consumers=(
                ConsumerSpec(name="rollout", columns=("text",)),
                ConsumerSpec(name="actor", columns=("text",), sampler="keyed"),
            ),
            tickets=TicketSpec(table="rollouts", rows_per_ticket=2),
        ),
        TableSpec(
            name="rollouts",
            columns=(
                Column(
                    name="policy_version_start",
                    type=pa.int64(),
                    meaning="weights that wrote it",
                    unit="policy versions",
                ),
                Column(
                    name="tokens",
                    type=pa.list_(pa.int32()),
                    meaning="the answer",
                    shape="[num_tokens]",
                    nullable=True,
                ),
            ),
            consumers=(ConsumerSpec(name="actor", columns=("tokens", "uid"), sampler="groups"),),
            group_size=2,
            staleness=StalenessSpec(max_staleness=1, rows_per_version=4, consumer="actor", policy="drop"),
            capacity_rows=64,
            capacity_bytes=16 << 20,
        ),
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "type: int64",
            "type: int46",
            "tables.yaml:11: table 'rollouts': column 'policy_version_start': type must be the name of an Arrow type, "
            "got 'int46'; did you mean 'int64'?",
        ),
        (
            "sampler: keyed",
            "sampler: keyd",
            "tables.yaml:7: table 'prompts': consumer 'actor': sampler must be one of ",
        ),
        (
            "columns: [tokens, uid]",
            "columns: [token]",
            "tables.yaml:14: table 'rollouts': consumer 'actor': columns must be among "
            "['policy_version_start', 'tokens'], got 'token'; did you mean 'tokens'?",
        ),
        (
            "group_size: 2",
            "groupsize: 2",
            "tables.yaml:15: table 'rollouts': key must be one of columns, consumers, group_size, ",
        ),
        (
            "meaning: the question, ",
            "",
            "tables.yaml:4: table 'prompts': column 'text': meaning must be given, got nothing",
        ),
        (
            "group_size: 2",
            "group_size: two",
            "tables.yaml:15: table 'rollouts': group_size must be an integer, got 'two'",
        ),
        (
            "consumer: actor",
            "consumer: acter",
            "tables.yaml:16: table 'rollouts': staleness: consumer must be one of ['actor'], got 'acter'; "
            "did you mean 'actor'?",
        ),
        (
            "table: rollouts",
            "table: rollout",
            "tables.yaml:8: table 'prompts': tickets: table must be one of ['prompts', 'rollouts'], got 'rollout'; "
            "did you mean 'rollouts'?",
        ),
        (
            "16 MiB",
            "16 mib",
            "tables.yaml:18: table 'rollouts': capacity_bytes must be bytes, or a number and one of ",
        ),
        (
            "rows_per_version: 4",
            "rows_per_version: 3",
            "tables.yaml:9: table 'rollouts': rows_per_version must be a multiple of group_size 2, got 3",
        ),
        (
            "  rollouts:",
            "  prompts:",
            "tables.yaml:9: file must be valid YAML, got: keys must be given once, ",
        ),
        (
            "tables:",
            "table:",
            "tables.yaml:1: file: key must be one of server, tables, got 'table'; did you mean 'tables'?",
        ),
        ("tables:", "tables: [", "tables.yaml:3: file must be valid YAML, got: "),
        ("nullable: true", "nullable: perhaps", "nullable must be true or false, got 'perhaps'"),
        (
            "type: string",
            "type: !!python/name:os.system ''",
            "tables.yaml:4: file must be valid YAML, got: could not determine",
        ),
    ],
)
def test_load_tables_names_file_line_table_rule_and_nearest_choice(tmp_path, old, new, message):
    """Every mistake says where it is and what is meant."""
    assert old in GOOD
    assert message in refusal(tmp_path, GOOD.replace(old, new, 1))


def test_load_config_reads_the_settings_of_the_server(tmp_path):
    """What belongs to no table."""
    tables = tuple(load_tables(write(tmp_path, GOOD)))
    assert load_config(tmp_path / "tables.yaml") == ServerConfig(tables=tables)
    text = GOOD + (
        "server: {capacity_bytes: 1.5 GiB, spill_dir: /tmp/spill, journal: {directory: /tmp/j, limit_bytes: 1 GiB}}\n"
    )
    assert load_config(write(tmp_path, text)) == ServerConfig(
        tables=tables,
        capacity_bytes=3 << 29,
        spill_dir="/tmp/spill",
        journal=JournalConfig(directory="/tmp/j", limit_bytes=1 << 30),
    )
    assert (
        refusal(tmp_path, GOOD + "server: {capacity: 1}\n")
        == "tables.yaml:19: file: server: key must be one of capacity_bytes, spill_dir, journal, got 'capacity'; "
        "did you mean 'capacity_bytes'?"
    )
    assert "capacity_bytes must be positive, got 0" in refusal(
        tmp_path, GOOD + "server: {capacity_bytes: 0}\n"
    )


def test_load_tables_lets_tickets_name_tables_that_exist(tmp_path):
    """A file may add prompts for a table that is on the server already."""
    text = GOOD[: GOOD.index("  rollouts:\n")]
    assert "got 'rollouts'" in refusal(tmp_path, text)
    assert load_tables(tmp_path / "tables.yaml", known_tables=["rollouts"])[0].name == "prompts"


def test_load_tables_understands_anchors(tmp_path):
    """A merge key takes over what is not said again."""
    text = (
        "tables:\n  a: &a\n    columns: {x: {type: int8, meaning: one}}\n    consumers: {c: {columns: [x]}}\n"
        "  b:\n    <<: *a\n    group_size: 2\n"
    )
    assert [(spec.name, spec.group_size) for spec in load_tables(write(tmp_path, text))] == [
        ("a", 1),
        ("b", 2),
    ]


@pytest.mark.parametrize("text", ["", "[]", "tables:", "tables: {}", "tables: {a: 1}", "a: &a {b: *a}"])
def test_load_tables_refuses_what_declares_nothing(tmp_path, text):
    """No table is a mistake, too."""
    assert refusal(tmp_path, text).startswith("tables.yaml")


def test_load_tables_refuses_a_file_that_is_not_there(tmp_path):
    """The way out is in the message of the system."""
    with pytest.raises(InvalidRequestError, match="file must be readable text, got: "):
        load_tables(tmp_path / "nothing.yaml")


def test_column_may_refer_to_a_table_whose_rows_nobody_takes(tmp_path):
    """`consumers: {}` says that there are none; a table that is not there is refused with the nearest one."""
    path = tmp_path / "tables.yaml"
    text = """
tables:
  media:
    columns: {data: {type: binary, meaning: bytes}}
    consumers: {}
  prompts:
    columns:
      media_ids: {type: list<string>, meaning: media, references: media}
    consumers: {rollout: {columns: [media_ids]}}
"""
    path.write_text(text)
    media, prompts = load_tables(path)
    assert media.consumers == ()
    assert prompts.references() == ["media"]
    path.write_text(text.replace("references: media", "references: medai"))
    with pytest.raises(InvalidRequestError) as caught:
        load_tables(path)
    assert str(caught.value) == (
        f"{path}:8: table 'prompts': column 'media_ids': references must be one of ['media', 'prompts'], got 'medai'; "
        "did you mean 'media'?"
    )
    path.write_text(text.replace("list<string>", "int64"))
    with pytest.raises(
        InvalidRequestError, match="references of column 'media_ids' must be another table's name, on"
    ):
        load_tables(path)
