"""What bad input does to a run: it costs its rows, is counted and named, and never hangs."""

from __future__ import annotations

import json
import struct
import subprocess
import zlib
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.kit.job import ENTRY, PROMPTS_PER_STEP, half_written, start_job
from tests.kit.media import film_bytes, tone


def line(kind: str, source: object, answer: object = "red", question: str = "What is it?") -> str:
    """Return a manifest line with one media file."""
    return json.dumps(
        {
            "messages": [{"role": "user", "content": f"<{kind}>{question}"}],
            f"{kind}s": [str(source)],
            "answer": answer,
        }
    )


def png_header(width: int, height: int) -> bytes:
    """Return a PNG that promises that size and has no picture."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.fixture(scope="module")
def broken(tmp_path_factory) -> dict[str, tuple[str, str]]:
    """Broken manifest lines by name, each with words that its row error has to have."""
    home = tmp_path_factory.mktemp("broken")
    (home / "torn.jpg").write_bytes(b"\xff\xd8\xff\xe0\x00\x10JFIF\x00\x01 and then nothing of the kind")
    (home / "empty.wav").write_bytes(b"")
    (home / "sound_only.mp4").write_bytes(film_bytes(picture=False, sound=tone(1.0)))
    (home / "vast.png").write_bytes(png_header(10_000, 10_000))
    (home / "fine.wav").write_bytes(b"")
    return {
        "broken JPEG": (line("image", home / "torn.jpg"), "torn.jpg"),
        "zero-byte WAV": (line("audio", home / "empty.wav"), "empty.wav"),
        "MP4 without video": (line("video", home / "sound_only.mp4"), "sound_only.mp4"),
        "100-megapixel PNG": (line("image", home / "vast.png"), "vast.png"),
        "no JSON": ("this is not JSON", "JSON"),
        "missing path": (line("image", home / "nowhere.png"), "nowhere.png"),
        "long question": (line("image", home / "vast.png", question="why? " * 20_000), "100000"),
        "answer of a wrong type": (line("image", home / "vast.png", answer=5), "answer must be a string"),
    }


def write_manifest(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("".join(f"{each}\n" for each in lines))
    return path


def good_lines(job_home: Path) -> list[str]:
    """Return the toy manifest's lines with absolute paths."""
    words = (job_home / "toy" / "train.jsonl").read_text().replace('"train/', f'"{job_home}/toy/train/')
    return words.splitlines()


@pytest.mark.slow
def test_broken_rows_cost_themselves_only(job_home, tmp_path, broken):
    """Eight kinds of broken rows among good ones, and a held-out set of broken ones: the run does its steps, and each
    row is one named error in the output, in row_errors.parquet and in the report.
    """
    good = good_lines(job_home)[:6]
    mixed = [each for pair in zip(good, [text for text, _ in broken.values()], strict=False) for each in pair]
    rest = [text for text, _ in broken.values()][len(good) :]
    train = write_manifest(tmp_path / "rows.jsonl", [*mixed, *rest])
    (tmp_path / "held_out").mkdir()
    held_out = write_manifest(tmp_path / "held_out" / "rows.jsonl", ["[]", "{}", broken["missing path"][0]])
    words = (f"data.manifest={train}", f"data.eval.broken={held_out}", f"model.path={job_home}/model")
    with start_job(tmp_path, *words) as job:
        assert job.wait() == 0, job.describe()
    assert job.last_line == (
        "ended: all steps done; the last evaluation had no held-out prompt that could be used"
    )
    errors = pq.read_table(job.run_dir / "row_errors.parquet").to_pylist()
    assert len(errors) == len(broken) + 3, errors
    assert {error["stage"] for error in errors} == {"preprocess"}
    manifest = train.read_text().splitlines()
    report = (job.run_dir / "report.html").read_text()
    for kind, (text, words_of_reason) in broken.items():
        place = f"rows.jsonl:{manifest.index(text) + 1}"
        reasons = [error["reason"] for error in errors if error["place"] == place]
        assert any(words_of_reason in reason for reason in reasons), (kind, place, reasons)
        assert all(len(reason) < 500 for reason in reasons), kind
        assert place in report, kind
    assert "11 rows were refused; all of them: row_errors.parquet" in job.output
    assert job.output.count("  preprocess: rows.jsonl:") == 10
    rollouts = pq.read_table(job.run_dir / "rollouts")
    trained = {manifest[index] for index in rollouts["prompt_index"].to_pylist()}
    assert trained <= set(good)
    assert len(trained) >= PROMPTS_PER_STEP
    assert half_written(job.run_dir) == []


def test_manifest_of_broken_rows_only_fails_with_the_reason(job_home, tmp_path, broken):
    """No hang: the preprocess role says that there is no usable row, and the rows are listed before."""
    train = write_manifest(tmp_path / "rows.jsonl", [text for text, _ in broken.values()])
    with start_job(tmp_path, f"data.manifest={train}", f"model.path={job_home}/model") as job:
        assert job.wait(60.0) == 1, job.describe()
        assert job.all_gone(5.0)
    assert job.last_line.startswith("failed: preprocess-0 exited with code 1: ERROR HopelessError: ")
    assert f"{train} must have a usable row, got 8 broken ones; the last: rows.jsonl:" in job.last_line
    assert "8 rows were refused; all of them: row_errors.parquet" in job.output


@pytest.mark.slow
def test_held_out_prompts_that_cannot_be_scored_are_not_waited_for(start):
    """Films are refused in training and evaluation: the run ends at once and says how many answers it lacks."""
    with start("rollout.reward=my_rewards:no_film", "evaluation.deadline_s=600") as job:
        assert job.wait() == 0, job.describe()
    assert job.last_line == (
        "ended: all steps done; the last evaluation got answers to 4 of 6 held-out prompts (2 refused)"
    )
    assert set(pq.read_table(job.run_dir / "rollouts")["modality"].to_pylist()) == {"image", "audio"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["num_stepz=3"], "'num_stepz' is not a known key; did you mean 'num_steps'?"),
        (["num_steps=many"], "num_steps"),
        (["group_size=1"], "group_size: must be at least 2, got 1"),
        (["data.manifest=nowhere.jsonl"], "data.manifest: must be a .jsonl, .ndjson or .parquet file"),
        (["rollout.reward=my_rewards:quarter"], "rollout.reward: "),
        (["modalities.extra=[depth_modality.depth:Height]"], "modalities.extra: "),
        (["queue.uri=grpc://127.0.0.1:1", "data.manifest={good}", "model.path={model}"], "queue.uri: "),
    ],
)
def test_wrong_configuration_is_refused_before_anything_starts(job_home, tmp_path, words, message):
    """Exit 2 with the key and the rule in one line, and no run directory that would take the name."""
    known = {"good": job_home / "toy" / "train.jsonl", "model": job_home / "model"}
    program, environment = ENTRY
    command = [*program, "name=x", *(word.format(**known) for word in words)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "runs" / "x").exists()
