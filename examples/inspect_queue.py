"""Look into a running queue with nothing but pyarrow: python examples/inspect_queue.py grpc://127.0.0.1:8815"""

import sys

import pyarrow.flight as paflight

client = paflight.connect(sys.argv[1] if len(sys.argv) > 1 else "grpc://127.0.0.1:8815")
for info in client.list_flights():
    print(info.descriptor.path[0].decode(), info.total_records, "rows,", info.total_bytes, "bytes")
    batch = next((chunk.data for chunk in client.do_get(info.endpoints[0].ticket)), None)
    for row in batch.slice(0, 3).to_pylist() if batch else []:
        print("  ", {name: str(value)[:40] for name, value in row.items()})
