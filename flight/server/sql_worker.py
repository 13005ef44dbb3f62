"""One SELECT by DuckDB in a process of its own, which is thrown away afterwards. Run as a file by `flight.server.sql`.

It imports nothing of this package. It talks in JSON lines, its data are in two memory files that it inherits:

    <-- {query, tables: {name: [columns]}, max_rows, max_bytes}
    --> {needs: {name: [columns]}}                  the tables and columns that the query names
    <-- {data: {name: [offset, size]}}              an Arrow stream of each in the first memory file
    --> {rows: number}                              the answer is an Arrow stream in the second memory file
    --> {refused: text} or {missing: true}          at any time instead

A query can name nothing but those tables: DuckDB has no access to files, network, extensions or Python variables, its
configuration is locked, only one SELECT is accepted, and of table functions only those that make numbers and unfold
lists. What it still might do to its process (memory, time, a crash) ends with the process.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import sys
from collections.abc import Iterator
from typing import Any

MAX_MEMORY_BYTES = 1 << 30
"""What DuckDB may use."""

MAX_ADDRESS_BYTES = 16 << 30
"""What the process may map beyond its input: a bound for whatever DuckDB does not count."""

MAX_QUERY_CHARS = 100_000
TABLE_FUNCTIONS = ("generate_series", "range", "unnest")

SETTINGS: dict[str, str | bool | int | float | list[str]] = {
    "allow_community_extensions": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "enable_external_access": "false",
    "memory_limit": f"{MAX_MEMORY_BYTES >> 20}MiB",
    "python_enable_replacements": "false",
    "temp_directory": "",
    "threads": "2",
}


class Refused(Exception):  # noqa: N818 - an answer, not a failure
    """The query cannot be answered; the text says why."""


def main() -> None:
    """Answer one query; the arguments are the descriptors of the two memory files."""
    data_file, result_file = int(sys.argv[1]), int(sys.argv[2])
    try:
        import duckdb
    except ImportError:
        _say({"missing": True})
        return
    request = _hear()
    try:
        connection = duckdb.connect(":memory:", config=SETTINGS)
        tables = request["tables"]
        needs = needed_columns(connection, request["query"], tables)
        _say({"needs": needs})
        _register(connection, _hear()["data"], data_file)
        connection.execute("SET lock_configuration = true")
        _say({"rows": _answer(connection, request, result_file)})
    except Refused as error:
        _say({"refused": str(error)})
    except (duckdb.Error, MemoryError, OverflowError, ValueError) as error:
        _say({"refused": f"query must be one that DuckDB can answer, got: {_one_line(error)}"})


def needed_columns(connection: Any, query: str, tables: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the tables that a query names and of each the columns that it can look at.

    Found by name in the parsed query: whatever is spelt like a column counts as one, and a star or a whole row counts
    as all, so that nothing is missed.
    """
    if len(query) > MAX_QUERY_CHARS:
        raise Refused(f"query must be at most {MAX_QUERY_CHARS} characters, got {len(query)}")
    [[text]] = connection.execute("SELECT json_serialize_sql(?)", [query]).fetchall()
    parsed = json.loads(text)
    if parsed.get("error"):
        raise Refused(f"query must be one SELECT, got: {_one_line(parsed['error_message'])}")
    if len(parsed["statements"]) != 1:
        raise Refused(f"query must be one SELECT, got {len(parsed['statements'])} statements")
    nodes = list(_nodes(parsed["statements"]))
    known = {name.lower(): name for name in tables}
    defined = {node["key"].lower() for node in nodes if set(node) == {"key", "value"}}
    named, aliases = set(), set()
    for node in nodes:
        if node.get("type") == "TABLE_FUNCTION":
            function = node["function"]["function_name"].lower()
            if function not in TABLE_FUNCTIONS:
                raise Refused(f"table function must be one of {list(TABLE_FUNCTIONS)}, got {function!r}")
        if node.get("type") == "BASE_TABLE":
            name = node["table_name"].lower()
            qualified = node["schema_name"] or node["catalog_name"]
            if name in known and not qualified:
                named.add(name)
            elif name not in defined or qualified:
                raise Refused(f"table must be one of {sorted(tables)}, got {node['table_name']!r}")
            aliases.add(node["alias"].lower())
    words = {word.lower() for word in _words(parsed["statements"])}
    whole = any(_takes_all(node, aliases | named) for node in nodes)
    return {
        known[name]: [column for column in tables[known[name]] if whole or column.lower() in words]
        for name in sorted(named)
    }


def _takes_all(node: dict[str, Any], tables: set[str]) -> bool:
    if node.get("class") == "STAR" or node.get("ref_type") == "NATURAL":
        return True
    # A table's name or alias in the place of a column is the whole row.
    last = node["column_names"][-1].lower() if node.get("class") == "COLUMN_REF" else ""
    return bool(last) and last in tables


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node


def _words(tree: Any) -> Iterator[str]:
    for node in _nodes(tree):
        if set(node) == {"kind", "text"}:
            continue  # a literal
        for value in node.values():
            each = value if isinstance(value, list) else [value]
            yield from (word for word in each if isinstance(word, str))


def _register(connection: Any, places: dict[str, list[int]], data_file: int) -> None:
    import pyarrow as pa

    size = os.fstat(data_file).st_size
    room = MAX_ADDRESS_BYTES + 2 * size
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not places:
        return
    whole = pa.py_buffer(mmap.mmap(data_file, size, prot=mmap.PROT_READ))
    for name, (offset, length) in places.items():
        table = pa.ipc.open_stream(whole.slice(offset, length)).read_all()
        connection.register(name, table)


def _answer(connection: Any, request: dict[str, Any], result_file: int) -> int:
    import pyarrow as pa

    max_rows, max_bytes = request["max_rows"], request["max_bytes"]
    relation = connection.sql(request["query"])
    if relation is None:
        raise Refused("query must be one SELECT, got a statement without an answer")
    reader = relation.to_arrow_reader(min(max_rows + 1, 8192))
    num_rows = num_bytes = 0
    with os.fdopen(result_file, "wb", closefd=False) as sink, pa.ipc.new_stream(sink, reader.schema) as out:
        for batch in reader:
            num_rows += batch.num_rows
            num_bytes += batch.nbytes
            if num_rows > max_rows:
                raise Refused(
                    f"answer must be at most max_rows {max_rows} rows, got more; add a LIMIT or raise it"
                )
            if num_bytes > max_bytes:
                raise Refused(
                    f"answer must be at most {max_bytes} bytes, got more; name fewer columns or add a LIMIT"
                )
            out.write_batch(batch)
    return num_rows


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:600]


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _hear() -> dict[str, Any]:
    line = sys.stdin.readline()
    if not line:
        raise SystemExit(1)
    return json.loads(line)


if __name__ == "__main__":
    main()
