"""Errors of the engine: one tree.

RelaxError
├── ConfigError     (ValueError)   a key, a type or a number of the configuration is wrong
├── WiringError     (ValueError)   a role needs a column, a file or memory that is not there
├── SnapshotError   (OSError)      published weights are damaged or do not fit the model
├── TrainingError   (RuntimeError) a batch cannot be trained on
├── ControlError    (ConnectionError) the control plane did not answer
├── ServiceError    (RuntimeError) a role failed
│   └── HopelessError              and would fail again, however often it is started
└── RewardFailedError (RuntimeError) a completion could not be scored; lives in relax.rewards.base
"""

from __future__ import annotations


class RelaxError(Exception):
    """Root of the tree."""


class ConfigError(RelaxError, ValueError):
    pass


class WiringError(RelaxError, ValueError):
    pass


class SnapshotError(RelaxError, OSError):
    pass


class TrainingError(RelaxError, RuntimeError):
    pass


class ControlError(RelaxError, ConnectionError):
    pass


class ServiceError(RelaxError, RuntimeError):
    pass


class HopelessError(ServiceError):
    pass
