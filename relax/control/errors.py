"""Errors of the control plane, a branch of the engine's tree.

ControlError              (ConnectionError) the control plane did not answer
├── ControlDeadlineError  (TimeoutError)    no answer came within the deadline
├── ControlRefusedError   (ValueError)      the hub refused a value, or an address or timing is impossible
└── MalformedFrameError   (ValueError)      bytes that are no message of this protocol
"""

from __future__ import annotations

from relax.errors import ControlError

__all__ = ["ControlDeadlineError", "ControlError", "ControlRefusedError", "MalformedFrameError"]


class ControlDeadlineError(ControlError, TimeoutError):
    pass


class ControlRefusedError(ControlError, ValueError):
    pass


class MalformedFrameError(ControlError, ValueError):
    pass
