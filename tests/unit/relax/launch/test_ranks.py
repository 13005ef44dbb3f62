"""Where ranks meet: the variables of torch.distributed, and none for a single process."""

from __future__ import annotations

import pytest

from relax.launch.ranks import LOOPBACK, Rendezvous, listen


def test_one_rank_needs_no_environment() -> None:
    """A single process opens no port."""
    assert Rendezvous.on_this_machine(1).environment(0) == {}


def test_ranks_share_all_but_their_number() -> None:
    """All ranks are told one address and size, each its own rank."""
    meeting = Rendezvous.on_this_machine(2)
    meeting.close()
    first, second = meeting.environment(0), meeting.environment(1)
    assert (first.pop("RANK"), second.pop("RANK")) == ("0", "1")
    assert (first.pop("LOCAL_RANK"), second.pop("LOCAL_RANK")) == ("0", "1")
    assert first == second
    assert first["WORLD_SIZE"] == "2"
    assert 0 < int(first["MASTER_PORT"]) < 65536


def test_door_of_the_ranks_is_at_one_address_only() -> None:
    """Nobody beyond it may come in, and nobody else may take the port."""
    with listen(LOOPBACK) as door:
        address, port = door.getsockname()
        assert address == LOOPBACK
        with pytest.raises(OSError, match="in use"):
            listen(LOOPBACK, port)
