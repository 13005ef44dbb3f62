"""A client that takes rows in shared memory, says so, and holds them until it is killed."""

from __future__ import annotations

import sys

from flight.client import QueueClient


def main(uri: str) -> None:
    """Hold what a take returned, and slots that nothing was put from yet."""
    with QueueClient(uri, identity="holder", deadline_s=10.0) as client:
        lease = client.take("rows", "c", max_rows=64)
        print(f"holding {lease.table.num_rows}", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1])
