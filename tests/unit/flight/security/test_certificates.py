"""Certificates that a server reads: good ones, and those with which it must not begin to listen."""

from __future__ import annotations

import shutil

import pytest

from flight.errors import InvalidRequestError
from flight.security.certificates import Certificates, stamp_of
from flight.security.keys import make_keys


@pytest.fixture
def home(tmp_path):
    """The directory of a server."""
    make_keys(tmp_path / "keys", [], hosts=["localhost"])
    return tmp_path / "keys" / "server"


def test_certificates_are_read_and_not_printed(home):
    """Logs show objects."""
    found = Certificates.load(home)
    assert found.key == (home / "key.pem").read_bytes()
    assert repr(found) == "Certificates()"


@pytest.mark.parametrize("name", ["certificate.pem", "key.pem", "roots.pem"])
def test_missing_file_is_named(home, name):
    """With the way to get one."""
    (home / name).unlink()
    with pytest.raises(
        InvalidRequestError, match=rf"{name}: must be a file .* make keys with `python -m flight keys`"
    ):
        Certificates.load(home)


@pytest.mark.parametrize("name", ["certificate.pem", "key.pem", "roots.pem"])
def test_file_that_is_no_pem_is_refused(home, name):
    """Such as one that is half written."""
    (home / name).write_bytes((home / name).read_bytes()[:40])
    with pytest.raises(InvalidRequestError, match=r"must hold certificate\.pem, key\.pem, roots\.pem in PEM"):
        Certificates.load(home)


def test_key_of_another_certificate_is_refused(home, tmp_path):
    """What a look between two writes sees."""
    make_keys(tmp_path / "other", [], hosts=["localhost"])
    before = stamp_of(home)
    shutil.copy(tmp_path / "other" / "server" / "key.pem", home / "key.pem")
    assert stamp_of(home) != before
    with pytest.raises(InvalidRequestError, match=r"must be the key of certificate\.pem, got another"):
        Certificates.load(home)


def test_key_that_others_may_read_is_refused(home):
    """It is the server's alone."""
    (home / "key.pem").chmod(0o640)
    with pytest.raises(
        InvalidRequestError, match=r"must be for its owner alone \(0600\), got 0640; chmod 600 it"
    ):
        Certificates.load(home)


def test_expired_certificate_is_refused(tmp_path):
    """Nobody could connect."""
    make_keys(tmp_path / "old", [], hosts=["localhost"], valid_days=-0.001)
    with pytest.raises(
        InvalidRequestError, match=r"must be valid still, got one that ended .*; make new keys"
    ):
        Certificates.load(tmp_path / "old" / "server")
