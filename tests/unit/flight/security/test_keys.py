"""Keys of a run on disk."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from cryptography import x509

from flight.client.credentials import Credentials
from flight.errors import InvalidRequestError
from flight.security.access import AccessFile
from flight.security.guard import load_access
from flight.security.keys import Wanted, make_keys


@pytest.fixture
def keys(tmp_path):
    """Keys of two principals."""
    wanted = [
        Wanted(name="driver", grants={"*": ["admin"]}, shares_memory=True),
        Wanted(name="viewer", grants={"*": ["read"]}),
    ]
    make_keys(tmp_path / "security", wanted, hosts=["127.0.0.1", "localhost"])
    return tmp_path / "security"


def test_keys_are_for_their_owner_alone(keys):
    """Directories 0700, files 0600."""
    modes = {path.stat().st_mode & 0o777 for path in keys.rglob("*") if path.is_file()}
    assert modes == {0o600}
    assert {path.stat().st_mode & 0o777 for path in [keys, *keys.iterdir()] if path.is_dir()} == {0o700}


def test_access_file_holds_hashes_and_no_token(keys):
    """Each token opens its own principal's door."""
    access = load_access(keys / "access.json")
    text = (keys / "access.json").read_text()
    for name in ("driver", "viewer"):
        token = Credentials.load(keys / name).token
        assert token not in text
        assert access.authenticate(token, datetime.now(UTC)).name == name
    [driver, viewer] = msgspec.json.decode(text, type=AccessFile).principals
    assert (driver.shares_memory, viewer.shares_memory) == (True, False)
    assert timedelta(days=29) < driver.expires_at - datetime.now(UTC) < timedelta(days=31)


def test_certificates_are_signed_by_the_authority_and_name_their_owner(keys):
    """The server's names its hosts."""
    roots = x509.load_pem_x509_certificate((keys / "server" / "roots.pem").read_bytes())
    for name, hosts in (("server", ["127.0.0.1", "localhost"]), ("viewer", ["viewer"])):
        certificate = x509.load_pem_x509_certificate((keys / name / "certificate.pem").read_bytes())
        certificate.verify_directly_issued_by(roots)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert sorted(str(each.value) for each in names) == hosts


def test_authority_key_is_kept_nowhere(keys):
    """So that nobody can make another principal."""
    assert sorted(path.name for path in keys.iterdir()) == ["access.json", "driver", "server", "viewer"]
    assert sorted(path.name for path in (keys / "server").iterdir()) == [
        "certificate.pem",
        "key.pem",
        "roots.pem",
    ]


def test_make_keys_does_not_replace_keys(keys):
    """They may be in use."""
    with pytest.raises(FileExistsError):
        make_keys(keys, [], hosts=["localhost"])


def test_credentials_print_no_secret(keys):
    """Logs show objects."""
    found = Credentials.load(keys / "viewer")
    assert repr(found) == "Credentials()"


@pytest.mark.parametrize("kept", [[], ["roots.pem"], ["token", "key.pem"]])
def test_credentials_refuse_a_directory_that_lacks_something(keys, kept):
    """A token or a certificate with its key is needed."""
    home = keys / "viewer"
    for path in home.iterdir():
        if path.name not in kept:
            path.unlink()
    with pytest.raises(InvalidRequestError, match=r"^credentials: .* must hold"):
        Credentials.load(home)


def test_access_file_that_others_may_read_is_refused(keys):
    """And one that is no JSON."""
    (keys / "access.json").chmod(0o644)
    with pytest.raises(
        InvalidRequestError, match=r"must be for its owner alone \(0600\), got 0644; chmod 600 it"
    ):
        load_access(keys / "access.json")
    (keys / "access.json").chmod(0o600)
    (keys / "access.json").write_text('{"principals": [{"name": "x", "token": "plain"}]}')
    with pytest.raises(InvalidRequestError, match=r"must be an access file as in docs/security\.md"):
        load_access(keys / "access.json")


@pytest.mark.parametrize("host", ["", "a b", "gr\u00fcn.example", "http://x", "-x"])
def test_host_that_no_certificate_can_name_is_refused(tmp_path, host):
    """Before anything is made."""
    with pytest.raises(InvalidRequestError, match="keys: host must be an address or a plain host name"):
        make_keys(tmp_path / "keys", [], hosts=["localhost", host])
    assert not (tmp_path / "keys").exists()


def test_two_principals_of_one_name_are_refused(tmp_path):
    """Each has a directory."""
    with pytest.raises(InvalidRequestError, match="keys: names must be one principal's own, got a, a"):
        make_keys(tmp_path / "keys", [Wanted(name="a", grants={})] * 2, hosts=["localhost"])


@pytest.mark.parametrize("name", ["server", "", "../up", "a/b", "a.b", "x" * 64, "-rf", "a b"])
def test_name_of_a_principal_is_a_plain_word(name):
    """It is a directory's name and a host's in a certificate."""
    with pytest.raises(InvalidRequestError, match="keys: name of a principal must be letters"):
        Wanted(name=name, grants={})
