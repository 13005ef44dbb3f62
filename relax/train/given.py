"""What other services have computed of a batch's completion tokens, so that the trainer does not. Numpy only.

Each is one array for each row, in the order of the batch's completions, or absent as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from relax.errors import TrainingError

PerToken = Sequence[np.ndarray] | None
"""float32 [num_completion_tokens] for each row; None: nobody else computes it."""


@dataclass(frozen=True, kw_only=True)
class GivenScores:
    """Columns of other services."""

    ref_logprobs: PerToken = None
    """Under the model that training started from, nats."""
    proximal_logprobs: PerToken = None
    """Under the policy before the step, or one that is taken for it, nats."""
    values: PerToken = None
    """Of a critic elsewhere, before the step."""
    raw_advantages: PerToken = None
    """Advantages before whitening."""

    def check(self, lengths: Sequence[int]) -> None:
        """Refuse scores that do not fit completions of these lengths, or are not finite.

        Raises:
            TrainingError: names the row, the column and the value.
        """
        for item in fields(self):
            rows = getattr(self, item.name)
            if rows is None:
                continue
            if len(rows) != len(lengths):
                raise TrainingError(f"batch: {item.name} must have {len(lengths)} rows, got {len(rows)}")
            for row, (values, length) in enumerate(zip(rows, lengths, strict=True)):
                if len(values) != length:
                    raise TrainingError(
                        f"batch row {row}: {item.name} must be one for each of {length} tokens, got {len(values)}"
                    )
                if not np.isfinite(values).all():
                    place = int(np.flatnonzero(~np.isfinite(values))[0])
                    raise TrainingError(
                        f"batch row {row}: {item.name} must be finite, got {values[place]} at token {place}"
                    )
