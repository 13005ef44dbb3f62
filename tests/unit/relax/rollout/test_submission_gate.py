"""The gate in front of the servers: pause, hold, abort."""

from __future__ import annotations

import threading

import pytest

from relax.errors import ServiceError
from relax.rollout.submission_gate import SubmissionGate


def _enter(gate: SubmissionGate, mark: int) -> tuple[threading.Thread, list[bool]]:
    passed: list[bool] = []
    thread = threading.Thread(target=lambda: passed.append(gate.enter(mark)))
    thread.start()
    return thread, passed


def test_gate_holds_requests_back_while_paused() -> None:
    """Nothing passes before `resume`; pausing twice is pausing."""
    gate = SubmissionGate()
    gate.pause()
    gate.pause()
    thread, passed = _enter(gate, gate.begin_round())
    assert passed == []
    gate.resume()
    thread.join(10)
    assert passed == [True]


def test_gate_lets_an_aborted_round_out_of_a_pause() -> None:
    """An abort ends rounds begun before it, and only those."""
    gate = SubmissionGate()
    gate.pause()
    mark = gate.begin_round()
    thread, passed = _enter(gate, mark)
    gate.abort()
    thread.join(10)
    assert passed == [False]
    gate.resume()
    assert gate.enter(gate.begin_round())
    assert not gate.enter(mark)


def test_gate_keeps_requests_out_of_a_hold() -> None:
    """New requests start under the weights that the holder leaves behind."""
    gate = SubmissionGate()
    with gate.hold():
        thread, passed = _enter(gate, gate.begin_round())
        assert passed == []
    thread.join(10)
    assert passed == [True]


def test_gate_says_how_long_it_waited() -> None:
    """A pause without end is an error with a name."""
    gate = SubmissionGate(deadline_s=0.01)
    gate.pause()
    with pytest.raises(ServiceError, match="must open within 0 s, got 0 s of waiting; it is paused or held"):
        gate.enter(gate.begin_round())
