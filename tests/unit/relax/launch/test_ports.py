"""Reserved ports: one run each, given back at the end, never one at which somebody listens."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from relax.errors import ServiceError
from relax.launch.ports import LOOPBACK, reserve_port

PORTS = range(14_700, 14_800)
HOLD = """
from relax.launch.ports import reserve_port
held = reserve_port([{port}])
print('held', flush=True)
input()
"""


def test_port_is_one_run_s_while_nobody_listens_at_it():
    """Another process gets the next one; the end of the first, even by a kill, gives its port back."""
    port = reserve_port(PORTS)
    port.close()
    command = [sys.executable, "-c", HOLD.format(port=port.port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "held\n"
            mine = reserve_port(range(port.port, PORTS.stop))
            mine.close()
            assert mine.port > port.port
        finally:
            other.kill()
    again = reserve_port([port.port])
    again.close()
    assert again.port == port.port


def test_port_at_which_somebody_listens_is_left_alone():
    """Programs that reserve nothing are respected, too; the error says where was looked."""
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(
            ServiceError, match=rf"ports: one of 1 from {port} to {port} must be free, got none"
        ):
            reserve_port([port])
