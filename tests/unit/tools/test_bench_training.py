"""The bench of the trainer: who takes turns with whom, its figures, and its place in the page."""

from __future__ import annotations

import sys
from pathlib import Path

import polars as pl
import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _tools_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tool be imported as it is when it runs, and leave the path as it was."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])


def test_take_turns_gives_all_the_same_batch_and_another_the_first_turn() -> None:
    """One round to warm up, then each round's batch by every action, and as many times as rounds."""
    from bench_training import take_turns

    calls: list[tuple[str, str]] = []
    actions = {name: lambda batch, name=name: calls.append((name, batch)) for name in ("a", "b")}
    seconds = take_turns(actions, ["x", "y"], 3)
    assert calls[2:] == [("a", "x"), ("b", "x"), ("b", "y"), ("a", "y"), ("a", "x"), ("b", "x")]
    assert {name: len(each) for name, each in seconds.items()} == {"a": 3, "b": 3}


def test_overhead_is_the_median_of_neighbours() -> None:
    """A slow moment that hits both does not count."""
    from bench_training import overhead

    row = overhead("step", [1.02, 10.1, 1.01], [1.0, 10.0, 1.0])
    assert row == ["step", "3", "1000", "1020", "+1.0 (+1.0 to +2.0)"]


def test_step_s_adds_up_what_the_actor_did(tmp_path: Path) -> None:
    """Waiting included, the first steps and other roles left out."""
    from bench_training import FIRST_STEPS, step_s

    rows = [
        {"step": step, "role": role, "name": name, "value": value}
        for step in range(1, FIRST_STEPS + 4)
        for role, name, value in (
            ("actor", "time/train_s", 9.0 if step <= FIRST_STEPS else 0.3),
            ("actor", "time/wait_s", 0.2),
            ("actor", "loss", 5.0),
            ("rollout", "time/generate_s", 7.0),
        )
    ]
    pl.DataFrame(rows).write_parquet(tmp_path / "metrics.parquet")
    assert step_s(tmp_path) == pytest.approx(0.5)


def test_benchmarks_page_has_the_markers() -> None:
    """The tool finds the place of its tables, and leaves the rest alone."""
    from busbench.report import replace_block, table

    page = (ROOT / "BENCHMARKS.md").read_text()
    written = replace_block(page, table(["a", "b"], [["1", "2"]]), "bench_training")
    assert "<!-- bench_training -->\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n<!-- /bench_training -->" in written
    assert written.split("<!-- bench_training -->")[0] == page.split("<!-- bench_training -->")[0]
