"""Where a server may listen, and when it looks at its certificates anew."""

from __future__ import annotations

import shutil
from contextlib import closing

import pytest

from flight.errors import InvalidRequestError
from flight.security.keys import make_keys
from flight.server.protection import Protection, check_address


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "[::1]", "localhost"])
def test_loopback_needs_no_keys(host):
    """Only processes of this host reach it."""
    check_address(host, is_protected=False, allow_insecure=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", "localhost.example.org", ""])
def test_other_addresses_need_keys_or_a_word(host):
    """The error says both."""
    check_address(host, is_protected=True, allow_insecure=False)
    check_address(host, is_protected=False, allow_insecure=True)
    with pytest.raises(
        InvalidRequestError, match=r"must be a loopback address without --keys, .* --allow-insecure"
    ):
        check_address(host, is_protected=False, allow_insecure=False)


@pytest.fixture
def keys(tmp_path):
    """Two sets of keys."""
    for name in ("keys", "new"):
        make_keys(tmp_path / name, [], hosts=["localhost"])
    return tmp_path / "keys"


def test_protection_asks_for_certificates_of_callers_unless_told_otherwise(keys):
    """Mutual TLS is the rule."""
    with closing(Protection(keys)) as protection:
        options = protection.options()
    assert options["verify_client"] is True
    assert options["root_certificates"] == (keys / "server" / "roots.pem").read_bytes()
    with closing(Protection(keys, mutual_tls=False)) as protection:
        assert set(protection.options()) == {"tls_certificates", "middleware"}


def test_protection_uses_new_certificates_once_they_are_whole(keys):
    """A certificate without its key changes nothing; the same files do when they are asked for."""
    with closing(Protection(keys)) as protection:
        before = protection.options()["tls_certificates"]
        assert protection.look() is False
        shutil.copy(keys.parent / "new" / "server" / "certificate.pem", keys / "server")
        assert protection.look() is False
        assert protection.options()["tls_certificates"] == before
        shutil.copy(keys.parent / "new" / "server" / "key.pem", keys / "server")
        assert protection.look() is True
        assert protection.look() is False
        assert protection.options()["tls_certificates"] != before
        assert protection.look(anew=True) is True


def test_protection_needs_its_files(tmp_path):
    """Before the server listens."""
    with pytest.raises(InvalidRequestError, match="make keys with `python -m flight keys`"):
        Protection(tmp_path)


def test_servers_of_a_run_need_a_principal_to_call_each_other(keys):
    """Its directory has the name that the page says."""
    with closing(Protection(keys)) as protection:
        with pytest.raises(InvalidRequestError, match="keys must be there of a principal 'storage'"):
            protection.storage_credentials()
        shutil.copytree(keys / "server", keys / "storage")
        assert protection.storage_credentials().roots == (keys / "server" / "roots.pem").read_bytes()
