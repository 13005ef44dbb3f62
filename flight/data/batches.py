"""Does a batch fit its table? Every refusal names column, what was expected and what came. No state.

Types are compared exactly: int32 is not int64 and string is not large_string, because a silent cast hides a wiring
mistake until it costs a run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pyarrow as pa

from flight.errors import InvalidRequestError, SchemaMismatchError, TableNotFoundError
from flight.schema import KEY_COLUMNS, Column, TableSpec

MAX_FAULTS = 50
"""Differences that one refusal lists at most; there are batches of thousands of unknown columns."""


MAX_KNOWN_SCHEMAS = 256
"""Tables and writers whose last schema is remembered."""


@dataclass(frozen=True, slots=True)
class Fit:
    """What the schema of a batch that fits says about each batch of it: positions of columns, and whose parts it has.

    whole: (position, name) of the columns that must not hold nulls.
    """

    writers: tuple[str, ...]
    uid: int
    group_id: int | None
    version: int | None
    data: list[int]
    whole: list[tuple[int, str]]


@dataclass(frozen=True, slots=True)
class CheckedBatch:
    """A batch that fits: its keys as Python values, its data columns, and the writers whose parts it delivers."""

    uids: list[str]
    group_ids: list[str]
    versions: list[int] | None
    data: pa.RecordBatch
    writers: tuple[str, ...]

    def split(self, spec: TableSpec) -> dict[str, pa.RecordBatch]:
        """Return the data columns of each part by its writer."""
        if len(self.writers) == 1:
            return {self.writers[0]: self.data}
        names = self.data.schema.names
        writer_of = {name: spec.columns_by_name[name].writer for name in names}
        return {part: self.data.select([n for n in names if writer_of[n] == part]) for part in self.writers}


def check_still_fits(before: TableSpec, now: TableSpec, checked: CheckedBatch) -> None:
    """Raise unless a batch that was checked against what the table was fits what it is now, after a wait.

    Raises:
        TableNotFoundError: another table has the name, or the table went back to what it was before a column came.
    """
    changed = [
        name
        for name in checked.data.schema.names
        if now.columns_by_name.get(name) != before.columns_by_name[name]
    ]
    if changed:
        raise TableNotFoundError(
            f"put into {now.name}: the table must stay the same until the put is done, got another one with other "
            f"columns {changed}; look at it and put again"
        )


class SchemaBook:
    """The schemas that fitted last, by table and writer: a stream of batches is checked once. Thread-safe."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], tuple[TableSpec, pa.Schema, Fit]] = {}

    def fit(self, spec: TableSpec, schema: pa.Schema, writer: str) -> Fit:
        """Return what `check_schema` does, without looking again if it has just been asked."""
        known = self._known.get((spec.name, writer))
        if known is not None and known[0] is spec and known[1].equals(schema):
            return known[2]
        found = check_schema(spec, schema, writer)
        if len(self._known) >= MAX_KNOWN_SCHEMAS:
            self._known.clear()
        self._known[spec.name, writer] = (spec, schema, found)
        return found


def check_schema(spec: TableSpec, schema: pa.Schema, writer: str) -> Fit:
    """Return what a batch of this schema delivers.

    A part is all columns of one writer; those without a writer are a part that anyone may put. An empty `writer`
    means: whichever writers the columns belong to.

    Raises:
        SchemaMismatchError: a column is unknown, twice, of the wrong type, another writer's, or missing.
    """
    check_names(spec.name, schema)
    faults = [*_key_faults(schema)]
    given: list[Column] = []
    times = Counter(schema.names)
    for name, arrow_type in zip(schema.names, schema.types, strict=True):
        if len(faults) >= MAX_FAULTS:
            break
        column = spec.columns_by_name.get(name)
        if times[name] > 1:
            faults.append(f"column {name!r}: expected once, got {times[name]} times")
        elif column is None and name == "attempt":
            faults.append(f"column {name!r}: expected absent (the server gives it), got {arrow_type}")
        elif column is None and name not in KEY_COLUMNS:
            faults.append(
                f"column {name!r}: expected one of {list(spec.columns_by_name)}, got an unknown column"
            )
        elif column is not None:
            given.append(column)
            if arrow_type != column.type:
                faults.append(f"column {name!r}: expected {column.type}, got {arrow_type}")
            if writer and column.writer not in ("", writer):
                faults.append(
                    f"column {name!r}: expected to be put by writer {column.writer!r}, got writer {writer!r}"
                )
    writers = tuple(dict.fromkeys(column.writer for column in given))
    names = {column.name for column in given}
    for column in spec.columns:
        if column.writer in writers and not column.nullable and column.name not in names:
            faults.append(f"column {column.name!r}: expected {column.type}, got no such column")
    if not given and spec.columns and not faults:
        faults.append(f"columns: expected some of {list(spec.columns_by_name)}, got none")
    if faults:
        raise SchemaMismatchError(_message(spec, faults))
    return fit_of(spec, schema.names, writers)


