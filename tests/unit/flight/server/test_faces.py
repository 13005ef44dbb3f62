"""One server after another on the same port."""

from __future__ import annotations

import threading

import pytest

from flight.server import faces
from flight.server.faces import Faces


class FakeFace:
    """Stands for a Flight server: it says what is done to it, and its open calls end when the test says so."""

    def __init__(self, port: int = 7, *, ends: bool = True) -> None:
        self.port = port
        self.told: list[str] = []
        self.has_ended = threading.Event()
        if ends:
            self.has_ended.set()

    def shutdown(self) -> None:
        self.told.append("shutdown")
        self.has_ended.wait()

    def stop(self, grace_s: float) -> bool:
        self.told.append("stop")
        return self.has_ended.is_set()


def test_renew_ends_the_old_one_and_makes_another_on_its_port():
    """Only then."""
    first, made = FakeFace(), []
    found = Faces(first, lambda port: made.append(FakeFace(port)) or made[-1])
    assert first.told == []
    assert found.renew()
    assert first.told == ["shutdown"]
    assert [each.port for each in made] == [7]
    assert found.is_listening


def test_stop_ends_those_that_still_have_open_calls():
    """The answer is of all of them."""
    first = FakeFace(ends=False)
    made = []
    found = Faces(first, lambda port: made.append(FakeFace(port)) or made[-1])
    found.renew()
    assert found.stop(0.0) is False
    assert (first.told, made[0].told) == (["shutdown", "stop"], ["stop"])
    first.has_ended.set()


@pytest.mark.parametrize("num_failures", [1, 3])
def test_renew_tries_until_the_port_is_free(num_failures):
    """The old one needs a moment."""
    failures = [OSError("in use")] * num_failures

    def make(port: int) -> FakeFace:
        if failures:
            raise failures.pop()
        return FakeFace(port)

    assert Faces(FakeFace(), make).renew()
    assert failures == []


def test_renew_that_finds_no_port_is_tried_again(monkeypatch):
    """By whoever looks next; what has open calls meanwhile goes on."""
    monkeypatch.setattr(faces, "LISTEN_S", 0.0)
    is_free = []

    def make(port: int) -> FakeFace:
        if not is_free:
            raise OSError("in use")
        return FakeFace(port)

    first = FakeFace()
    found = Faces(first, make)
    assert found.renew() is False
    assert not found.is_listening
    is_free.append(True)
    assert found.renew() is True
    assert first.told == ["shutdown"]
