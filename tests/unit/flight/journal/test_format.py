"""Frames: what was written is read, what was changed is noticed, and the next frame is found behind a bad one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from flight.journal.format import ALIGNMENT_BYTES, Damage, Frame, Kind, frame, read_frame, read_frames
from tests.kit.search import num_examples


def joined(*frames: list) -> bytes:
    """Return the bytes of a file."""
    return b"".join(bytes(part) for parts in frames for part in parts)


@settings(max_examples=num_examples(50), deadline=None)
@given(head=st.binary(max_size=200), body=st.binary(max_size=300), seq=st.integers(0, 2**63))
def test_frame_is_read_as_it_was_written(head, body, seq):
    """Head, body and numbers come back; body and frame begin at multiples of 64."""
    data = joined(frame(Kind.PUT, seq, seq // 2, head, body))
    each = read_frame(memoryview(data), 0)
    assert isinstance(each, Frame)
    assert (each.kind, each.seq, each.first, bytes(each.head), bytes(each.body)) == (
        *(Kind.PUT, seq, seq // 2),
        *(head, body),
    )
    assert each.end == len(data)
    assert len(data) % ALIGNMENT_BYTES == 0


def test_every_flipped_bit_that_matters_is_noticed():
    """Any bit of the numbers, the head, the body and the checksum; zeros between them hold nothing."""
    whole = joined(frame(Kind.DECISION, 7, 7, b"head of it", b"body of it"))
    for position in (*range(48 + 10), *range(64, 64 + 10)):
        data = bytearray(whole)
        data[position] ^= 1
        assert isinstance(read_frame(memoryview(data), 0), Damage), position


def test_reader_finds_the_frames_behind_a_bad_one():
    """One damaged place is one finding, whatever lies in it."""
    first, second, third = (frame(Kind.PUT, n, n, b"h", b"RxJ1" * 50) for n in (1, 2, 3))
    data = bytearray(joined(first, second, third))
    data[len(joined(first)) + 20] ^= 1
    found = list(read_frames(memoryview(data)))
    assert [each.seq if isinstance(each, Frame) else each for each in found] == [
        *(1, Damage(len(joined(first)), "the file ends inside a frame"), 3)
    ]
