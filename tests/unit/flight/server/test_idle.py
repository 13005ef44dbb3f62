"""Silent puts, time given by hand."""

from __future__ import annotations

import pytest

from flight.errors import OverloadedError
from flight.server.idle import PutWatch, cut_connection
from tests.kit.clock import FakeClock


def test_silent_puts_are_cut_off_and_busy_ones_are_not():
    """Only the time in which the server waits for the caller counts; each connection is cut once."""
    clock, cut = FakeClock(), []
    watch = PutWatch(idle_s=10.0, clock=clock, cut=lambda peer: cut.append(peer) is None)
    with watch.open("ipv4:10.0.0.1:5") as silent, watch.open("ipv4:10.0.0.2:5") as busy:
        with silent.waiting_for_caller():
            with busy.waiting_for_caller():
                clock.advance(9.9)
                assert watch.look() == 0
            clock.advance(0.1)
            assert watch.look() == 1
            assert watch.look() == 0
        clock.advance(100.0)
        assert watch.look() == 0
    assert cut == ["ipv4:10.0.0.1:5"]


def test_open_puts_are_bounded():
    """One more is refused, and may come when another is done."""
    watch = PutWatch(max_puts=1)
    with watch.open("a"), pytest.raises(OverloadedError) as caught, watch.open("b"):
        pass
    assert str(caught.value) == "server: open puts must be at most 1, got one more; close puts that are done"
    with watch.open("b"):
        pass


@pytest.mark.parametrize("peer", ["unix:", "ipv4:127.0.0.1:", "ipv4:127.0.0.1:1", "nonsense", ""])
def test_cut_connection_that_is_not_there_does_nothing(peer):
    """A caller on a unix socket, or one that has gone, is left alone."""
    assert cut_connection(peer) is False


def test_streams_are_watched_without_counting_as_puts():
    """They are cut off when silent, and known as silent."""
    clock, cut = FakeClock(), []
    watch = PutWatch(max_puts=0, idle_s=1.0, clock=clock, cut=lambda peer: cut.append(peer) is None)
    with watch.watch("ipv4:10.0.0.1:5", "take stream") as stream:
        assert (stream.what, watch.num_silent) == ("take stream", 0)
        with stream.waiting_for_caller():
            assert watch.num_silent == 1
            clock.advance(1.0)
            assert watch.look() == 1
    assert cut == ["ipv4:10.0.0.1:5"]
