"""The command that runs a server."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from flight.cli.terminal import DEFAULT_PORT, Json, address, exit_codes
from flight.errors import InvalidRequestError
from flight.files.table_config import ServerConfig, load_config
from flight.journal.config import JournalConfig
from flight.server.idle import IDLE_S
from flight.server.process import serve as serve_until_stopped
from flight.shared.host import DEFAULT_ARENA_BYTES
from flight.storage.process import DRAIN_S, StorageOptions, serve_storage

Storage = Annotated[
    str | None,
    typer.Option(metavar="URI", help="Keep values for the server at this address, the coordinator."),
]
Location = Annotated[str, typer.Option(metavar="URI", help="With --storage: where others reach this server.")]
MemoryBytes = Annotated[
    int, typer.Option(min=1, help="With --storage and --spill-dir: bytes that stay in memory.")
]
DrainS = Annotated[
    float, typer.Option(min=0, help="With --storage: seconds to wait at the end for rows to be finished.")
]

Journal = Annotated[
    Path | None, typer.Option(help="Directory in which tables outlive the server; made if it does not exist.")
]
JournalLimit = Annotated[
    int | None, typer.Option(min=1, help="Disk that the journal may use; no bound if left out.")
]

SpillDir = Annotated[
    Path | None, typer.Option(help="Directory for the oldest values of tables with `spill`.")
]
PutIdleS = Annotated[
    float, typer.Option(min=0.1, help="Seconds of silence after which an open put is ended.")
]
Keys = Annotated[
    Path | None, typer.Option(help="Directory made by `keys`: TLS, and only its principals may call.")
]
MutualTls = Annotated[bool, typer.Option(help="With --keys: ask callers for their certificates, too.")]
AllowInsecure = Annotated[
    bool, typer.Option("--allow-insecure", help="Listen beyond loopback without keys, in a closed network.")
]


def serve(
    *,
    config: Annotated[
        Path | None, typer.Option(help="YAML file that declares tables; see conf/tables.yaml.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = DEFAULT_PORT,
    uri_file: Annotated[
        Path | None, typer.Option(help="Write the address to this file once it answers.")
    ] = None,
    parent_pid: Annotated[int | None, typer.Option(help="Exit when this process is gone.")] = None,
    capacity_bytes: Annotated[
        int | None, typer.Option(min=1, help="Bytes that all tables together may hold; no bound if left out.")
    ] = None,
    spill_dir: SpillDir = None,
    journal: Journal = None,
    journal_limit_bytes: JournalLimit = None,
    put_idle_s: PutIdleS = IDLE_S,
    as_json: Json = False,
    shared_memory: Annotated[
        bool, typer.Option(help="Let clients of this host and user share memory instead of using the socket.")
    ] = True,
    shared_memory_bytes: Annotated[
        int, typer.Option(min=1 << 20, help="Size of the memory that is shared; made as it is used.")
    ] = DEFAULT_ARENA_BYTES,
    storage: Storage = None,
    location: Location = "",
    memory_bytes: MemoryBytes = StorageOptions.memory_bytes,
    drain_s: DrainS = DRAIN_S,
    keys: Keys = None,
    mutual_tls: MutualTls = True,
    allow_insecure: AllowInsecure = False,
) -> None:
    """Run a server; its first line of output is its address. Ctrl-C or SIGTERM ends it.

    With --storage it joins a running server and keeps values for it; the first Ctrl-C then lets consumers finish them.
    """
    with exit_codes():
        if storage is not None:
            _check_storage(config or journal)
            options = StorageOptions(
                coordinator=address(storage),
                host=host,
                port=port,
                location=location,
                capacity_bytes=capacity_bytes,
                spill_dir=spill_dir,
                memory_bytes=memory_bytes,
                shared_memory_bytes=shared_memory_bytes if shared_memory else 0,
                put_idle_s=put_idle_s,
                drain_s=drain_s,
                uri_file=uri_file,
                parent_pid=parent_pid,
                keys=keys,
                mutual_tls=mutual_tls,
                allow_insecure=allow_insecure,
            )
            code = serve_storage(options, announce=_print_json if as_json else _print_line)
            os._exit(code)
        found = ServerConfig(tables=()) if config is None else load_config(config)
        if spill_dir is None and found.spill_dir is not None:
            spill_dir = Path(found.spill_dir)
        code = serve_until_stopped(
            host,
            port,
            tables=found.tables,
            uri_file=uri_file,
            parent_pid=parent_pid,
            capacity_bytes=capacity_bytes or found.capacity_bytes,
            spill_dir=spill_dir,
            put_idle_s=put_idle_s,
            announce=_print_json if as_json else _print_line,
            shared_memory_bytes=shared_memory_bytes if shared_memory else 0,
            journal=_journal_settings(found.journal, journal, journal_limit_bytes),
            keys=keys,
            mutual_tls=mutual_tls,
            allow_insecure=allow_insecure,
        )
        # Open calls keep gRPC threads alive, and an orderly interpreter exit would wait for them.
        os._exit(code)


def _check_storage(tables: Path | None) -> None:
    if tables is not None:
        raise InvalidRequestError(
            f"serve: config and journal must be left out with --storage, got {tables}; "
            "the coordinator has the tables"
        )


def _journal_settings(
    found: JournalConfig | None, directory: Path | None, limit_bytes: int | None
) -> JournalConfig | None:
    """Return what the file says of the journal, changed by the command line; None for no journal."""
    if directory is not None:
        found = replace(found or JournalConfig(directory=""), directory=str(directory))
    if found is not None and limit_bytes is not None:
        found = replace(found, limit_bytes=limit_bytes)
    return found


def _print_line(uri: str) -> None:
    print(f"listening on {uri}", flush=True)


def _print_json(uri: str) -> None:
    print(json.dumps({"uri": uri, "pid": os.getpid()}), flush=True)
