"""Principals, roles and rights, without a server."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import get_args

import pytest

from flight.errors import AccessDeniedError, InvalidRequestError, UnauthenticatedError
from flight.security.access import AccessList, Principal, Right, bearer_token, hash_token

NOW = datetime(2026, 1, 2, tzinfo=UTC)
TOKEN = "t" * 43


def principal(**changes):
    """Return a rollout worker's principal."""
    facts = {
        "name": "rollout-0",
        "token_sha256": hash_token(TOKEN),
        "grants": {"prompts": ["consume"], "rollouts": ["produce"]},
    }
    return Principal(**(facts | changes))


@pytest.mark.parametrize(
    ("right", "table", "is_allowed"),
    [
        ("call", "other", True),
        ("look", "prompts", True),
        ("look", "other", False),
        ("consume", "prompts", True),
        ("produce", "prompts", False),
        ("read", "prompts", False),
        ("produce", "rollouts", True),
        ("consume", "rollouts", False),
        ("admin", "rollouts", False),
        ("values", "prompts", True),
        ("values", "rollouts", False),
        ("values", "", False),
        ("store", "prompts", False),
        ("keep", "*", False),
    ],
)
def test_principal_may_do_what_its_roles_say_and_no_more(right, table, is_allowed):
    """A role on one table is none on another."""
    assert principal().may(right, table) is is_allowed


@pytest.mark.parametrize("right", get_args(Right))
def test_admin_may_do_everything_on_its_tables(right):
    """`*` stands for every table."""
    assert principal(grants={"*": ["admin"]}).may(right, "any")
    assert not principal(grants={"one": ["admin"]}).may("look", "other")


def test_check_names_the_right_and_the_table():
    """The text is the same for tables that there are not."""
    with pytest.raises(AccessDeniedError) as caught:
        principal().check("consume", ["prompts", "secrets"])
    assert str(caught.value) == (
        "rollout-0: must have the right to consume on table 'secrets', got none; whoever runs the server grants it"
    )


def test_visible_leaves_out_tables_without_a_role():
    """So that nobody learns their names."""
    assert principal().visible("look", ["rollouts", "secrets", "prompts"]) == ["rollouts", "prompts"]


def test_authenticate_finds_the_owner_of_a_token():
    """By its hash."""
    assert AccessList([principal()]).authenticate(TOKEN, NOW).name == "rollout-0"


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (None, "call: a bearer token must come with it, got none; see docs/security.md"),
        ("", "call: a bearer token must come with it, got none; see docs/security.md"),
        ("x" * 43, "call: the bearer token must be known to the server, got another"),
    ],
)
def test_authenticate_refuses_without_repeating_the_token(token, message):
    """Missing and wrong ones."""
    with pytest.raises(UnauthenticatedError) as caught:
        AccessList([principal()]).authenticate(token, NOW)
    assert str(caught.value) == message


def test_authenticate_refuses_at_the_moment_of_expiry():
    """One microsecond earlier it is good."""
    access = AccessList([principal(expires_at=NOW)])
    assert access.authenticate(TOKEN, NOW - timedelta(microseconds=1)).name == "rollout-0"
    with pytest.raises(UnauthenticatedError, match="must not have expired, got one of 2026-01-02T00:00:00"):
        access.authenticate(TOKEN, NOW)


@pytest.mark.parametrize(
    "second",
    [
        principal(token_sha256=hash_token("other")),
        principal(name="other"),
        principal(name="", token_sha256="x"),
    ],
)
def test_access_list_refuses_shared_names_and_tokens(second):
    """Else the audit log could not say who it was."""
    with pytest.raises(InvalidRequestError, match="names and tokens must be one principal's own"):
        AccessList([principal(), second])


@pytest.mark.parametrize(
    ("headers", "token"),
    [
        ({"authorization": ["Bearer abc"]}, "abc"),
        ({"Authorization": [b"bearer abc"]}, "abc"),
        ({"authorization": ["Basic abc"]}, None),
        ({"authorization": ["Bearer "]}, None),
        ({"authorization": ["Bearer a", "Bearer b"]}, None),
        ({}, None),
    ],
)
def test_bearer_token_takes_exactly_one(headers, token):
    """Two headers could mean two callers."""
    assert bearer_token(headers) == token
