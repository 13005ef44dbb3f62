"""Errors of models and prompts, branches of the engine's tree (`relax.errors`).

RelaxError
├── WiringError
│   └── CheckpointError             a model directory or its tensors do not fit the model
├── SnapshotError   (OSError)       a weight snapshot is torn, altered, or not this model's
│   └── SnapshotNotFoundError (FileNotFoundError)  there is no such snapshot
└── PromptError     (ValueError)    a prompt's tokens and media do not fit the model or each other
"""

from __future__ import annotations

from relax.errors import RelaxError, SnapshotError, WiringError

__all__ = ["CheckpointError", "PromptError", "SnapshotError", "SnapshotNotFoundError"]


class CheckpointError(WiringError):
    pass


class PromptError(RelaxError, ValueError):
    pass


class SnapshotNotFoundError(SnapshotError, FileNotFoundError):
    pass
