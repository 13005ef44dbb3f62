"""Finding a service's own error in its log."""

from __future__ import annotations

from relax.launch.log_tail import find_error, read_tail


def test_find_error_takes_the_last_tracebacks_final_line():
    """A chained exception ends with the one that was raised last."""
    lines = [
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in <module>',
        "    1 / 0",
        "ZeroDivisionError: division by zero",
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        "Traceback (most recent call last):",
        '  File "a.py", line 3, in <module>',
        "pkg.errors.TrainingError: loss must be finite, got nan",
        "some later line",
    ]
    assert find_error(lines) == "pkg.errors.TrainingError: loss must be finite, got nan"


def test_find_error_prefers_what_comes_later():
    """An ERROR line after a handled traceback is the reason; a traceback after an ERROR line is."""
    trace = ["Traceback (most recent call last):", "  File", "ValueError: x"]
    assert find_error([*trace, "ERROR actor-0: RuntimeError: y"]) == "ERROR actor-0: RuntimeError: y"
    assert find_error(["ERROR failed", *trace]) == "ValueError: x"


def test_find_error_is_empty_without_one():
    """Ordinary lines are no error, and neither is a traceback cut off before its end."""
    assert find_error(["step 1", "no ERRORS here", ""]) == ""
    assert find_error(["Traceback (most recent call last):", "  File"]) == ""


def test_find_error_knows_the_interpreters_own_death():
    """A crash in native code is reported by faulthandler."""
    assert find_error(["Fatal Python error: Segmentation fault"]) == "Fatal Python error: Segmentation fault"


def test_read_tail_returns_whole_lines_of_the_end(tmp_path):
    """The first, cut line of a long file is left out; bytes before `start` never show."""
    path = tmp_path / "a.log"
    path.write_text("".join(f"line {number}\n" for number in range(1000)))
    assert read_tail(path, max_bytes=20) == ["line 998", "line 999"]
    assert read_tail(path, start=path.stat().st_size) == []
    assert read_tail(path, start=path.stat().st_size - 9) == ["line 999"]


def test_read_tail_of_a_missing_or_binary_file(tmp_path):
    """No file is no line; other bytes are replaced."""
    assert read_tail(tmp_path / "none.log") == []
    (tmp_path / "b.log").write_bytes(b"\xff\xfeok\n")
    assert read_tail(tmp_path / "b.log") == ["\ufffd\ufffdok"]
