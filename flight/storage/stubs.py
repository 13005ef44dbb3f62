"""Stubs: what the coordinator keeps of rows whose values lie with an owner. No state, no sockets.

A stub is a batch of the same rows with the same keys. Small columns are in it as they are: plain numbers, and what the
state machines look at (labels of samplers, the versions of tokens, uids of other tables). Of every other column it has
the size of each value (`flight.state.sizes`), null where the value is, so that plans can balance and nulls can be
refused. Two more columns a writer say where the values lie and how many bytes they take. So a stub is a batch of a
table that is described by `stub_spec`, and goes in as any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flight.data.store import Run, gather
from flight.errors import InvalidRequestError
from flight.messages import encode
from flight.schema import KEY_COLUMNS, Column, TableSpec
from flight.state.marks import token_source
from flight.state.sizes import can_be_sized, sizes_of_values
from flight.storage import addresses
from flight.storage.messages import Elsewhere, Endpoint

NOTE = b"owners"
"""Metadata key of an answer whose columns lie with owners."""


@dataclass(frozen=True, slots=True)
class Stub:
    """What is known of a stub beside its rows: whose it is, its first number there, and the bytes of its values."""

    owner: int
    first: int
    num_bytes: int


def address_column(writer: str) -> str:
    """Return the column of a stub that says where the values of a writer's part lie."""
    return f"@address:{writer}"


def bytes_column(writer: str) -> str:
    """Return the column of a stub that says how many bytes the values of a writer's part take."""
    return f"@bytes:{writer}"


def is_small(arrow_type: pa.DataType) -> bool:
    """Return whether values of this type are always a few bytes."""
    return pa.types.is_primitive(arrow_type) or pa.types.is_decimal(arrow_type)


def kept_columns(spec: TableSpec) -> set[str]:
    """Return the columns whose values stay with the coordinator wherever the rest of a row lies."""
    small = {column.name for column in spec.columns if is_small(column.type)}
    referring = {column.name for column in spec.columns if column.references}
    return small | referring | set(spec.label_columns()) | ({token_source(spec)} - {""})


def num_large_bytes(rows: pa.Table) -> int:
    """Return how many bytes of rows would leave the coordinator, as far as their types tell."""
    return sum(
        column.nbytes
        for name, column in zip(rows.column_names, rows.columns, strict=True)
        if name not in KEY_COLUMNS and not is_small(column.type)
    )


def stub_spec(spec: TableSpec) -> TableSpec:
    """Return the specification that stubs of a table follow."""
    kept = kept_columns(spec)
    columns = [
        column if column.name in kept else replace(column, type=pa.int64(), shape="")
        for column in spec.columns
    ]
    for writer in dict.fromkeys(column.writer for column in spec.columns):
        for name, meaning in (
            (address_column(writer), "where the values lie"),
            (bytes_column(writer), "bytes that they take"),
        ):
            columns.append(Column(name=name, type=pa.int64(), meaning=meaning, writer=writer))
    return replace(spec, columns=tuple(columns))


def make_stub(spec: TableSpec, batch: pa.RecordBatch, owner: int, first: int) -> pa.RecordBatch:
    """Return the stub of a batch that fits its table and lies with `owner` from number `first`."""
    kept = kept_columns(spec)
    arrays: dict[str, pa.Array] = {}
    num_bytes: dict[str, int] = {}
    for name, values in zip(batch.schema.names, batch.columns, strict=True):
        column = spec.columns_by_name.get(name)
        if column is not None:
            num_bytes.setdefault(column.writer, 0)
        if column is None or name in kept:
            arrays[name] = values
        else:
            arrays[name] = _sizes(values)
            num_bytes[column.writer] += values.nbytes
    for writer, total in num_bytes.items():
        arrays[address_column(writer)] = addresses.pack(owner, first, batch.num_rows)
        each = total // max(batch.num_rows, 1)
        arrays[bytes_column(writer)] = pa.array(np.full(batch.num_rows, each, np.int64))
    return pa.RecordBatch.from_pydict(arrays)


def num_remote_bytes(spec: TableSpec, batch: pa.RecordBatch) -> int:
    """Return the bytes of a batch that are not in its stub."""
    names = set(batch.schema.names) & set(spec.columns_by_name) - kept_columns(spec)
    return sum(batch.column(name).nbytes for name in names)


