"""When the samples of a group are aborted that nobody needs."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

from relax.rollout.early_stop import EarlyStop
from relax.rollout.sglang_http import SGLangClient
from tests.kit.web_server import Reply, fake_web


def test_group_without_a_number_is_never_over():
    """All samples are wanted."""
    stop = EarlyStop(0, 5)
    stop.finished(3)
    assert not stop.is_over


def test_rest_is_aborted_by_name_once_enough_have_finished():
    """What is not asked any more is left alone, and so is what has no name."""
    with fake_web(Reply(b"")) as web:
        client = SGLangClient(web.url, deadline_s=10.0)
        stop = EarlyStop(2, 1)
        with stop.asking("a", client):
            pass
        with stop.asking("b", client), stop.asking(None, client):
            assert (stop.is_over, web.asked) == (False, [])
            stop.finished(1)
            assert stop.is_over
            assert [(path, body) for path, _, body in web.asked] == [("/abort_request", {"rid": "b"})]


def test_abort_is_repeated_until_its_request_has_ended():
    """One that overtakes its request is lost."""
    with fake_web(Reply(b"")) as web, ThreadPoolExecutor() as pool:
        client = SGLangClient(web.url, deadline_s=10.0)
        stop = EarlyStop(1)

        def ask() -> list:
            with stop.asking("late", client):
                while len(web.asked) < 2:
                    web.over.wait(0.02)
                return []

        future = pool.submit(ask)
        stop.finished(1)
        assert stop.result(future) == []
        assert {json.dumps(body) for _, _, body in web.asked} == {'{"rid": "late"}'}


def test_server_that_is_gone_needs_no_abort():
    """Its request has gone with it."""
    with fake_web(Reply(b"")) as web:
        url = web.url
    stop = EarlyStop(1)
    with stop.asking("a", SGLangClient(url, deadline_s=5.0)):
        stop.finished(1)
    assert stop.is_over
