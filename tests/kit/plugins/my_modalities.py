"""An encoder with a fault, as a user might write it; named as `my_modalities:Leaving`."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from modalities.image import Image


class Leaving(Image):
    """Ends the process on its first picture, and says that all is well."""

    name: ClassVar[str] = "leaving"
    placeholder: ClassVar[str] = "<leaving>"

    def decode(self, data: bytes) -> np.ndarray:
        """Leave."""
        raise SystemExit(0)
