"""The embedded engine samples from, and reports on, exactly the Hugging Face model's distribution."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from relax.errors import SnapshotError
from relax.models.batch import collate, hf_inputs
from relax.models.checkpoint_files import file_names
from relax.models.inputs import PromptInputs
from relax.models.snapshot import SnapshotWriter, WeightFile, Written, write_snapshot
from relax.models.tensor_file import file_bytes
from relax.models.thinker import checkpoint_views, load_thinker
from relax.rollout.engine import GenerateRequest
from relax.rollout.torch_engine import TorchEngine

MIXTURES = ((), ("image",), ("audio",), ("video",), ("video", "image", "audio"))


@pytest.fixture(scope="module")
def engine(tiny_dir):
    engine = TorchEngine(tiny_dir)
    yield engine
    engine.close()


@pytest.fixture
def requests(make_prompt):
    """One request for each mixture of media, of unequal lengths."""
    prompts = [make_prompt(*towers, num_words=3 + 2 * i, seed=i) for i, towers in enumerate(MIXTURES)]
    return [
        GenerateRequest(
            uid=f"r{i}",
            token_ids=prompt.token_ids,
            media=prompt.media,
            num_samples=3,
            seed=i,
            max_new_tokens=4,
            temperature=0.7,
        )
        for i, prompt in enumerate(prompts)
    ]


def _teacher_forced(thinker, request, completion):
    """Return (logits after the prompt, routed experts) of a plain forward pass over prompt and completion."""
    ids = np.concatenate((request.token_ids, completion.token_ids[:-1]))
    batch = collate([PromptInputs(ids, request.media)], thinker.spec)
    routes = []
    hooks = [
        layer.mlp.gate.register_forward_hook(
            lambda _module, _inputs, outputs: routes.append(outputs[2].numpy())
        )
        for layer in thinker.hf.model.layers
    ]
    with torch.inference_mode():
        logits = thinker.hf(**hf_inputs(batch, thinker.spec)).logits[0]
    for hook in hooks:
        hook.remove()
    return logits[len(request.token_ids) - 1 :], np.stack(routes, 1)


def test_generate_reports_logprobs_and_routing_of_the_model(engine, thinker, requests):
    """Logprobs are those of the scaled full distribution, routing the router's choice, for every mixture."""
    completions = engine.generate(requests)
    assert [(c.uid, c.sample_index) for c in completions] == [(r.uid, s) for r in requests for s in range(3)]
    by_uid = {request.uid: request for request in requests}
    for completion in completions:
        request = by_uid[completion.uid]
        logits, routes = _teacher_forced(thinker, request, completion)
        logprobs = (logits / request.temperature).log_softmax(-1)
        expected = logprobs.gather(1, torch.from_numpy(completion.token_ids).long()[:, None])[:, 0]
        np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=2e-5)
        num_rows = len(request.token_ids) + len(completion.token_ids) - 1
        assert completion.routed_experts.shape == (num_rows, thinker.spec.num_layers, thinker.spec.top_k)
        assert completion.routed_experts.dtype == np.uint8
        np.testing.assert_array_equal(np.sort(completion.routed_experts), np.sort(routes))


def test_generate_completions_have_their_types(engine, requests):
    """Arrays are of the promised types and lengths, text is the tokens' own."""
    completion = engine.generate(requests[:1])[0]
    assert completion.token_ids.dtype == np.int32
    assert completion.logprobs.dtype == np.float32
    assert completion.token_policy_versions.tolist() == [0] * 4
    assert completion.finish_reason == "length"
    assert completion.error == ""
    assert isinstance(completion.text, str)


def test_generate_greedy_equals_hugging_face(engine, thinker, requests):
    """Greedy tokens are those of `hf.generate`, with prompts of all kinds padded together."""
    greedy = [replace(request, greedy=True, num_samples=1, max_new_tokens=6) for request in requests]
    batch = collate([PromptInputs(r.token_ids, r.media) for r in greedy], thinker.spec)
    theirs = thinker.hf.generate(**hf_inputs(batch, thinker.spec), max_new_tokens=6, do_sample=False)
    theirs = theirs[:, batch.input_ids_BT.shape[1] :].numpy()
    for row, completion in enumerate(engine.generate(greedy)):
        assert completion.token_ids.tolist() == theirs[row, : len(completion.token_ids)].tolist()
    by_temperature = [replace(request, greedy=False, temperature=0.0) for request in greedy]
    tokens = [[c.token_ids.tolist() for c in engine.generate(each)] for each in (greedy, by_temperature)]
    assert tokens[0] == tokens[1]


