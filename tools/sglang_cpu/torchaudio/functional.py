"""Resampling by SciPy's polyphase filter."""

from __future__ import annotations

import math

import torch


def resample(waveform: torch.Tensor, orig_freq: int, new_freq: int) -> torch.Tensor:
    """Return samples [..., num_samples] at another rate."""
    from scipy.signal import resample_poly

    divisor = math.gcd(int(orig_freq), int(new_freq))
    samples = resample_poly(waveform.numpy(), new_freq // divisor, orig_freq // divisor, axis=-1)
    return torch.from_numpy(samples.copy())
