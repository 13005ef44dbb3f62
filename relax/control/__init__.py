"""Control plane: who is there, what to do and which weights are newest. It carries no rows, no weights.

`ControlHub` (in the driver) owns a small replicated key-value state; every service holds a `ControlMember`
with a copy of it. State machines are in `hub_state` and `replica`, sockets and threads in `hub` and
`member`.
"""
