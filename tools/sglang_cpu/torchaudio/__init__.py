"""Stands in for torchaudio on a CPU: SGLang's audio loader takes only its resampling."""

import stand_in

if stand_in.needed():
    from torchaudio import functional as functional

    __version__ = "0.0.0+cpu"
else:
    stand_in.give_way("torchaudio")
