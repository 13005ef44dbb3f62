"""What is moved: tables of random samples, their files, their digest. Knows no transport.

A workload is made once, written as Arrow files, and mapped by the worker of every system, so that all systems move the
same bytes and these are in memory once. Values are random, so that nothing could gain by compressing them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

PAGE_BYTES = 4096
ROWS = "rows"
MEDIA = "media"
GROUP = "group"
"""Column of `rows` that says which row of `media` belongs to it."""

TITLES = {
    "a": "token-shaped lists",
    "b": "pixel tensors",
    "c": "MoE routing",
    "d": "omni groups of 16 sharing media",
    "e": "single rows",
    "f": "rows in the table",
    "g": "concurrent clients",
}

Values = npt.NDArray[np.generic]


@dataclass(frozen=True)
class Workload:
    """One batch of samples: `rows`, and for shared media `media` with one row a group of `group_size` rows."""

    name: str
    rows: pa.Table
    media: pa.Table | None = None
    group_size: int = 1

    @property
    def tables(self) -> dict[str, pa.Table]:
        """Return the tables that have to be moved, by name."""
        return {ROWS: self.rows} | ({} if self.media is None else {MEDIA: self.media})

    @property
    def nbytes(self) -> int:
        """Return the bytes to be moved, shared media counted once."""
        return sum(table.nbytes for table in self.tables.values())

    def describe(self) -> str:
        """Return rows and sizes in words."""
        shared = "" if self.media is None else f" and {self.media.num_rows} x {_mean(self.media)} of media"
        return f"({self.name}) {TITLES[self.name]}: {self.rows.num_rows} rows x {_mean(self.rows)}{shared}"


def _mean(table: pa.Table) -> str:
    nbytes = table.nbytes / table.num_rows
    if nbytes < 2**10:
        return f"{nbytes:.0f} B"
    return f"{nbytes / 2**20:.2f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.1f} KiB"


def make(name: str, scale: float = 1.0, seed: int = 0) -> Workload:
    """Return a workload; `scale` multiplies its number of rows (of groups for d).

    Raises:
        ValueError: there is no workload of that name.
    """
    rng = np.random.default_rng(seed)

    def count(rows: int) -> int:
        return max(1, round(rows * scale))

    if name == "a":
        return Workload(name, _tokens(rng, count(512)))
    if name == "b":
        return Workload(name, _bytes(rng, "pixels", count(64), 4 << 20))
    if name == "c":
        return Workload(name, _bytes(rng, "routed_experts", count(512), 2048 * 48 * 8))
    if name == "d":
        num_groups = count(8)
        rows = _tokens(rng, 16 * num_groups)
        groups = pa.array(np.repeat(np.arange(num_groups, dtype=np.int32), 16))
        media = _bytes(rng, "pixels", num_groups, 2 << 20)
        return Workload(name, rows.append_column(GROUP, groups), media, group_size=16)
    if name == "e":
        return Workload(name, _tokens(rng, 1))
    if name == "f":
        return Workload(name, _small(rng))
    if name == "g":
        return Workload(name, _tokens(rng, count(64)))
    raise ValueError(f"workload must be one of {list(TITLES)}, got {name!r}")


def _tokens(rng: np.random.Generator, num_rows: int) -> pa.Table:
    """About 8 KB a row: 256 prompt tokens, 400 to 800 completion tokens with a logprob and a version each, a reward."""
    lengths = rng.integers(400, 801, num_rows)
    total = int(lengths.sum())
    return pa.table(
        {
            "prompt_token_ids": _lists(
                rng.integers(0, 150_000, 256 * num_rows, np.int32), np.full(num_rows, 256)
            ),
            "completion_token_ids": _lists(rng.integers(0, 150_000, total, np.int32), lengths),
            "rollout_logprobs": _lists(rng.standard_normal(total, np.float32), lengths),
            "token_policy_versions": _lists(rng.integers(0, 9, total, np.int32), lengths),
            "reward": pa.array(rng.random(num_rows, np.float32)),
        }
    )


def _small(rng: np.random.Generator) -> pa.Table:
    """One row of 16 tokens, so that a million of them fit."""
    tokens = _lists(rng.integers(0, 150_000, 16, np.int32), np.full(1, 16))
    return pa.table({"prompt_token_ids": tokens, "reward": pa.array(rng.random(1, np.float32))})


def _bytes(rng: np.random.Generator, column: str, num_rows: int, row_bytes: int) -> pa.Table:
    values = rng.integers(0, 256, num_rows * row_bytes, np.uint8)
    return pa.table({column: _lists(values, np.full(num_rows, row_bytes))})


def _lists(values: Values, lengths: npt.NDArray[np.int64]) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def write(workload: Workload, directory: Path) -> None:
    """Write each table as an Arrow file."""
    for name, table in workload.tables.items():
        with pa.ipc.new_file(str(directory / f"{workload.name}_{name}.arrow"), table.schema) as sink:
            sink.write_table(table)


def load(name: str, directory: Path, group_size: int = 1) -> Workload:
    """Map what `write` wrote; the values stay in the files' pages."""
    tables = {}
    for part in (ROWS, MEDIA):
        path = directory / f"{name}_{part}.arrow"
        if path.exists():
            tables[part] = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    return Workload(name, tables[ROWS], tables.get(MEDIA), group_size)


def column_values(column: pa.ChunkedArray) -> tuple[list[Values], list[Values]]:
    """Return the row lengths (none for scalars) and the values of a column, chunk by chunk, without a copy."""
    lengths, values = [], []
    for chunk in column.chunks:
        if pa.types.is_list(chunk.type):
            lengths.append(chunk.value_lengths().to_numpy())
            chunk = chunk.flatten()
        values.append(chunk.to_numpy(zero_copy_only=True))
    return lengths, values


def table_digest(tables: Mapping[str, pa.Table], names: Mapping[str, Iterable[str]]) -> str:
    """Return the digest of the columns `names` of each table."""
    return digest(
        {f"{part}.{name}": column_values(tables[part].column(name)) for part in names for name in names[part]}
    )


def digest(columns: Mapping[str, tuple[list[Values], list[Values]]]) -> str:
    """Return one hash of columns given as (row lengths, values), each in any number of pieces."""
    state = hashlib.blake2b(digest_size=16)
    for name in sorted(columns):
        lengths, values = columns[name]
        state.update(name.encode())
        for piece in lengths:
            state.update(np.ascontiguousarray(piece, np.int32).data)
        for piece in values:
            state.update(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
    return state.hexdigest()


def source_digest(workload: Workload) -> str:
    """Return the digest that every system's received data must have."""
    return table_digest(
        workload.tables, {part: table.column_names for part, table in workload.tables.items()}
    )


def touch(buffer: object) -> int:
    """Read one byte of every page, as a reader would have to."""
    return int(np.frombuffer(buffer, np.uint8)[::PAGE_BYTES].sum(dtype=np.int64))  # type: ignore[call-overload]


def touch_table(table: pa.Table) -> int:
    """Read one byte of every page of a table's values."""
    return sum(
        touch(buffer)
        for column in table.columns
        for chunk in column.chunks
        for buffer in chunk.buffers()
        if buffer is not None and buffer.size
    )
