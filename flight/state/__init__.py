"""The pure half of the queue: rows, leases, groups, tickets and plans. No sockets, locks, threads, clocks or values."""