def test_generate_is_decided_by_each_request_s_seed(engine, requests):
    """Same seed same samples, alone, among others, in any order; another seed or sample differs."""
    together = engine.generate(requests)
    reversed_order = engine.generate(requests[::-1])
    tokens = {(c.uid, c.sample_index): c.token_ids.tolist() for c in together}
    assert tokens == {(c.uid, c.sample_index): c.token_ids.tolist() for c in reversed_order}
    for request in requests:
        for completion in engine.generate([request]):
            assert completion.token_ids.tolist() == tokens[completion.uid, completion.sample_index]
    other = engine.generate([replace(requests[0], seed=99)])
    assert [c.token_ids.tolist() for c in other] != [tokens["r0", sample] for sample in range(3)]
    assert len({tuple(tokens["r0", sample]) for sample in range(3)}) > 1


def test_generate_samples_the_distribution(engine, thinker, requests):
    """First tokens of many samples occur as often as their probability says."""
    request = replace(requests[1], num_samples=4000, max_new_tokens=1, temperature=0.5)
    completions = engine.generate([request])
    counts = np.bincount([int(c.token_ids[0]) for c in completions], minlength=thinker.spec.vocab_size)
    logits, _ = _teacher_forced(thinker, request, completions[0])
    probabilities = (logits[0] / 0.5).softmax(-1).numpy()
    assert np.abs(counts / 4000 - probabilities).max() < 5 * np.sqrt(0.25 / 4000)
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(probabilities > 0))


def test_generate_micro_batches_give_the_same(tiny_dir, engine, requests):
    """A small token budget changes the batches, not the answers."""
    small = TorchEngine(tiny_dir, max_batch_tokens=100)
    mixed = [replace(request, num_samples=1 + i, max_new_tokens=1 + i) for i, request in enumerate(requests)]
    tokens = [[(c.uid, c.token_ids.tolist()) for c in each.generate(mixed)] for each in (engine, small)]
    assert tokens[0] == tokens[1]
    assert [len(ids) for _, ids in tokens[0]] == [1 + i for i in range(5) for _ in range(1 + i)]
    small.close()


