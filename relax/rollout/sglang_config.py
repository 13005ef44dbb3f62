"""Options of the SGLang engine. It checks words and numbers; it starts nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from relax.errors import ConfigError, WiringError

CLONE = Path(__file__).resolve().parents[2]


@dataclass(kw_only=True)
class SGLangConfig:
    """Servers that a rollout service starts, and how their weights are replaced."""

    python: str | None = None
    """Interpreter of the environment that has SGLang; absent: the one that `make sglang` made."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: cuda where the machine has an NVIDIA driver."""
    dtype: str = "auto"
    """Of the weights in the server, such as `bfloat16`; `auto`: as in the checkpoint's config.json."""
    tp_size: int = 1
    """GPUs, or on a CPU processes, that share one server's model."""
    max_total_tokens: int = 32_768
    """Size of a server's key-value cache in tokens; 0: as many as the memory holds."""
    max_running_requests: int = 64
    """Completions that a server decodes together."""
    seeded: bool = False
    """Give every sample a seed of its own, so that it comes out alike whatever else runs; slower, and media are sent
    once a sample instead of once a group."""
    weights: str = "disk"
    """How weights reach a server: `disk` (it reads the snapshot), `tensor` (over HTTP) or `distributed` (a broadcast by
    gloo on a CPU, NCCL on a GPU)."""
    pause: str = "retract"
    """What an update does to running completions: `retract` (they go on under new weights, cache computed again),
    `in_place` (they go on with the old cache), `abort` (they end with what they have) or `wait` (it waits for them)."""
    bucket_bytes: int = 256 << 20
    """Tensors sent together by `tensor` and `distributed`."""
    start_deadline_s: float = 600.0
    """Longest start of a server."""
    request_deadline_s: float = 600.0
    """Longest wait for one answer of a server."""
    max_restarts: int = 3
    """Times that a server of ours that died is started again."""
    extra_args: list[str] = field(default_factory=list)
    """Further words for `python -m sglang.launch_server`."""

    def __post_init__(self) -> None:
        for key, word, choices in (
            ("device", self.device, ("auto", "cpu", "cuda")),
            ("weights", self.weights, ("disk", "tensor", "distributed")),
            ("pause", self.pause, ("retract", "in_place", "abort", "wait")),
        ):
            if word not in choices:
                raise ConfigError(f"rollout.sglang.{key}: must be one of {', '.join(choices)}, got {word!r}")
        for key, value, minimum in (
            ("tp_size", self.tp_size, 1),
            ("max_total_tokens", self.max_total_tokens, 0),
            ("max_running_requests", self.max_running_requests, 1),
            ("bucket_bytes", self.bucket_bytes, 1 << 10),
            ("start_deadline_s", self.start_deadline_s, 1),
            ("request_deadline_s", self.request_deadline_s, 1),
            ("max_restarts", self.max_restarts, 0),
        ):
            if value < minimum:
                raise ConfigError(f"rollout.sglang.{key}: must be at least {minimum}, got {value}")

    @property
    def interpreter(self) -> Path:
        """Return the interpreter of SGLang's environment, whether it is there or not."""
        return Path(self.python) if self.python else CLONE / ".venv-sglang" / "bin" / "python"

    @property
    def on_cpu(self) -> bool:
        """Whether servers run without a GPU."""
        return self.device == "cpu" or (self.device == "auto" and not Path("/dev/nvidiactl").exists())


def check_installation(config: SGLangConfig) -> None:
    """Check that SGLang's interpreter is there.

    Raises:
        WiringError: it is not.
    """
    if not config.interpreter.exists():
        raise WiringError(
            f"rollout.sglang.python: must be the interpreter of an environment with SGLang, got {config.interpreter}, "
            "where there is none; run 'make sglang' first or name yours"
        )


def checkpoint_dtype(model_dir: Path) -> str:
    """Return the type of the checkpoint's weights as its config.json names it; bfloat16 when it names none."""
    config = json.loads((model_dir / "config.json").read_text())
    for source in (config.get("thinker_config", {}), config):
        named = source.get("dtype") or source.get("torch_dtype")
        if named:
            return str(named)
    return "bfloat16"
