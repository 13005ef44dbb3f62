"""What may change in a table that is in use."""

from __future__ import annotations

import pyarrow as pa
import pytest

from flight.errors import SchemaMismatchError
from flight.schema import Column, ConsumerSpec
from flight.server.description import described_schema
from flight.state.evolution import evolve
from flight.state.ledger import Ledger
from tests.kit.queues import prompts_spec, rollouts_spec

SCORE = Column(name="score", type=pa.float32(), meaning="how good", writer="judge", nullable=True)


def test_evolve_adds_and_is_idempotent():
    """What is there and the same changes nothing."""
    spec = prompts_spec()
    judge = ConsumerSpec(name="judge", columns=("score",))
    grown = evolve(spec, [SCORE], [judge])
    assert grown.columns == (*spec.columns, SCORE)
    assert grown.consumers == (*spec.consumers, judge)
    assert evolve(grown, [SCORE, spec.columns[0]], [judge]) == grown


def test_evolve_names_every_difference():
    """A changed type, a changed meaning, a column without nulls and a changed consumer, all in one message."""
    with pytest.raises(SchemaMismatchError) as caught:
        evolve(
            prompts_spec(),
            [
                Column(name="text", type=pa.int64(), meaning="the answer", writer="preprocess"),
                Column(name="new", type=pa.int64(), meaning="new"),
            ],
            [ConsumerSpec(name="rollout", columns=())],
        )
    assert str(caught.value) == (
        "alter prompts: columns and consumers must be new or the same as they are, got 4 difference(s): "
        "column 'text': expected type string, got int64; "
        "column 'text': expected meaning 'the question', got 'the answer'; "
        "column 'new': expected nullable, for rows that are there have none, got not nullable; "
        "consumer 'rollout': expected columns ('text',), got ()"
    )


def test_worker_that_knows_the_table_as_it_was_may_still_create_it():
    """A process that restarts with the old definition is not shut out."""
    ledger = Ledger()
    ledger.create(prompts_spec())
    assert ledger.alter("prompts", [SCORE], [])
    assert not ledger.alter("prompts", [SCORE], [])
    assert not ledger.create(prompts_spec())
    assert not ledger.create(evolve(prompts_spec(), [SCORE], []))


def test_description_holds_all_that_defines_a_table():
    """Field metadata for columns, small JSON texts for the table."""
    schema = described_schema(rollouts_spec())
    notes = {key.decode(): value.decode() for key, value in schema.metadata.items()}
    assert notes["table"] == "rollouts"
    assert notes["group_size"] == "2"
    assert notes["tickets"] == "null"
    assert '"max_staleness":0' in notes["staleness"]
    assert '"sampler":"groups"' in notes["consumers"]
    assert notes["capacity_rows"] == "64"
    field = schema.field("completion_token_ids")
    assert {key: field.metadata[key] for key in (b"meaning", b"unit", b"shape", b"writer")} == {
        b"meaning": b"the answer",
        b"unit": b"tokens",
        b"shape": b"[num_tokens]",
        b"writer": b"rollout",
    }
