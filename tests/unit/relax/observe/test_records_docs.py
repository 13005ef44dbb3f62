"""The one-liners of docs/records.md and of the README, run as printed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow.parquet as pq
import pytest

REPO = Path(__file__).resolve().parents[4]
README_SECTION = "Read recorded rollouts"


def _blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def _run(blocks: list[str]) -> list[Any]:
    """Run the blocks in one namespace; return the value of each bare expression."""
    namespace: dict[str, Any] = {}
    values = []
    for block in blocks:
        for node in ast.parse(block).body:
            source = ast.unparse(node)
            if isinstance(node, ast.Expr):
                values.append(eval(source, namespace))  # noqa: S307
            else:
                exec(source, namespace)
    return values


def _expressions(source: str) -> list[str]:
    return [ast.dump(node.value) for node in ast.parse(source).body if isinstance(node, ast.Expr)]


@pytest.fixture
def in_work_directory(recorded_run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand where `runs/omni_grpo` is the recorded run."""
    monkeypatch.chdir(recorded_run.parents[1])
    return recorded_run.parents[1]


def test_records_page_one_liners_run_as_printed(in_work_directory: Path) -> None:
    """Each gives an answer that is not empty, in pandas and in polars."""
    values = _run(_blocks((REPO / "docs" / "records.md").read_text()))
    assert len(values) >= 8
    assert all(len(value) for value in values)
    assert {type(value) for value in values} >= {pd.DataFrame, pd.Series, pl.DataFrame}


def test_readme_one_liners_run_as_printed(in_work_directory: Path) -> None:
    """The README's section runs too, whatever name its run has."""
    pattern = rf"^#+ [0-9. ]*{README_SECTION}\n(.*?)(?=^#+ |\Z)"
    section = re.search(pattern, (REPO / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert section is not None
    for name in set(re.findall(r"runs/([\w.-]+)", section[1])) - {"omni_grpo"}:
        link = in_work_directory / "runs" / name
        if not link.exists():
            link.symlink_to(in_work_directory / "runs" / "omni_grpo")
    blocks = [block for block in _blocks(section[1]) if "flight" not in block]
    values = _run(blocks)
    assert len(values) >= 5
    assert all(len(value) for value in values)


def test_records_page_lists_every_recorded_column(recorded_run: Path) -> None:
    """A column without a line on the page fails."""
    page = (REPO / "docs" / "records.md").read_text()
    names = pq.read_schema(recorded_run / "rollouts" / "000000.parquet").names
    assert [name for name in names if f"`{name}`" not in page] == []


def test_example_script_prints_the_one_liners_of_the_page(recorded_run: Path) -> None:
    """The script holds exactly the page's lines and runs on a run directory."""
    script = REPO / "examples" / "read_rollouts.py"
    page = [
        line for block in _blocks((REPO / "docs" / "records.md").read_text()) for line in _expressions(block)
    ]
    printed = [
        ast.dump(node.value.args[0])
        for node in ast.parse(script.read_text()).body
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and not isinstance(node.value.args[0], ast.Constant)
    ]
    assert sorted(printed) == sorted(page)
    command = [sys.executable, str(script), str(recorded_run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "load of each expert\n[" in done.stdout
