"""The smallest servers that store and forward: bare pyarrow Flight and ZeroMQ. Not queues: no index, no lease, no ack.

    python -m busbench.servers flight|zmq

The first line on stdout is `listening on ADDRESS`.
"""

from __future__ import annotations

import os
import sys
from typing import Any

HOST = "127.0.0.1"


def serve_flight() -> None:
    """Keep what a DoPut brings under its path until a DoGet of that path takes it."""
    import pyarrow as pa
    import pyarrow.flight as paflight

    from flight.memory import keep_freed_memory

    keep_freed_memory()
    kept: dict[bytes, pa.Table] = {}

    class Server(paflight.FlightServerBase):
        def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
            kept[descriptor.path[0]] = pa.Table.from_batches([chunk.data for chunk in reader], reader.schema)

        def do_get(self, context: Any, ticket: Any) -> paflight.RecordBatchStream:
            return paflight.RecordBatchStream(kept.pop(ticket.ticket))

    server = Server(f"grpc://{HOST}:0")
    print(f"listening on grpc://{HOST}:{server.port}", flush=True)
    server.serve()


def serve_zmq() -> None:
    """Keep the frames of a put under their key until a take of that key."""
    import zmq

    socket = zmq.Context().socket(zmq.ROUTER)
    port = socket.bind_to_random_port(f"tcp://{HOST}")
    print(f"listening on tcp://{HOST}:{port}", flush=True)
    kept: dict[bytes, list[zmq.Frame]] = {}
    while True:
        peer, _, verb, key, *frames = socket.recv_multipart(copy=False)
        if verb.bytes == b"put":
            kept[key.bytes] = frames
            frames = [b"ok"]
        else:
            frames = kept.pop(key.bytes)
        socket.send_multipart([peer, b"", *frames], copy=False)


if __name__ == "__main__":
    {"flight": serve_flight, "zmq": serve_zmq}[sys.argv[1]]()
    os._exit(0)
