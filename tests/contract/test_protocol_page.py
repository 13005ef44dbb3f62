"""docs/protocol.md says everything that crosses the wire: each action, ticket, message, field, key and code."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import msgspec
import pytest

from flight import messages, stream_messages
from flight.broker import Broker
from flight.data.filters import OPS
from flight.errors import BY_CODE
from flight.schema import KEY_COLUMNS, MARK_COLUMNS, ConsumerSpec, MixSpec, StalenessSpec, TicketSpec
from flight.server import watching
from flight.shared import layout, wire
from flight.storage import messages as storage_messages
from tests.kit.queues import rollouts_spec

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "protocol.md").read_text()
CODE = " ".join(re.findall(r"`[^`]+`|```.*?```", PAGE, re.DOTALL))
WORDS = set(re.findall(r"\w+", CODE))
"""Words that stand in code on the page."""

MESSAGES = {
    f"{module.__name__}.{name}": message
    for module in (messages, stream_messages, layout, wire, storage_messages)
    for name, message in inspect.getmembers(module, inspect.isclass)
    if issubclass(message, msgspec.Struct) and not name.startswith("_")
}


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_page_names_every_field_of_every_message(name):
    """A field that is not on the page does not exist for other languages."""
    info = msgspec.inspect.type_info(MESSAGES[name])
    fields = {field.encode_name for field in info.fields}
    tag = {info.tag} if isinstance(info.tag, str) else set()
    assert (fields | tag) - WORDS == set()


@pytest.mark.parametrize("spec", [ConsumerSpec, MixSpec, StalenessSpec, TicketSpec])
def test_page_names_every_field_of_a_table(spec):
    """The parts of `create_table`."""
    assert {field.name for field in msgspec.inspect.type_info(spec).fields} - WORDS == set()


@pytest.mark.parametrize(
    "names",
    [
        *(
            {*messages.ACTIONS, *storage_messages.ACTIONS},
            set(BY_CODE),
            {*KEY_COLUMNS, *MARK_COLUMNS, "attempt"},
        ),
        *({"status", "lease_id", "policy_version", "num_rows", "max_staleness", "staleness_policy"},),
        *({"meaning", "unit", "shape", "writer", "nullable"}, set(watching.SCHEMA.names)),
        {"rows", "empty", "sealed", "outdated", "finished"},
    ],
    ids=["actions", "codes", "columns", "take metadata", "field metadata", "watch", "statuses"],
)
def test_page_names_every_action_code_and_key(names):
    """What is not a message: names of actions, error codes, columns and metadata keys."""
    assert names - WORDS == set()


def test_page_names_every_statistic():
    """Of a table, its consumers and its staleness bound."""
    broker = Broker()
    broker.create_table(rollouts_spec(), exist_ok=False)
    found = broker.stats("rollouts")["rollouts"]
    assert {*found, *found["consumers"]["recorder"], *found["staleness"]} - WORDS == set()


def test_page_names_every_comparison_of_a_filter():
    """Signs and words."""
    assert set(OPS) - set(re.split(r"[\s`]+", CODE)) == set()
