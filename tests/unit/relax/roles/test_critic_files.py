"""Heads of a critic on disk: the newest of the present incarnation, and none of another."""

from __future__ import annotations

import pytest

from relax.control.course import Course
from relax.errors import ServiceError
from relax.roles.critic_files import head_file, newest_head, retire_heads, wait_for_head

FIRST, SECOND = Course(), Course(1, 4)


@pytest.fixture
def run_dir(tmp_path):
    """A run with heads of two incarnations, and a half-written one."""
    (tmp_path / "critic").mkdir()
    for course, versions in ((FIRST, (5, 6, 7)), (SECOND, (4, 5))):
        for version in versions:
            head_file(tmp_path, course, version).write_bytes(b"x")
    (tmp_path / "critic" / ".000008.safetensors.partial").write_bytes(b"x")
    return tmp_path


def test_newest_head_is_of_the_same_incarnation(run_dir):
    """Numbers of another one mean other weights."""
    assert newest_head(run_dir, FIRST) == (7, run_dir / "critic" / "000007.safetensors")
    assert newest_head(run_dir, SECOND) == (5, run_dir / "critic" / "000005-1.safetensors")
    assert newest_head(run_dir, Course(2, 0)) is None
    assert newest_head(run_dir / "absent", FIRST) is None


def test_old_heads_go_with_those_of_earlier_incarnations(run_dir):
    """The newest few stay."""
    retire_heads(run_dir, SECOND, 5, keep=1)
    assert sorted(path.name for path in (run_dir / "critic").glob("[0-9]*")) == ["000005-1.safetensors"]


def test_waiting_for_a_head_ends(run_dir):
    """With the file, by the deadline, or when the role has to stop."""
    there, absent = head_file(run_dir, FIRST, 7), head_file(run_dir, FIRST, 9)
    assert wait_for_head(there, 5.0, lambda: False) == there
    for deadline_s, over in ((0.0, False), (60.0, True)):
        with pytest.raises(ServiceError, match=r"got no 000009\.safetensors"):
            wait_for_head(absent, deadline_s, lambda over=over: over)
