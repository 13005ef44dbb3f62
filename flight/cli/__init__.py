"""The command line: run a queue server, look into one while a job uses it, and feed, drain or change its tables.

Exit codes: 0 well, 1 another failure, 2 wrong usage or request, 3 no server at the address, 4 no such table, 5 not
within the deadline, 6 data do not fit the table, 7 not allowed, 130 interrupted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from flight.cli import changing, following, keeping, keying, looking, serving

SERVER, LOOK, CHANGE, KEEP = "Run", "Look (no row is consumed)", "Change", "Keep"

COMMANDS: tuple[tuple[str, str, Callable[..., None], str], ...] = (
    ("serve", SERVER, serving.serve, "serve --config conf/tables.yaml"),
    ("keys", SERVER, keying.keys, "keys keys --host 127.0.0.1"),
    ("ls", LOOK, looking.list_tables, "ls --uri grpc://127.0.0.1:8815"),
    ("schema", LOOK, looking.schema, "schema rollouts"),
    ("head", LOOK, looking.head, "head rollouts -n 2 --columns modality,reward"),
    ("tail", LOOK, following.tail, "tail rollouts --columns modality,reward --count 10"),
    ("stats", LOOK, looking.stats, "stats rollouts --json"),
    ("watch", LOOK, following.watch, "watch rollouts --interval 2"),
    ("sql", LOOK, looking.sql, 'sql "select modality, avg(reward) from rollouts group by 1"'),
    ("export", LOOK, looking.export, "export rollouts rollouts.parquet"),
    ("create", CHANGE, changing.create, "create --config conf/tables.yaml"),
    ("put", CHANGE, changing.put, "put prompts prompts.jsonl"),
    ("seal", CHANGE, changing.seal, "seal prompts --expected-rows 1000"),
    ("drain", CHANGE, changing.drain, "drain rollouts --deadline-s 60"),
    ("set-max-staleness", CHANGE, changing.set_max_staleness, "set-max-staleness rollouts 2"),
    ("requeue", CHANGE, changing.requeue, "requeue rollouts actor"),
    ("truncate", CHANGE, changing.truncate, "truncate rollouts --yes"),
    ("drop", CHANGE, changing.drop, "drop rollouts --yes"),
    ("snapshot", KEEP, keeping.snapshot, "snapshot grpc://127.0.0.1:8815 queue.snapshot"),
    ("restore", KEEP, keeping.restore, "restore queue.snapshot journal"),
    ("fsck", KEEP, keeping.fsck, "fsck journal"),
)
"""Name, panel of the help, function and example of each command."""

app = typer.Typer(
    name="flight",
    help="TransferQueue: typed tables on an Arrow Flight server.",
    epilog="Exit codes: 0 well, 1 another failure, 2 wrong usage or request, 3 no server, 4 no such table, "
    "5 deadline passed, 6 data do not fit, 7 not allowed, 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for _name, _panel, _function, _example in COMMANDS:
    app.command(_name, rich_help_panel=_panel, epilog=f"Example: python -m flight {_example}")(_function)

main: Callable[[], Any] = app
"""Entry point of the console script."""
