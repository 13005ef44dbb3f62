"""Checkpoints that a consumer keeps together with its own: prepare, make one's own files durable, commit; rewind later.

After a crash in between, the consumer's files decide: if they are whole, commit and rewind, otherwise release.
"""

from __future__ import annotations

import errno
from typing import Any

import structlog

from flight.errors import FlightQueueError, JournalFullError
from flight.journal import records as r
from flight.journal.keeping import DEADLINE_S, KeepingBroker
from flight.journal.recovery import restore_pin

LOG = structlog.get_logger("flight.journal")


class PinningBroker(KeepingBroker):
    """The verbs of kept checkpoints. None of them concerns one table: they are about all, at one decision."""

    def prepare(self, checkpoint_id: str) -> int:
        """Keep all tables as they are now until `release`; return the last decision that is in it.

        A checkpoint of that name that was not committed is replaced, so that a call can be repeated.

        Raises:
            InvalidRequestError: a committed one has that name, or too many are kept.
            JournalFullError: there is no room for it on the disk or under the limit.
        """
        with self._compactor.exclusive:
            self._pins.check_new(checkpoint_id)
            try:
                return self._compactor.pin(checkpoint_id, self._check_room)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                raise JournalFullError(
                    f"checkpoint_prepare: the disk of {self._config.directory} must have room, got: {error.strerror}; "
                    "release checkpoints, or make room on the disk"
                ) from error

    def commit(self, checkpoint_id: str) -> None:
        """Note for good that what belongs to a kept checkpoint is durable elsewhere, too. Idempotent.

        Raises:
            InvalidRequestError: there is none of that name.
        """
        with self._compactor.exclusive:
            self._pins.commit(self._pins.require("checkpoint_commit", checkpoint_id))

    def release(self, checkpoint_id: str) -> bool:
        """Let a kept checkpoint go; return whether there was one of that name."""
        with self._compactor.exclusive:
            pin = self._pins.find(checkpoint_id)
            if pin is not None:
                self._compactor.unpin(pin)
            return pin is not None

    def kept_checkpoints(self) -> list[dict[str, Any]]:
        """Return the kept checkpoints, oldest first."""
        return [
            {"checkpoint_id": pin.checkpoint_id, "status": pin.status, "decision": pin.seq}
            for pin in self._pins.all()
        ]

    def rewind(self, checkpoint_id: str) -> int:
        """Let all tables be what they were at a kept checkpoint; return the decision from which on they are.

        Leases are void, those of that time too; row numbers go on; the checkpoint stays. Returns once it is durable.

        Raises:
            InvalidRequestError: there is none of that name.
            JournalDamagedError: it is not as it was written; nothing has changed.
        """
        with self._compactor.exclusive:
            pin = self._pins.require("checkpoint_rewind", checkpoint_id)
            other, index = restore_pin(self._directory, pin.file, self, f"{self._log.last_seq}-")
            with self._locked():
                now = self.clock()
                self.become(other, now)
                seq = self._log.append(r.Rewound(pin=pin.file.number, now=now), index=index)
                self._last_put = dict.fromkeys(self._ledger.tables, seq)
                self._pins.last_rewind = seq
            self._log.ensure(seq, sync=True, deadline_s=DEADLINE_S)
            try:
                self._compactor.checkpoint()
            except (FlightQueueError, OSError) as error:
                LOG.warning("no checkpoint could be made after a rewind", error=str(error))
            return seq

    def _check_room(self, num_bytes: int) -> None:
        if lack := self._lack_of_disk(num_bytes):
            raise JournalFullError(
                f"checkpoint_prepare: the journal must have room for {num_bytes} bytes, got {lack}; "
                "release checkpoints, finish rows, or make room on the disk"
            )