def _sizes(values: pa.Array) -> pa.Array:
    if can_be_sized(values.type):
        return sizes_of_values(values).cast(pa.int64())
    return pc.if_else(values.is_valid(), pa.scalar(0, pa.int64()), pa.scalar(None, pa.int64()))


def check_stub(spec: TableSpec, batch: pa.RecordBatch, stub: Stub) -> None:
    """Check that a stub points at the values of the owner that it came from.

    Raises:
        InvalidRequestError: it does not.
    """
    expected = addresses.pack(stub.owner, stub.first, batch.num_rows)
    names = batch.schema.names
    found = [name for writer in _writers(spec) if (name := address_column(writer)) in names]
    sizes = [name for writer in _writers(spec) if (name := bytes_column(writer)) in names]
    is_right = (
        found
        and stub.num_bytes >= 0
        and stub.first >= 0
        and all(batch.column(name).equals(expected) for name in found)
        and all((pc.min(batch.column(name)).as_py() or 0) >= 0 for name in sizes)
    )
    if not is_right:
        raise InvalidRequestError(
            f"register in {spec.name}: a stub must point at numbers {stub.first} and on of owner {stub.owner}, "
            "got another address"
        )


def _writers(spec: TableSpec) -> dict[str, None]:
    return dict.fromkeys(column.writer for column in spec.columns)


def addresses_at(runs: Sequence[Run], writer: str) -> np.ndarray:
    """Return the address of each row's part, -1 where the values are here or have not come; shape [num_rows]."""
    return addresses.to_numpy(gather(runs, address_column(writer), pa.int64()))


def bytes_at(runs: Sequence[Run], writer: str) -> int:
    """Return the bytes that parts of rows take with their owners."""
    return pc.sum(gather(runs, bytes_column(writer), pa.int64())).as_py() or 0


def have_come(runs: Sequence[Run]) -> np.ndarray:
    """Return for each row whether its part is there, here or elsewhere; shape [num_rows]."""
    is_there = np.array([run.batch is not None for run in runs], bool)
    return np.repeat(is_there, np.array([len(run.indices) for run in runs], np.int64))


def split(
    spec: TableSpec, places: Mapping[str, list[Run]], owners: Mapping[int, str]
) -> tuple[dict[str, list[Run]], list[Endpoint]]:
    """Return the columns that are here for all rows, and where the others lie.

    A column of which any value lies elsewhere is fetched whole: what is here of it, from the coordinator (owner 0).
    `owners` are locations.
    """
    kept = kept_columns(spec)
    by_writer: dict[str, list[str]] = {}
    for name in places:
        if name not in kept:
            by_writer.setdefault(spec.columns_by_name[name].writer, []).append(name)
    endpoints: dict[Any, Endpoint] = {}
    here = dict(places)
    for writer, columns in by_writer.items():
        where = places[columns[0]]
        found = addresses_at(where, writer)
        if not (found >= 0).any():
            continue
        for name in columns:
            del here[name]
        for each in _endpoints(where, found, owners, columns):
            key = (each.owner, tuple(each.positions), tuple(each.runs))
            if key in endpoints:
                endpoints[key].columns += each.columns
            else:
                endpoints[key] = each
    return here, list(endpoints.values())


def _endpoints(
    where: Sequence[Run], found: np.ndarray, owners: Mapping[int, str], columns: list[str]
) -> list[Endpoint]:
    owner_of = addresses.owners_of(found)
    endpoints = []
    for owner in np.unique(owner_of[found >= 0]).tolist():
        positions = np.flatnonzero(owner_of == owner)
        endpoints.append(
            Endpoint(
                owner=owner,
                location=owners.get(owner, ""),
                columns=list(columns),
                positions=addresses.to_runs(positions),
                runs=addresses.to_runs(addresses.numbers_of(found[positions])),
            )
        )
    is_here = have_come(where) & (found < 0)
    if is_here.any():
        endpoints.append(
            Endpoint(columns=list(columns), positions=addresses.to_runs(np.flatnonzero(is_here)))
        )
    return endpoints


def noted(answer: pa.Table, table: str, schema: pa.Schema, endpoints: list[Endpoint]) -> pa.Table:
    """Return an answer with a note of where the rest of its columns, which are `schema`, lie."""
    note = Elsewhere(table=table, arrow_schema=schema.serialize().to_pybytes(), endpoints=endpoints)
    return answer.replace_schema_metadata({NOTE: encode(note)})
