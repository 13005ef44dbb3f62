"""What a server must not forget, on disk: every change in order, the values of live rows, and how to read them back.

The directory of a journal holds numbered files, all made of checksummed frames (`flight.journal.format`):

    0000000001.log      decisions in order (put, take, ack, seal, ...), the Arrow values of a put inside its own frame
    0000000002.rows     values of live rows, moved together by compaction
    0000000003.state    a checkpoint: all tables as they were after a decision, and where the values of live rows lie
    synced              the last decision that is known to be on the disk
    reserve             room for the decisions that make room when the disk is full
    lock                held by the server that uses the directory

Recovery reads the checkpoint and replays the decisions after it; so does everybody else who wants to know what is in
a directory. A file `FILE` of `python -m flight snapshot` is a checkpoint with the values inside.
"""
