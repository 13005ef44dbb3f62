"""Values on other hosts: storage servers that join a coordinator, which is an ordinary queue server.

messages   what crosses the wire beyond the messages of the queue
addresses  the number by which a row's values are found: who has them, and which of theirs they are; pure
stubs      what the coordinator keeps of rows whose values lie elsewhere; pure
book       who has joined, what they hold and may free; pure
rotation   whom a producer writes to next; pure
values     the values of a storage server, in memory and on its disk
server     its Flight face: rows in, values out
member     its seat at the coordinator: joins, registers, hears what is free
process    `python -m flight serve --storage`

The coordinator keeps every decision: rows, leases, staleness, plans, and the small columns. A storage server knows no
row, no consumer and no lease; it keeps what it is given until the coordinator says that nobody needs it. Its values are
lost with it: their rows leave their tables, counted as `lost`, and nobody waits for them.
"""