def test_generate_stops_at_end_tokens(tiny_dir, tmp_path, requests):
    """A completion ends with its first end token, rows end apart, and finished rows change nothing for others."""
    stopping = tmp_path / "stopping"
    shutil.copytree(tiny_dir, stopping)
    config = json.loads((stopping / "generation_config.json").read_text())
    ends = list(range(1, 512, 3))  # the tokenizer's own end token is among them
    (stopping / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": ends}))
    engine, free = TorchEngine(stopping), TorchEngine(tiny_dir)
    many = [replace(request, num_samples=8, max_new_tokens=6) for request in requests]
    reasons = set()
    for stopped, unbounded in zip(engine.generate(many), free.generate(many), strict=True):
        ids = stopped.token_ids.tolist()
        assert ids == unbounded.token_ids.tolist()[: len(ids)]
        np.testing.assert_allclose(stopped.logprobs, unbounded.logprobs[: len(ids)], atol=2e-5)
        assert [token in ends for token in ids[:-1]] == [False] * (len(ids) - 1)
        assert stopped.finish_reason == ("stop" if ids[-1] in ends else "length")
        assert stopped.finish_reason == "stop" or len(ids) == 6
        reasons.add((stopped.finish_reason, len(ids)))
        num_rows = len(unbounded.routed_experts) - (len(unbounded.token_ids) - len(ids))
        np.testing.assert_array_equal(stopped.routed_experts, unbounded.routed_experts[:num_rows])
    assert len(reasons) > 2


def test_generate_refuses_requests_one_by_one(engine, requests):
    """A request that does not fit costs itself only, with its reason."""
    good = replace(requests[1], num_samples=1)
    bad = {
        "vocabulary": replace(good, token_ids=np.array([512], np.int32), media={}),
        "positions": replace(good, token_ids=np.ones(5000, np.int32), media={}),
        "room": replace(good, max_new_tokens=4096),
        "media": replace(good, media={}),
        "samples": replace(good, num_samples=0),
        "temperature": replace(good, temperature=float("nan")),
    }
    asked = [good, *(replace(request, uid=name) for name, request in bad.items()), replace(good, uid="last")]
    completions = {completion.uid: completion for completion in engine.generate(asked)}
    assert list(completions) == [request.uid for request in asked]
    assert {uid for uid, c in completions.items() if c.finish_reason == "refused"} == set(bad)
    assert completions["vocabulary"].error == "request vocabulary: token_ids must be in [0, 512), got 512"
    assert "must be at most 4096 long" in completions["positions"].error
    assert "must be at most 4096 tokens together" in completions["room"].error
    assert completions["media"].error.startswith("request media: runs of the image placeholder token")
    assert "num_samples and max_new_tokens must be at least 1" in completions["samples"].error
    assert "temperature must be finite" in completions["temperature"].error
    assert completions[good.uid].token_ids.tolist() == completions["last"].token_ids.tolist()


def test_generate_shows_weights_that_are_not_finite(tiny_dir, requests, tmp_path):
    """Damaged weights give logprobs that are not finite, for the caller to refuse, and no crash."""
    tensors = {
        name: torch.full_like(view, np.nan) for name, view in checkpoint_views(load_thinker(tiny_dir)).items()
    }
    engine = TorchEngine(tiny_dir)
    engine.adopt(write_snapshot(tmp_path / "v1", tensors, 1), 1)
    completion = engine.generate(requests[:1])[0]
    assert not np.isfinite(completion.logprobs).any()
    assert ((completion.token_ids >= 0) & (completion.token_ids < 512)).all()


def test_adopt_changes_what_is_generated(tiny_dir, requests, tmp_path):
    """New weights answer under their version, and are the snapshot's, bit for bit."""
    engine, other = TorchEngine(tiny_dir), load_thinker(tiny_dir)
    with torch.no_grad():
        for view in checkpoint_views(other).values():
            view.mul_(1.3)
    before = engine.generate(requests)
    engine.adopt(write_snapshot(tmp_path / "v5", checkpoint_views(other), 5), 5)
    after = engine.generate(requests)
    assert engine.policy_version == 5
    assert all(completion.token_policy_versions.tolist() == [5] * 4 for completion in after)
    assert [c.logprobs.tolist() for c in before] != [c.logprobs.tolist() for c in after]
    logits, _ = _teacher_forced(other, requests[0], after[0])
    expected = (logits / 0.7).log_softmax(-1).gather(1, torch.from_numpy(after[0].token_ids).long()[:, None])
    np.testing.assert_allclose(after[0].logprobs, expected[:, 0].numpy(), atol=5e-5)


def test_adopt_refuses_what_is_not_the_model_s(tiny_dir, requests, tmp_path):
    """Missing, unknown or misshapen names, another version or altered bytes: refused, and nothing changes."""
    engine = TorchEngine(tiny_dir)
    before = [c.logprobs.tolist() for c in engine.generate(requests)]
    tensors = {name: view + 1 for name, view in checkpoint_views(load_thinker(tiny_dir)).items()}
    head = "thinker.lm_head.weight"
    cases = {
        "missing": ({k: v for k, v in tensors.items() if k != head}, rf"lacks 1 \['{head}'\], has 0 unknown"),
        "unknown": (tensors | {"thinker.extra": torch.ones(1)}, r"has 1 unknown \['thinker.extra'\]"),
        "shape": (tensors | {head: torch.ones(3, 3)}, rf"{head} must have shape \[512, 64\], got \[3, 3\]"),
    }
    for name, (wrong, message) in cases.items():
        with pytest.raises(SnapshotError, match=message):
            engine.adopt(write_snapshot(tmp_path / name, wrong, 1), 1)
    good = write_snapshot(tmp_path / "good", tensors, 2)
    with pytest.raises(SnapshotError, match="must be policy version 1, got 2"):
        engine.adopt(good, 1)
    content = bytearray((good / "model.safetensors").read_bytes())
    content[-5] ^= 0xFF
    (good / "model.safetensors").write_bytes(content)
    with pytest.raises(SnapshotError, match="altered or torn"):
        engine.adopt(good, 2)
    with pytest.raises(FileNotFoundError):
        engine.adopt(tmp_path / "gone", 3)
    assert engine.policy_version == 0
    assert [c.logprobs.tolist() for c in engine.generate(requests)] == before


def test_adopt_reads_only_files_that_have_changed(tiny_dir, requests, tmp_path):
    """A file that is the same by its checksum is not even opened; after a refused snapshot all is as it was."""
    engine = TorchEngine(tiny_dir)
    tensors = checkpoint_views(load_thinker(tiny_dir))
    head, (first, second) = "thinker.lm_head.weight", file_names(2)
    rest = tuple(name for name in tensors if name != head)

    def publish(version: int, scale: float, before: Written | None = None) -> Written:
        with SnapshotWriter(tmp_path / f"v{version}", version, before) as writer:
            whole = file_bytes({name: tensors[name] for name in rest}) if before is None else None
            writer.add(WeightFile(name=first, tensors=rest, content=whole))
            writer.add(
                WeightFile(name=second, tensors=(head,), content=file_bytes({head: tensors[head] * scale}))
            )
            return writer.finish()

    written = publish(1, 1.0)
    engine.adopt(tmp_path / "v1", 1)
    before = [c.logprobs.tolist() for c in engine.generate(requests)]
    publish(2, 1.5, written)
    (tmp_path / "v2" / first).unlink()
    engine.adopt(tmp_path / "v2", 2)
    assert torch.equal(engine._weights[head], tensors[head] * 1.5)
    with pytest.raises(FileNotFoundError, match=first):
        TorchEngine(tiny_dir).adopt(tmp_path / "v2", 2)
    engine.adopt(tmp_path / "v1", 1)
    assert [c.logprobs.tolist() for c in engine.generate(requests)] == before


def test_adopt_in_the_middle_shows_in_the_token_versions(tiny_dir, requests, tmp_path):
    """Weights adopted while a completion is on its way sample its later tokens; then abort ends it."""
    engine = TorchEngine(tiny_dir)
    snapshot = write_snapshot(tmp_path / "v1", checkpoint_views(load_thinker(tiny_dir)), 1)
    answers: list = []
    long = [replace(requests[0], max_new_tokens=4000, num_samples=1)]
    worker = threading.Thread(target=lambda: answers.extend(engine.generate(long)), daemon=True)
    started = threading.Event()
    hook = engine._thinker.hf.lm_head.register_forward_hook(lambda *_: started.set())
    worker.start()
    assert started.wait(20)
    hook.remove()
    engine.adopt(snapshot, 1)
    started.clear()
    hook = engine._thinker.hf.lm_head.register_forward_hook(lambda *_: started.set())
    assert started.wait(20)
    engine.abort()
    worker.join(20)
    hook.remove()
    (completion,) = answers
    versions = completion.token_policy_versions
    assert completion.finish_reason == "abort"
    assert 2 <= len(versions) < 4000
    assert (versions[0], versions[-1]) == (0, 1)
    assert (np.diff(versions) >= 0).all()
    assert len(completion.logprobs) == len(versions)
    assert len(completion.routed_experts) == len(long[0].token_ids) + len(versions) - 1


def test_abort_in_a_pause_returns_empty_completions(tiny_dir, requests):
    """A paused call gives back what it has: here nothing; afterwards the engine works on."""
    engine = TorchEngine(tiny_dir)
    engine.pause()
    answers: list = []
    begun = threading.Event()
    begin = engine._gate.begin_round

    def begin_and_tell() -> int:
        mark = begin()
        begun.set()
        return mark

    engine._gate.begin_round = begin_and_tell  # type: ignore[method-assign]
    worker = threading.Thread(target=lambda: answers.extend(engine.generate(requests)), daemon=True)
    worker.start()
    assert begun.wait(20)
    engine.abort()
    worker.join(20)
    assert len(answers) == 15
    assert {(c.finish_reason, len(c.token_ids), c.routed_experts is None) for c in answers} == {
        ("abort", 0, True)
    }
    engine.resume()
    assert {c.finish_reason for c in engine.generate(requests)} <= {"stop", "length"}
