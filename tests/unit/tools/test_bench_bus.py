"""The bench of the bus: its figures, its page, and one small real round whose bytes must arrive."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _tools_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tool's parts be imported as they are when it runs."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


def _round(put_s: float, take_s: float) -> dict[str, object]:
    return {"put_s": [put_s] * 3, "take_s": [take_s] * 3, "cpu_s": 0.3, "server_cpu_s": 0.1}


def test_summarize_gives_median_and_range() -> None:
    """The middle of an even number of values is between two of them."""
    from busbench.report import summarize

    summary = summarize([4.0, 1.0, 2.0, 3.0])
    assert (summary.median, summary.low, summary.high) == (2.5, 1.0, 4.0)
    assert summary.text() == "2.5 (1 to 4)"


def test_summarize_refuses_nothing() -> None:
    """Without values there is no median."""
    from busbench.report import summarize

    with pytest.raises(ValueError, match=r"^summarize: values must be at least one, got none$"):
        summarize([])


@pytest.mark.parametrize(("percent", "expected"), [(50, 50), (99, 99), (100, 100), (0, 1)])
def test_percentile_is_one_of_the_values(percent: float, expected: int) -> None:
    """Nearest rank: no value is invented."""
    from busbench.report import percentile

    assert percentile(range(100, 0, -1), percent) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [(0, "0"), (0.012345, "0.0123"), (9.996, "10"), (123.4, "123"), (45678.0, "45700")]
)
def test_number_has_three_digits_and_no_exponent(value: float, expected: str) -> None:
    """Figures can be read at a glance."""
    from busbench.report import number

    assert number(value) == expected


def test_ratios_are_of_the_same_round() -> None:
    """A slow moment of the machine hits both sides of a ratio."""
    from busbench.report import ratios

    assert ratios([_round(2.0, 2.0), _round(8.0, 0.0)], [_round(1.0, 1.0), _round(1.0, 1.0)]) == [2.0, 4.0]


def test_moved_table_compares_with_ours_and_names_who_is_missing() -> None:
    """A row a system; what was skipped is said with its reason."""
    from busbench.report import markdown
    from busbench.rounds import Result

    result = Result("b", "(b) pixel tensors: 2 rows", 1_000_000, 2, 0.5)
    result.samples = {"ours_tcp": [_round(0.001, 0.001)], "transferqueue": [_round(0.003, 0.003)]}
    result.peak_bytes = {"ours_tcp": 1_500_000}
    result.skipped = {"ours_shm": "not there yet"}
    lines = markdown([result]).splitlines()
    assert lines[2].startswith("| **(b) pixel tensors: 2 rows, 1.0 MB, scale 0.5** |")
    assert lines[3] == "| ours, TCP | 1 | 1 | 2 (2 to 2) |  | 100 | 1.5 |"
    assert lines[4] == "| TransferQueue | 3 | 3 | 6 (6 to 6) | 3 (3 to 3) | 100 | - |"
    assert lines[-1] == "Skipped in b: ours, shared memory: not there yet"


def test_replace_block_keeps_the_rest_of_the_page() -> None:
    """Only what is between the markers changes; doing it again changes nothing."""
    from busbench.report import replace_block

    page = "# A\n\n<!-- bench_bus -->\nold\n<!-- /bench_bus -->\n\nlast\n"
    once = replace_block(page, "new\n")
    assert once == "# A\n\n<!-- bench_bus -->\n\nnew\n\n<!-- /bench_bus -->\n\nlast\n"
    assert replace_block(once, "new") == once


def test_replace_block_refuses_a_page_without_markers() -> None:
    """It says what to add."""
    from busbench.report import replace_block

    with pytest.raises(ValueError, match="it must have <!-- bench_bus --> and then <!-- /bench_bus -->"):
        replace_block("# A\n", "new")


def test_benchmarks_page_has_the_markers() -> None:
    """`make bench` finds the place of its table."""
    from busbench.report import replace_block

    assert "x" in replace_block((ROOT / "BENCHMARKS.md").read_text(), "x")


@pytest.mark.parametrize("name", "abcdefg")
def test_workload_survives_its_files(name: str, tmp_path: Path) -> None:
    """What a worker maps is what was made, row lengths and values."""
    from busbench import workloads as w

    workload = w.make(name, 0.01)
    w.write(workload, tmp_path)
    mapped = w.load(name, tmp_path, workload.group_size)
    assert w.source_digest(mapped) == w.source_digest(workload)
    assert mapped.nbytes == workload.nbytes


def test_digest_sees_where_a_row_ends_but_not_where_a_batch_does() -> None:
    """The same values in other rows are other data; in other batches they are not."""
    import pyarrow as pa
    from busbench.workloads import table_digest

    def of(*pieces: list[list[int]]) -> str:
        column = pa.chunked_array([pa.array(piece, pa.list_(pa.int32())) for piece in pieces])
        return table_digest({"rows": pa.table({"x": column})}, {"rows": ["x"]})

    assert of([[1, 2], [3]]) == of([[1, 2]], [[3]])
    assert of([[1, 2], [3]]) != of([[1], [2, 3]])


def test_every_system_without_an_environment_delivers_the_same_bytes(tmp_path: Path) -> None:
    """One real round, groups with shared media: each worker checks the hash, a wrong one would be skipped."""
    from busbench import rounds
    from busbench import workloads as w

    pythons = {name: Path(sys.executable) for name in ("ours_tcp", "flight", "zmq", "memcpy")}
    plan = rounds.Plan(rounds=1, repeats=1)
    result = rounds.measure(w.make("d", 0.25), pythons, plan, 0.25, tmp_path)
    assert result.skipped == {}
    assert {system: len(found) for system, found in result.samples.items()} == dict.fromkeys(pythons, 1)


def test_single_rows_over_open_streams_deliver_the_same_bytes(tmp_path: Path) -> None:
    """Beside calls, in the same round."""
    from busbench import rounds
    from busbench import workloads as w

    pythons = {name: Path(sys.executable) for name in ("ours_stream", "ours_tcp")}
    result = rounds.measure(w.make("e"), pythons, rounds.Plan(rounds=1, repeats=3), 1.0, tmp_path)
    assert result.skipped == {}
    assert [len(found[0]["take_s"]) for found in result.samples.values()] == [3, 3]


def test_a_worker_that_cannot_start_is_skipped_with_its_reason(tmp_path: Path) -> None:
    """The others go on; nobody waits for it."""
    from busbench import rounds
    from busbench import workloads as w

    pythons: dict[str, Path | str] = {"nobody": Path(sys.executable), "ray": "not installed"}
    result = rounds.measure(w.make("e"), pythons, rounds.Plan(rounds=1, repeats=1), 1.0, tmp_path)
    assert result.samples == {}
    assert result.skipped["ray"] == "not installed"
    assert "system must be one of" in result.skipped["nobody"]


def test_draw_writes_a_chart_of_what_was_measured(tmp_path: Path) -> None:
    """A file for the page, also where memcpy is not among the systems."""
    from busbench.report import draw
    from busbench.rounds import Result

    result = Result("a", "(a) rows", 1000, 2, 1.0, samples={"ours_tcp": [_round(0.1, 0.2)]})
    draw([result], tmp_path / "charts" / "bus.svg")
    assert "<svg" in (tmp_path / "charts" / "bus.svg").read_text()


def test_tables_of_latency_sizes_and_clients_have_a_row_a_system() -> None:
    """Percentiles are over all rounds; sizes and numbers of clients are read off the labels."""
    from busbench.report import markdown
    from busbench.rounds import Result

    single = Result("e", "(e) single rows", 8000, 1, 1.0, samples={"zmq": [_round(0.001, 0.002)]})
    sizes = Result(
        "f", "(f) rows in the table", 80, 1, 1.0, samples={"ours_tcp 1000": [_round(0.001, 0.002)]}
    )
    sizes.fill_s = {"ours_tcp 1000": 0.1}
    crowd = Result("g", "(g) clients", 8000, 64, 1.0)
    crowd.samples = {f"flight {count}": [{"rows_per_s": 1000.0 * count}] for count in (1, 2)}
    page = markdown([single, sizes, crowd])
    assert "| ZeroMQ raw frames | 3 | 1 | 1 | 2 | 2 |" in page
    assert "| ours, TCP | 1,000 | 1 | 2 | 2 | 33 | 10,000 |" in page
    assert "| system | 1 client | 2 clients |" in page
    assert "| bare pyarrow Flight | 1,000 (1,000 to 1,000) | 2,000 (2,000 to 2,000) |" in page
