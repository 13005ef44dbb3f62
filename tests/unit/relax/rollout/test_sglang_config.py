"""Options of the SGLang engine, and the command that a server is started with."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from relax.errors import ConfigError, WiringError
from relax.rollout.sglang_config import CLONE, SGLangConfig, check_installation, checkpoint_dtype
from relax.rollout.sglang_http import ServerGoneError, SGLangClient
from relax.rollout.sglang_server import Launch, ServerFleet, launch_env, launch_words


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": "usb"}, "rollout.sglang.weights: must be one of disk, tensor, distributed, got 'usb'"),
        (
            {"pause": "stop"},
            "rollout.sglang.pause: must be one of retract, in_place, abort, wait, got 'stop'",
        ),
        ({"device": "tpu"}, "rollout.sglang.device: must be one of auto, cpu, cuda, got 'tpu'"),
        ({"tp_size": 0}, "rollout.sglang.tp_size: must be at least 1, got 0"),
    ],
)
def test_impossible_options_are_named(changes, message) -> None:
    """The key, the rule, the value."""
    with pytest.raises(ConfigError) as caught:
        SGLangConfig(**changes)
    assert str(caught.value) == message


def test_missing_environment_says_how_to_make_it(tmp_path) -> None:
    """The wiring check and the fleet say so before anything starts."""
    config = SGLangConfig(python=str(tmp_path / "python"))
    message = (
        f"rollout.sglang.python: must be the interpreter of an environment with SGLang, got {tmp_path}/python, "
        "where there is none; run 'make sglang' first or name yours"
    )
    with pytest.raises(WiringError) as caught:
        check_installation(config)
    assert str(caught.value) == message
    with pytest.raises(WiringError):
        ServerFleet(config, Launch(model_dir=tmp_path, run_dir=tmp_path, dtype="float32"))


def test_interpreter_is_the_clones_unless_named() -> None:
    """`make sglang` makes it."""
    assert SGLangConfig().interpreter == CLONE / ".venv-sglang" / "bin" / "python"
    assert SGLangConfig(python="/x/python").interpreter == Path("/x/python")


def test_cpu_servers_get_the_stand_ins_and_gpu_servers_do_not(tmp_path) -> None:
    """The command and the environment of both."""
    launch = Launch(model_dir=tmp_path, run_dir=tmp_path, dtype="float32", seed=4)
    cpu, gpu = SGLangConfig(device="cpu", seeded=True), SGLangConfig(device="cuda", tp_size=2)
    words = launch_words(cpu, launch, 1, 4000)
    assert words[words.index("--device") + 1] == "cpu"
    assert words[words.index("--random-seed") + 1] == "5"
    assert {"--enable-deterministic-inference", "--enable-return-routed-experts"} <= set(words)
    paths = launch_env(cpu, launch)["PYTHONPATH"].split(os.pathsep)
    assert [Path(path).name for path in paths] == ["sglang_media", "sglang_cpu"]
    assert all(Path(path).is_dir() for path in paths)
    words = launch_words(gpu, launch, 1, 4000)
    assert words[words.index("--base-gpu-id") + 1] == "2"
    assert "--device" not in words
    assert Path(launch_env(gpu, launch)["PYTHONPATH"]).name == "sglang_media"
    bound = launch_env(replace(cpu, tp_size=2), launch)
    assert bound["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"


def test_dtype_is_the_checkpoints(tmp_path) -> None:
    """The thinker's own word comes first, bfloat16 is the last resort."""
    (tmp_path / "config.json").write_text('{"dtype": "float16", "thinker_config": {"dtype": "float32"}}')
    assert checkpoint_dtype(tmp_path) == "float32"
    (tmp_path / "config.json").write_text("{}")
    assert checkpoint_dtype(tmp_path) == "bfloat16"


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://x:1", "http://"])
def test_url_must_be_http(url) -> None:
    """A wrong word is found before the first call."""
    with pytest.raises(ConfigError, match=r"rollout\.engine_urls: must be http://host:port, got"):
        SGLangClient(url)


def test_a_server_that_is_not_there_is_gone() -> None:
    """Nothing listens: one error type for all the ways in which a server can be away."""
    with pytest.raises(
        ServerGoneError, match=r"http://127.0.0.1:1/server_info: must answer, got ConnectionRefused"
    ):
        SGLangClient("http://127.0.0.1:1").info()
