"""The guardian's line protocol."""

from __future__ import annotations

from relax.launch.guardian import update


def test_update_adds_and_removes_groups():
    """One line a start, one line an end."""
    groups: set[int] = set()
    for line in (b"+12", b"+13", b"-12"):
        update(groups, line)
    assert groups == {13}


def test_update_ignores_what_could_hit_others():
    """Neither noise nor the numbers that mean 'everybody' are taken."""
    groups = {7}
    for line in (b"", b"+", b"+0", b"+1", b"+-1", b"12", b"kill", b"-x", b"+\xff"):
        update(groups, line)
    assert groups == {7}
