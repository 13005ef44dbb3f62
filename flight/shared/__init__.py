"""Rows between processes of one host without a socket in between: one arena of shared memory a server.

arena   who has which bytes; pure
layout  tables as places in the arena, and back; pure
wire    what the Unix socket says, and whom it lets in
host    the server's side
guest   the client's side

The arena is a memfd: it has no name, so that nothing is left of it once the last process that maps it is gone, however
they ended. The client gets its descriptor over a Unix socket in a directory that only this user may enter. Bytes live
in slots. A slot is held by grants (one a take or a put of a client, over when the client says so or its socket closes)
and by the server's own tables; it is free when nobody holds it. Time frees nothing: a slow reader keeps its bytes.
"""
