"""Changes bytes of a journal whose server does not run: a torn end, or a damaged place that something follows."""

from __future__ import annotations

from pathlib import Path

from flight.journal.format import Frame, Kind, frame, read_frames
from flight.journal.records import FileHead, encode

MIN_FOLLOWING = 2
"""Groups of decisions behind a damaged place, so that no crash could have torn it."""
_WHOLE_KINDS = (Kind.DECISION, Kind.PUT)


def tear(directory: Path, draw: float) -> str:
    """Append the beginning of a frame, as a crash in the middle of a write leaves it; return what was done."""
    path = _logs(directory)[-1]
    frames = _frames(path)
    seq = frames[-1].seq + 1 if frames else 1
    head = encode(FileHead(role="log", journal="torn", number=0, seq=seq))
    whole = b"".join(bytes(part) for part in frame(Kind.DECISION, seq, seq, head))
    half = whole[: 1 + int(draw * (len(whole) - 2))]
    with path.open("ab") as file:
        file.write(half)
    return f"{len(half)} bytes of a frame behind {path.name}"


def damage(directory: Path, draw: float) -> str:
    """Flip a bit of a decision after the newest kept checkpoint; return what was done, '' if there is none.

    Other writes follow it, so it is damage and no torn end; and the checkpoint does not need it.
    """
    path = _logs(directory)[-1]
    frames = _frames(path)
    kept = _last_kept(directory)
    groups = sorted({each.first for each in frames})
    last = groups[-1 - MIN_FOLLOWING] if len(groups) > MIN_FOLLOWING else -1
    chosen = [each for each in frames if kept < each.seq and each.first <= last]
    if not chosen:
        return ""
    each = chosen[int(draw * len(chosen))]
    at = each.offset + int(draw * 1e6) % (each.end - each.offset)
    at = min(at, each.offset + 47 + len(each.head) + len(each.body))  # not in the zeros between frames
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << int(draw * 1e3) % 8
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data[at : at + 1])
    return f"a bit of byte {at} of {path.name}, in decision {each.seq}"


def _logs(directory: Path) -> list[Path]:
    return [path for path in sorted(directory.glob("*.log")) if path.stat().st_size]


def _frames(path: Path) -> list[Frame]:
    found = read_frames(memoryview(path.read_bytes()))
    return [each for each in found if isinstance(each, Frame) and each.kind in _WHOLE_KINDS]


def _last_kept(directory: Path) -> int:
    """Return the last decision of the newest kept checkpoint, or of the state; 0 without either."""
    seqs = [0]
    for role in ("committed", "prepared", "state"):
        for path in directory.glob(f"*.{role}"):
            first = next(iter(read_frames(memoryview(path.read_bytes()))), None)
            if isinstance(first, Frame):
                seqs.append(first.seq)
    return max(seqs)
