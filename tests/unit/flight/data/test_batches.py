"""What a table refuses, word for word."""

from __future__ import annotations

import pyarrow as pa
import pytest

from flight.data.batches import check_batch, check_schema
from flight.errors import InvalidRequestError, SchemaMismatchError
from tests.kit.queues import rollouts_spec

SPEC = rollouts_spec()
GOOD = {
    "uid": pa.array(["a", "b"]),
    "group_id": pa.array(["g", None], pa.string()),
    "policy_version_start": pa.array([3, 4]),
    "completion_token_ids": pa.array([[1], [2, 3]], pa.list_(pa.int32())),
}


def refusal(columns: dict, writer: str = "") -> str:
    """Return the message with which a batch is refused."""
    batch = pa.record_batch(columns)
    with pytest.raises((SchemaMismatchError, InvalidRequestError)) as caught:
        check_batch(SPEC, batch, check_schema(SPEC, batch.schema, writer))
    return str(caught.value)


def test_batch_that_fits_is_split_into_keys_and_data():
    """A missing group_id is the uid; a nullable column may be absent; the version of each row is read."""
    batch = pa.record_batch(GOOD)
    checked = check_batch(SPEC, batch, check_schema(SPEC, batch.schema, "rollout"))
    assert (checked.uids, checked.group_ids, checked.versions) == (["a", "b"], ["g", "b"], [3, 4])
    assert checked.data.schema.names == ["policy_version_start", "completion_token_ids"]
    assert checked.writers == ("rollout",)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (
            {"completion_token_ids": pa.array([[1], [2]], pa.list_(pa.int64()))},
            "column 'completion_token_ids': expected list<item: int32>, got list<item: int64>",
        ),
        (
            {"policy_version_start": pa.array([1, 2], pa.int32())},
            "column 'policy_version_start': expected int64, got int32",
        ),
        ({"uid": pa.array(["a", "b"], pa.large_string())}, "column 'uid': expected string, got large_string"),
        ({"uid": None}, "column 'uid': expected string, got no such column"),
        (
            {"completion_token_ids": None},
            "column 'completion_token_ids': expected list<item: int32>, got no such column",
        ),
        (
            {"tokens": pa.array([1, 2])},
            "column 'tokens': expected one of ['policy_version_start', 'completion_token_ids', 'media', 'advantage'], "
            "got an unknown column",
        ),
        ({"row_id": pa.array([1, 2])}, "column 'row_id': expected absent (the server gives it), got int64"),
        (
            {"completion_token_ids": pa.array([[1], None], pa.list_(pa.int32()))},
            "column 'completion_token_ids': expected no nulls, got 1 in 2 rows",
        ),
        ({"uid": pa.array(["a", None])}, "column 'uid': expected no nulls, got 1 in 2 rows"),
    ],
)
def test_batch_that_differs_is_refused_with_the_difference(changes, fault):
    """Column, what was expected, what came."""
    columns = {name: values for name, values in (GOOD | changes).items() if values is not None}
    assert refusal(columns) == f"put into rollouts: batch must fit the table, got 1 difference(s): {fault}"


def test_all_differences_are_told_at_once():
    """Nobody should have to mend a batch one error at a time."""
    message = refusal({"uid": pa.array([1]), "advantage": pa.array([0.5])})
    assert message == (
        "put into rollouts: batch must fit the table, got 2 difference(s): column 'uid': expected string, got int64; "
        "column 'advantage': expected float, got double"
    )


def test_writer_may_only_put_its_own_columns():
    """The rollout does not write advantages."""
    message = refusal(GOOD | {"advantage": pa.array([0.5, 0.5], pa.float32())}, writer="rollout")
    assert message.endswith("column 'advantage': expected to be put by writer 'actor', got writer 'rollout'")


def test_batch_with_keys_only_is_refused():
    """A put must bring something."""
    assert refusal({"uid": GOOD["uid"]}).endswith(
        "columns: expected some of ['policy_version_start', 'completion_token_ids', 'media', 'advantage'], got none"
    )


def test_empty_uid_is_refused():
    """A name must be a name."""
    assert refusal(GOOD | {"uid": pa.array(["a", ""])}) == (
        "put into rollouts: uid must be a non-empty name, got '' in row 1"
    )


def test_inconsistent_buffers_are_refused():
    """Offsets that point outside the values would crash a later reader."""
    offsets = pa.py_buffer(pa.array([0, 1000, 2], pa.int32()).buffers()[1])
    broken = pa.Array.from_buffers(
        pa.list_(pa.int32()), 2, [None, offsets], children=[pa.array([1, 2], pa.int32())]
    )
    message = refusal(GOOD | {"completion_token_ids": broken})
    assert message.startswith(
        "put into rollouts: batch must be valid Arrow data, got: In column 3: Invalid: Offset"
    )
