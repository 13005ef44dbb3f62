"""What is sent to SGLang, and what of its answers is believed."""

from __future__ import annotations

import base64

import msgspec
import numpy as np
import pytest

from relax.errors import ServiceError
from relax.rollout.sglang_messages import (
    GenerateBody,
    Generated,
    MetaInfo,
    SamplingParams,
    Span,
    decode,
    error_of,
    release_of,
    routed_experts,
    token_versions,
)

ANSWER = (
    b'{"text":"x","output_ids":[7,8],"meta_info":{"id":"a","finish_reason":{"type":"stop","matched":8},'
    b'"prompt_tokens":3,"completion_tokens":2,"weight_version":"4","num_retractions":0,'
    b'"weight_versions":[{"version":"3","start":0,"end":1},{"version":"4","start":1,"end":2}],'
    b'"output_token_logprobs":[[-0.5,7,null],[-1.5,8,null]],"routed_experts":"AAAA"}}'
)


def test_body_holds_what_was_asked_and_nothing_more() -> None:
    """SGLang's defaults are left out: an older server refuses sampling fields that it does not know."""
    params = SamplingParams(max_new_tokens=4, temperature=0.0, n=2, stop_token_ids=(9,))
    body = GenerateBody(input_ids=[1, 2], sampling_params=params, return_logprob=True)
    assert msgspec.json.decode(msgspec.json.encode(body)) == {
        "input_ids": [1, 2],
        "sampling_params": {"max_new_tokens": 4, "temperature": 0.0, "n": 2, "stop_token_ids": [9]},
        "return_logprob": True,
    }


def test_answer_is_read_and_unknown_fields_are_passed_over() -> None:
    """A newer server says more; what is needed has its type."""
    made = decode(ANSWER, Generated, "here")
    assert made.output_ids == [7, 8]
    assert made.meta_info.output_token_logprobs == [(-0.5, 7, None), (-1.5, 8, None)]
    assert token_versions(made.meta_info, 2, "here").tolist() == [3, 4]


def test_answer_of_another_form_is_named() -> None:
    """Where, what, and the beginning of what came."""
    with pytest.raises(ServiceError, match=r"here: answer must be Generated, got .*output_ids"):
        decode(b'{"text":"x"}', Generated, "here")


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([Span("1", 0, 1)], r"weight_versions must cover tokens 0 to 3, got \[\('1', 0, 1\)\]"),
        ([Span("1", 0, 1), Span("2", 2, 3)], "must cover tokens 0 to 3"),
        ([Span("1", 0, 5)], "must cover tokens 0 to 3"),
        ([Span("2", 0, 1), Span("1", 1, 3)], r"must not go back, got \[2, 1, 1\]"),
        ([Span("default", 0, 3)], "must be a policy version, got 'default'; somebody else updated"),
    ],
)
def test_spans_that_do_not_fit_the_tokens_are_refused(spans, message) -> None:
    """A version is known for every token, or the completion is not used."""
    meta = MetaInfo(
        prompt_tokens=1, completion_tokens=3, finish_reason=None, weight_version="1", weight_versions=spans
    )
    with pytest.raises(ServiceError, match=message):
        token_versions(meta, 3, "here")


def test_servers_without_spans_have_one_version() -> None:
    """Before 0.5.20 an update waits for what runs, so the version at the end is that of all tokens."""
    meta = MetaInfo(prompt_tokens=1, completion_tokens=2, finish_reason=None, weight_version="6")
    assert token_versions(meta, 2, "here").tolist() == [6, 6]


def test_routed_experts_are_decoded_and_checked() -> None:
    """Base64 of little-endian int32 of the right number, each an expert that is there."""
    values = np.arange(12, dtype="<i4").reshape(3, 2, 2) % 4
    text = base64.b64encode(values.tobytes()).decode()
    found = routed_experts(text, (3, 2, 2), 4, "here")
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, values)
    assert routed_experts(text, (3, 2, 2), 300, "here").dtype == np.uint16
    with pytest.raises(ServiceError, match=r"must be \[4, 2, 2\] .*, got 12 numbers"):
        routed_experts(text, (4, 2, 2), 4, "here")
    with pytest.raises(ServiceError, match=r"must be in \[0, 3\), got 0 to 3"):
        routed_experts(text, (3, 2, 2), 3, "here")
    with pytest.raises(ServiceError, match="must be base64 of int32"):
        routed_experts("?", (3, 2, 2), 4, "here")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"too long"}}', "too long"),
        (b'{"error":"plain"}', "plain"),
        (b'{"success":false,"message":"no session"}', "no session"),
        (b"<html>", "<html>"),
        (b"", "nothing"),
    ],
)
def test_every_form_of_error_has_its_message(body, message) -> None:
    """SGLang's errors come in several forms."""
    assert error_of(body) == message


def test_release_is_compared_by_its_numbers() -> None:
    """Post-releases count as their release."""
    assert release_of("0.5.15.post1") == (0, 5, 15) < release_of("0.5.21") < release_of("0.6")
