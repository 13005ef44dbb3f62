"""The queue with nothing but pyarrow: python examples/pyarrow_only.py grpc://127.0.0.1:8815

Creates a table, puts rows, takes some under a lease, finishes them, and is refused when a column is wrong. The messages
are those of docs/protocol.md.
"""

import base64
import json
import sys

import pyarrow as pa
import pyarrow.flight as paflight

client = paflight.connect(sys.argv[1] if len(sys.argv) > 1 else "grpc://127.0.0.1:8815")
within = paflight.FlightCallOptions(timeout=60)


def act(name, **body):
    """Do an action; its body and its answer are JSON."""
    [result] = client.do_action(paflight.Action(name, json.dumps({"v": 1} | body).encode()), within)
    return json.loads(result.body.to_pybytes())


def put(table, rows):
    """Put rows; the server acknowledges each batch, and close raises what it refuses."""
    writer, acknowledgements = client.do_put(paflight.FlightDescriptor.for_path(table), rows.schema, within)
    try:
        writer.write_table(rows)
        writer.done_writing()
        return json.loads(acknowledgements.read().to_pybytes())
    finally:
        writer.close()


def take(table, consumer, max_rows):
    """Lease rows; returns them and how it went."""
    ticket = {
        "v": 1,
        "verb": "take",
        "table": table,
        "consumer": consumer,
        "max_rows": max_rows,
        "deadline_s": 10,
    }
    reader = client.do_get(paflight.Ticket(json.dumps(ticket).encode()), within)
    rows = pa.Table.from_batches([chunk.data for chunk in reader], reader.schema)
    return rows, {key.decode(): value.decode() for key, value in reader.schema.metadata.items()}


schema = pa.schema(
    [
        pa.field("text", pa.string(), metadata={"meaning": "a sentence", "nullable": "false"}),
        pa.field("score", pa.float32(), metadata={"meaning": "how good it is", "unit": "points"}),
    ]
)
act(
    "create_table",
    table="sentences",
    arrow_schema=base64.b64encode(schema.serialize()).decode(),
    consumers=[{"name": "reader", "columns": ["text"]}],
)

rows = pa.table(
    {"uid": ["a", "b", "c"], "text": ["One.", "Two.", "Three."], "score": pa.array([1, 2, 3], pa.float32())}
)
print("put:", put("sentences", rows))

taken, notes = take("sentences", "reader", max_rows=2)
print("taken:", taken.select(["uid", "text", "attempt"]).to_pylist())
print("acked:", act("ack", table="sentences", consumer="reader", lease_id=notes["lease_id"]), "rows")

try:
    put("sentences", rows.rename_columns(["uid", "text", "scores"]))
except paflight.FlightServerError as error:
    refusal = json.loads(error.extra_info)
    print("refused:", refusal["code"])
    print(refusal["message"])
