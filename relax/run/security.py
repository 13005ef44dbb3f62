"""The keys of a run: made in its directory by one setting, handed to each role as a path. It keeps no secret itself.

    <run_dir>/security/          see `flight.security.keys` and `relax.control.curve`
      server/                    of the queue and the control hub
      driver/ preprocess/ rollout/ actor/ ... recorder/ operator/ viewer/

Each principal may do to each table what its role does; `viewer` is for people who look into the run, `operator` for
those who change how many services it has.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from flight.security.access import ALL_TABLES, Role
from relax.config import RunConfig
from relax.control.scale import OPERATOR
from relax.partial_records import PARTIAL_TABLE
from relax.roles.config import SERVABLE

DIRECTORY = "security"
VALID_DAYS = 365.0
"""Longer than a run lasts."""

HOSTS = ("127.0.0.1", "localhost")
VIEWER = "viewer"
REPORTS: Mapping[str, Sequence[Role]] = {"metrics": ["produce"], "row_errors": ["produce"]}
GRANTS: Mapping[str, Mapping[str, Sequence[Role]]] = {
    "driver": {ALL_TABLES: ["admin"]},
    "preprocess": {
        "media": ["produce"],
        "prompts": ["produce"],
        "eval_prompts": ["produce"],
        "positions": ["produce", "consume", "read"],
        "rollouts": ["consume"],
        **REPORTS,
    },
    "rollout": {
        "media": ["read", "produce"],
        "prompts": ["consume"],
        "eval_prompts": ["consume"],
        "rollouts": ["produce"],
        "eval_rollouts": ["produce"],
        PARTIAL_TABLE: ["produce", "consume", "read"],
        **REPORTS,
    },
    "actor": {"media": ["read"], "rollouts": ["read", "consume", "produce"], ALL_TABLES: ["keep"], **REPORTS},
    "evaluation": {
        "media": ["read", "produce"],
        "eval_prompts": ["consume"],
        "eval_rollouts": ["produce"],
        "rollouts": ["read"],
        **REPORTS,
    },
    **{role: {"media": ["read"], "rollouts": ["consume", "produce", "read"], **REPORTS} for role in SERVABLE},
    "recorder": {"media": ["consume"], "rollouts": ["consume"], **REPORTS},
    OPERATOR: {},
    VIEWER: {ALL_TABLES: ["read"]},
}
"""Roles by principal and table."""


class RunSecurity:
    """Where each part of a run finds its keys; everything is None or empty where there are none.

    Args:
        directory: keys of the run, or None.
        queue_credentials: what all roles show to a queue that was there already, or None.
    """

    def __init__(self, directory: Path | None, queue_credentials: Path | None = None) -> None:
        self._directory = directory
        self._queue_credentials = queue_credentials

    @classmethod
    def make(cls, config: RunConfig, run_dir: Path) -> RunSecurity:
        """Make the keys of a run, if it shall have some; those of a run that is taken up again are kept."""
        attached = config.queue.credentials
        credentials = None if attached is None else Path(attached).resolve()
        if not config.security:
            return cls(None, credentials)
        directory = run_dir / DIRECTORY
        _make_keys(directory)
        return cls(directory, credentials)

    @property
    def hub_keys(self) -> Path | None:
        """Keys of the control hub."""
        return self._directory

    @property
    def queue_words(self) -> list[str]:
        """Words that a queue server of this run is started with."""
        return [] if self._directory is None else ["--keys", str(self._directory)]

    def credentials(self, principal: str) -> Path | None:
        """Return what a principal shows to the queue."""
        if self._queue_credentials is not None or self._directory is None:
            return self._queue_credentials
        return self._directory / principal

    def role_words(self, role: str) -> list[str]:
        """Return the words that a role is started with: paths, never what the files hold."""
        words = self._shown(role)
        return words if self._directory is None else [*words, "--control-keys", str(self._directory / role)]

    @property
    def look_words(self) -> str:
        """What is to be said to a command that looks into the queue, with a space before it."""
        return "".join(f" {word}" for word in self._shown(VIEWER))

    def _shown(self, principal: str) -> list[str]:
        credentials = self.credentials(principal)
        return [] if credentials is None else ["--credentials", str(credentials)]


def _make_keys(directory: Path) -> None:
    # Libraries that only a run with keys needs.
    from flight.security.keys import Wanted, make_keys
    from relax.control.curve import MEMBERS_FILE, make_curve_keys

    if (directory / MEMBERS_FILE).is_file():  # the last of them to be written
        return
    shutil.rmtree(directory, ignore_errors=True)
    wanted = [
        Wanted(name=name, grants=tables, shares_memory=name not in (OPERATOR, VIEWER))
        for name, tables in GRANTS.items()
    ]
    make_keys(directory, wanted, hosts=HOSTS, valid_days=VALID_DAYS)
    make_curve_keys(directory, [name for name in GRANTS if name not in ("driver", VIEWER)])
