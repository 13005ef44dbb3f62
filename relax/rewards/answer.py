"""The answer within a completion, and texts made comparable."""

from __future__ import annotations

import re
import unicodedata

from relax.errors import ConfigError


def check_pattern(key: str, pattern: str, *, num_groups: int | None = None) -> None:
    """Check a regular expression of the configuration.

    Raises:
        ConfigError: it is none, or has another number of groups.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{key}: must be a regular expression, got {pattern!r}: {error}") from error
    if num_groups is not None and compiled.groups != num_groups:
        raise ConfigError(f"{key}: must have {num_groups} group(s), got {compiled.groups} in {pattern!r}")


def extracted(text: str, pattern: str) -> str | None:
    """Return the first group of the last match of `pattern`, None without one; all of the text without a pattern."""
    if not pattern:
        return text
    matches = list(re.finditer(pattern, text, re.DOTALL))
    return matches[-1].group(1) if matches else None


def normalised(text: str) -> str:
    """Return the text after Unicode NFKC, case folding, and joining of runs of white space."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())
