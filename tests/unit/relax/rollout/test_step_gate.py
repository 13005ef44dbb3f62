"""Turn-taking between decoding and those who pause, abort or change weights."""

from __future__ import annotations

import threading

import pytest

from relax.rollout.step_gate import StepGate


def _in_thread(function) -> tuple[threading.Thread, list]:
    results: list = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()
    return thread, results


def test_gate_writer_waits_for_the_running_step_and_goes_before_the_next():
    """Weights change between two steps, never within one."""
    gate, events = StepGate(5.0), []
    inside, release = threading.Event(), threading.Event()

    def decode():
        mark = gate.begin_round()
        for step in range(2):
            with gate.step(mark):
                events.append(f"step {step} begins")
                inside.set()
                release.wait(5.0)
                events.append(f"step {step} ends")

    def write():
        with gate.between_steps():
            events.append("weights change")

    decoder, _ = _in_thread(decode)
    assert inside.wait(5.0)
    writer, _ = _in_thread(write)
    while not gate._num_writers:  # the writer is at the gate
        assert writer.is_alive()
    release.set()
    decoder.join(5.0)
    writer.join(5.0)
    assert events == ["step 0 begins", "step 0 ends", "weights change", "step 1 begins", "step 1 ends"]


def test_gate_pause_holds_steps_and_lets_writers_through():
    """A paused decoder waits; weights can be adopted meanwhile; resume lets it go."""
    gate = StepGate(5.0)
    gate.pause()

    def decode():
        with gate.step(gate.begin_round()) as allowed:
            return allowed

    decoder, results = _in_thread(decode)
    with gate.between_steps():
        assert decoder.is_alive()
    assert results == []
    gate.resume()
    decoder.join(5.0)
    assert results == [True]


def test_gate_abort_ends_rounds_begun_before_it():
    """A round in a pause is released with False; a later round is not touched."""
    gate = StepGate(5.0)
    gate.pause()
    mark = gate.begin_round()

    def decode():
        with gate.step(mark) as allowed:
            return allowed

    decoder, results = _in_thread(decode)
    gate.abort()
    decoder.join(5.0)
    assert results == [False]
    gate.resume()
    with gate.step(gate.begin_round()) as allowed:
        assert allowed


def test_gate_waits_no_longer_than_its_deadline():
    """A pause without an end is an error, not a hang."""
    gate = StepGate(0.01)
    gate.pause()
    with (
        pytest.raises(TimeoutError, match="it is paused or weights are being adopted"),
        gate.step(gate.begin_round()),
    ):
        pass
    gate.resume()
    with (
        gate.step(gate.begin_round()),
        pytest.raises(TimeoutError, match="running step did not end"),
        gate.between_steps(),
    ):
        pass
