"""What goes wrong with a user's data.

DataError
├── ManifestError       (ValueError)  the manifest as a whole cannot be used
├── ModelDirectoryError (ValueError)  the model directory lacks a tokenizer or chat template that prompts need
└── PositionError       (ValueError)  a saved position is not one of the order that shall go on from it

A single bad row is no exception to its reader: it is a `RowError`, a value that takes the row's place. Inside, a
`LineError` says why a row is no record.
"""

from __future__ import annotations

from dataclasses import dataclass

from relax.errors import RelaxError


class DataError(RelaxError):
    """Root of the tree."""


class ManifestError(DataError, ValueError):
    pass


class ModelDirectoryError(DataError, ValueError):
    pass


class PositionError(DataError, ValueError):
    pass


class LineError(ValueError):
    """Why a row is no record: the rule and the value that broke it. The manifest makes a `RowError` of it."""


@dataclass(frozen=True)
class RowError:
    """A row that cannot be used: `place` is file and line, `reason` the rule and the value that broke it."""

    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"
