"""Pause, resume, abort and refusals on real servers."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from relax.rollout.engine import GenerateRequest
from relax.rollout.sglang_http import RequestRefusedError
from tests.sglang.test_agreement import assert_alike
from tests.sglang.test_weights import until_running


def _long(requests, num_samples: int = 3) -> list[GenerateRequest]:
    changes = {"max_new_tokens": 2000, "num_samples": num_samples, "greedy": False, "temperature": 1.0}
    return [replace(requests[-1], uid="long", **changes)]


def _in_background(engine, asked):
    completions: list = []
    thread = threading.Thread(target=lambda: completions.extend(engine.generate(asked)))
    thread.start()
    return thread, completions


def test_abort_returns_what_there_is(attach, requests) -> None:
    """Aborted completions keep their tokens, logprobs, versions and routing."""
    engine = attach()
    thread, completions = _in_background(engine, _long(requests))
    until_running(engine)
    engine.abort()
    thread.join(60)
    unfinished = [each for each in completions if each.finish_reason == "abort"]
    assert unfinished
    for each in completions:
        assert len(each.token_ids) == len(each.logprobs) == len(each.token_policy_versions)
        if len(each.token_ids):
            assert len(each.routed_experts) == len(requests[-1].token_ids) + len(each.token_ids) - 1


def test_pause_holds_what_runs_and_what_comes(attach, requests, torch_engine) -> None:
    """Nothing ends while paused; after `resume` all of it does, and abort works in between too."""
    engine = attach()
    running, completions = _in_background(engine, _long(requests))
    until_running(engine)
    engine.pause()
    waiting, answers = _in_background(engine, requests[:1])
    waiting.join(1.0)
    assert waiting.is_alive()
    engine.resume()
    waiting.join(120)
    assert_alike(answers, torch_engine.generate(requests[:1]))
    engine.pause()
    engine.abort()
    running.join(60)
    assert not running.is_alive()
    assert any(len(each.token_ids) for each in completions)
    engine.resume()
    assert_alike(engine.generate(requests[:1]), torch_engine.generate(requests[:1]))


def test_refused_requests_cost_themselves_only(servers, requests, torch_engine) -> None:
    """A token id that would end the server's scheduler is refused here; its neighbours are answered."""
    bad = replace(requests[-1], uid="bad", token_ids=np.array([5, 512], np.int32))
    long = replace(requests[-1], uid="long", max_new_tokens=4096)
    made = servers.generate([requests[0], bad, long, requests[-1]])
    assert [each.finish_reason for each in made][1:3] == ["refused", "refused"]
    assert made[1].error == "request bad: token_ids must be in [0, 512), got 512"
    assert_alike([made[0], made[3]], torch_engine.generate([requests[0], requests[-1]]))
    assert [server.state for server in servers.servers] == ["serving", "serving"]


def test_media_that_are_no_file_are_refused_by_the_server(servers) -> None:
    """The plugin's own message comes back as a refusal, and the server lives."""
    client = servers.servers[0].client
    body = {"input_ids": [1, 2], "image_data": ["data:application/vnd.relax.encoded;base64,AAAA"]}
    with pytest.raises(
        RequestRefusedError, match="image: encoded media must be a safetensors file in base64"
    ):
        client.tell("/generate", body)
    assert client.info().model_path


def test_groups_stay_with_one_server_and_load_is_shared(servers, requests) -> None:
    """Many prompts reach both servers."""
    asked = [replace(request, num_samples=2) for request in requests]
    servers.generate(asked)
    used = {servers._router._seen[request.uid] for request in asked}
    assert used == {server.name for server in servers.servers}
    assert all(servers._router.load(name) == 0 for name in used)
