"""The settings of a journal."""

from __future__ import annotations

from dataclasses import dataclass

from flight.errors import InvalidRequestError

MIN_LIMIT_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class JournalConfig:
    """Where a server writes down what it must not forget, and how much disk it may use for that."""

    directory: str
    """A directory of its own; made if it does not exist."""
    limit_bytes: int | None = None
    """Bytes of all files, beyond which puts wait for rows to leave; None for no bound but the disk."""
    fsync_interval_s: float = 1.0
    """Seconds within which changes of tables with fsync "interval" are on the disk."""
    segment_bytes: int = 64 << 20
    """Size at which a log ends and the next one begins."""
    checkpoint_bytes: int = 64 << 20
    """Bytes of log after which a checkpoint lets old logs go; what a restart has to replay at most, about."""
    checkpoint_decisions: int = 20_000
    """Decisions after which a checkpoint is made, however small they are."""

    def __post_init__(self) -> None:
        for what, value, least in (
            ("limit_bytes", self.limit_bytes, MIN_LIMIT_BYTES),
            ("fsync_interval_s", self.fsync_interval_s, 0.001),
            ("segment_bytes", self.segment_bytes, 4096),
            ("checkpoint_bytes", self.checkpoint_bytes, 4096),
            ("checkpoint_decisions", self.checkpoint_decisions, 1),
        ):
            if value is not None and value < least:
                raise InvalidRequestError(f"journal: {what} must be at least {least}, got {value}")