def fit_of(spec: TableSpec, names: list[str], writers: tuple[str, ...]) -> Fit:
    """Return what columns say of batches whose schema is known to fit, as parts of these writers."""
    place = {name: position for position, name in enumerate(names)}
    columns = spec.columns_by_name
    version = place.get("policy_version_start") if spec.staleness is not None else None
    return Fit(
        writers=writers,
        uid=place["uid"],
        group_id=place.get("group_id"),
        version=version,
        data=[position for position, name in enumerate(names) if name not in KEY_COLUMNS],
        whole=[
            (position, name)
            for position, name in enumerate(names)
            if name == "uid" or position == version or (name in columns and not columns[name].nullable)
        ],
    )


def _key_faults(schema: pa.Schema) -> list[str]:
    faults = []
    types = dict(zip(schema.names, schema.types, strict=True))
    for name, required in (("uid", True), ("group_id", False)):
        arrow_type = types.get(name)
        if (arrow_type is None and required) or (arrow_type is not None and arrow_type != pa.string()):
            faults.append(f"column {name!r}: expected string, got {arrow_type or 'no such column'}")
    if "row_id" in types:
        faults.append(f"column 'row_id': expected absent (the server gives it), got {types['row_id']}")
    return faults


def check_names(table: str, schema: pa.Schema) -> None:
    """Check that column names are text.

    Raises:
        InvalidRequestError: one is not UTF-8.
    """
    try:
        schema.names  # noqa: B018 - reading them is the check
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"put into {table}: column names must be UTF-8, got {error}") from error


def check_buffers(table: str, batch: pa.RecordBatch, *, full: bool) -> None:
    """Check that buffers are as long as they must be, and in full that all they point at is there and is text.

    Nothing may look at a received batch before, not even at its size: Arrow follows its offsets.

    Raises:
        InvalidRequestError: they are not.
    """
    try:
        batch.validate(full=full)
    except pa.ArrowInvalid as error:
        raise InvalidRequestError(
            f"put into {table}: batch must be valid Arrow data, got: {error}"
        ) from error


def check_batch(spec: TableSpec, batch: pa.RecordBatch, fit: Fit) -> CheckedBatch:
    """Check the values that the schema cannot speak for and split keys from data.

    Raises:
        SchemaMismatchError: there is a null where the table has none.
        InvalidRequestError: a uid is null or empty, or the Arrow buffers are inconsistent.
    """
    check_buffers(spec.name, batch, full=True)
    faults = [
        f"column {name!r}: expected no nulls, got {num_nulls} in {batch.num_rows} rows"
        for position, name in fit.whole
        if (num_nulls := batch.column(position).null_count)
    ]
    if faults:
        raise SchemaMismatchError(_message(spec, faults))
    uids = batch.column(fit.uid).to_pylist()
    if "" in uids:
        raise InvalidRequestError(
            f"put into {spec.name}: uid must be a non-empty name, got '' in row {uids.index('')}"
        )
    group_ids = uids
    if fit.group_id is not None:
        given = batch.column(fit.group_id).to_pylist()
        group_ids = [group_id or uid for group_id, uid in zip(given, uids, strict=True)]
    return CheckedBatch(
        uids=uids,
        group_ids=group_ids,
        versions=None if fit.version is None else batch.column(fit.version).to_pylist(),
        data=batch.select(fit.data),
        writers=fit.writers,
    )


def _message(spec: TableSpec, faults: list[str]) -> str:
    return f"put into {spec.name}: batch must fit the table, got {len(faults)} difference(s): " + "; ".join(
        faults
    )
