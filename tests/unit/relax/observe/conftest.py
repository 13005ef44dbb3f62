"""A small recorded run, made up from a seed, with all that the observing side reads."""

from __future__ import annotations

import io
import math
import struct
import wave
import zlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from relax.observe.metrics import MetricsWriter, metric_rows
from relax.observe.recorder import RolloutRecorder, write_table

NUM_VERSIONS, ROWS_PER_VERSION, NUM_LAYERS, TOP_K, NUM_EXPERTS = 12, 24, 2, 2, 8
ANSWERS = {"image": "red", "audio": "high", "video": "left"}
START = datetime(2026, 1, 1, tzinfo=UTC)


def png_bytes(rgb: tuple[int, int, int], side_px: int = 24) -> bytes:
    """A picture of one colour."""
    rows = (b"\0" + bytes(rgb) * side_px) * side_px

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", side_px, side_px, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def wav_bytes(pitch_hz: float = 440.0, rate_hz: int = 8000) -> bytes:
    """Half a second of a tone."""
    wave_file = io.BytesIO()
    with wave.open(wave_file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate_hz)
        tone = 9000 * np.sin(2 * math.pi * pitch_hz * np.arange(rate_hz // 2) / rate_hz)
        out.writeframes(tone.astype("<i2").tobytes())
    return wave_file.getvalue()


def make_rollouts(version: int, num_rows: int = ROWS_PER_VERSION, *, first: int = 0) -> pa.Table:
    """Rows of table `rollouts` as the recorder takes them, some text-only ones without routing."""
    random = np.random.default_rng([version, first])
    rows = []
    for index in range(first, first + num_rows):
        modality = list(ANSWERS)[index % 3]
        right = random.random() < 0.3 + 0.6 * version / NUM_VERSIONS
        text = ANSWERS[modality] if right else ("blue" if random.random() < 0.7 else "?!")
        num_prompt, num_new = 5, int(random.integers(1, 4))
        age = int(random.integers(0, min(version, 2) + 1))
        shape = (num_prompt + num_new - 1, NUM_LAYERS, TOP_K)
        experts = random.integers(0, NUM_EXPERTS, shape).astype(np.uint8)
        logprobs = -random.random(num_new).astype(np.float32)
        group = f"0-{version}-{index // 8}"
        rows.append(
            {
                "row_id": version * 1000 + index,
                "uid": f"{group}/{index}",
                "group_id": group,
                "attempt": 1,
                "prompt_index": index // 8,
                "epoch": 0,
                "modality": modality,
                "prompt_text": f"What is this? <{modality}>",
                "prompt_token_ids": list(range(num_prompt)),
                "completion_token_ids": random.integers(0, 512, num_new).tolist(),
                "completion_text": text,
                "rollout_logprobs": logprobs.tolist(),
                "token_policy_versions": [version - age] * num_new,
                "policy_version_start": version - age,
                "policy_version_end": version - age,
                "routed_experts": experts.tolist() if index % 7 else None,
                "reward": float(right),
                "reference_answer": ANSWERS[modality],
                "finish_reason": "stop" if text != "?!" else "length",
                "temperature": 1.0,
                "seed": index,
                "rollout_worker": "rollout-0",
                "generate_s": float(random.random()),
                "media_paths": [f"media/{modality}.bin"],
                "created_at": START + timedelta(seconds=2.0 * version + index / num_rows),
                "advantages": [float(right) - 0.5] * num_new,
                "trainer_logprobs": (logprobs - 0.01).tolist(),
                "importance_ratio": float(np.exp(random.normal(0, 0.05 * age + 0.001))),
                "trained_policy_version": version,
                "optimizer_step": version + 1,
                "staleness": age,
            }
        )
    return pa.Table.from_pylist(rows, schema=ROLLOUT_SCHEMA)


def _schema() -> pa.Schema:
    tokens, floats = pa.list_(pa.int32()), pa.list_(pa.float32())
    experts = pa.list_(pa.list_(pa.list_(pa.uint8(), TOP_K), NUM_LAYERS))
    kinds = {
        pa.string(): "uid group_id modality prompt_text completion_text reference_answer finish_reason rollout_worker",
        pa.int64(): "row_id prompt_index policy_version_start policy_version_end seed trained_policy_version "
        "optimizer_step",
        pa.int32(): "attempt epoch staleness",
        pa.float32(): "reward temperature generate_s importance_ratio",
        tokens: "prompt_token_ids completion_token_ids token_policy_versions",
        floats: "rollout_logprobs advantages trainer_logprobs",
        pa.list_(pa.string()): "media_paths",
        pa.timestamp("us", tz="UTC"): "created_at",
        experts: "routed_experts",
    }
    notes = {"meaning": "made up", "unit": "unit", "shape": "[n]"}
    return pa.schema(
        [pa.field(name, kind, metadata=notes) for kind, names in kinds.items() for name in names.split()]
    )


ROLLOUT_SCHEMA = _schema()


def eval_rows(media_dir: Path) -> pa.Table:
    """Held-out answers of three evaluations; wrong ones among them, with media beside them."""
    media = {"image": ("dot.png", png_bytes((200, 40, 40))), "audio": ("tone.wav", wav_bytes())}
    media["video"] = ("clip.mp4", b"\0\0\0\x20ftypisom" + bytes(64))
    rows = []
    for modality, (name, data) in media.items():
        (media_dir / name).write_bytes(data)
        for version in (0, 6, 12):
            for index in range(8):
                right = index < 2 + version // 2 - 1
                rows.append(
                    {
                        "modality": modality,
                        "reward": float(right),
                        "completion_text": ANSWERS[modality] if right else "<script>alert('x')</script>",
                        "reference_answer": ANSWERS[modality],
                        "prompt_text": f"Question {index} about <{modality}>?",
                        "media_paths": [name if index != 6 else "gone.png"],
                        "generate_s": index / 10,
                        "policy_version_start": version,
                    }
                )
    return pa.Table.from_pylist(rows)


@pytest.fixture(scope="session")
def rollout_rows() -> Callable[..., pa.Table]:
    """The maker of rollouts: `rollout_rows(version, num_rows, first=0)`."""
    return make_rollouts


@pytest.fixture(scope="session")
def recorded_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory `runs/omni_grpo` with records, metrics and evaluations."""
    run_dir = tmp_path_factory.mktemp("work") / "runs" / "omni_grpo"
    with RolloutRecorder(run_dir / "rollouts") as recorder:
        for version in range(NUM_VERSIONS):
            recorder.write(make_rollouts(version, ROWS_PER_VERSION // 2))
            recorder.write(make_rollouts(version, ROWS_PER_VERSION // 2, first=ROWS_PER_VERSION // 2))
    with MetricsWriter(run_dir) as metrics:
        for step in range(1, NUM_VERSIONS + 1):
            for role, parts in (
                ("actor", {"train": 1.2, "wait": 0.4}),
                ("rollout", {"generate": 1.5, "score": 0.1}),
            ):
                values = {f"time/{part}_s": seconds for part, seconds in parts.items()}
                if role == "actor":
                    values |= {"logprob_difference_mean_nats": 0.01 * step, "routing_mismatch": 0.125}
                metrics.write(metric_rows(role, step, step, values, START.timestamp() + 2 * step))
    write_table(eval_rows(run_dir), run_dir / "evaluation" / "000012.parquet")
    return run_dir
