"""Weights reach real servers by each way; a completion that an update interrupts keeps its versions token by token."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from relax.errors import SnapshotError
from relax.models.snapshot import write_snapshot
from relax.rollout.sglang_http import RequestRefusedError
from tests.sglang.test_agreement import assert_alike

LONG_TOKENS = 400


@pytest.mark.parametrize("way", ["disk", "tensor", "distributed"])
def test_adopted_weights_answer_as_the_embedded_engine(way, attach, torch_engine, requests, publish) -> None:
    """After an update by each way all modalities agree again, the towers' cached work included."""
    engine = attach(weights=way, bucket_bytes=1 << 19)
    assert_alike(engine.generate(requests), torch_engine.generate(requests))
    snapshot, version = publish()
    engine.adopt(snapshot, version)
    torch_engine.adopt(snapshot, version)
    assert engine.policy_version == version
    assert_alike(engine.generate(requests), torch_engine.generate(requests))


def test_every_way_leaves_the_same_weights(attach, publish) -> None:
    """The servers' own checksum of one snapshot is the same however it was sent."""
    snapshot, version = publish()
    sums = set()
    for way in ("disk", "tensor", "distributed"):
        engine = attach(weights=way, bucket_bytes=1 << 19)
        before = engine.servers[0].checksum
        engine.adopt(snapshot, version)
        sums.add(engine.servers[0].checksum)
        assert engine.servers[0].checksum != before
    assert len(sums) == 1


def test_unknown_and_missing_names_are_refused_before_they_are_sent(attach, publish, tmp_path) -> None:
    """SGLang ignores tensors that it does not know, so the names are checked here; weights stay as they were."""
    engine = attach()
    before = engine.servers[0].checksum
    snapshot, version = publish(**{"thinker.nonsense": torch.zeros(2)})
    with pytest.raises(SnapshotError, match=r"lacks 0 \[\], has 1 unknown \['thinker.nonsense'\]"):
        engine.adopt(snapshot, version)
    fewer = write_snapshot(
        tmp_path / "fewer", {"thinker.lm_head.weight": torch.zeros(512, 64)}, version + 1000
    )
    with pytest.raises(SnapshotError, match="must hold exactly the model's tensors, lacks"):
        engine.adopt(fewer, version + 1000)
    wide, version = publish(**{"thinker.lm_head.weight": torch.zeros(512, 65)})
    with pytest.raises(SnapshotError, match=r"must have shape \[512, 64\], got \[512, 65\]"):
        engine.adopt(wide, version)
    assert (engine.policy_version, engine.servers[0].checksum) == (0, before)


def test_altered_snapshot_is_refused(attach, publish) -> None:
    """A torn file never reaches a server, which would die of it."""
    engine = attach()
    snapshot, version = publish()
    with (snapshot / "model-00002-of-00002.safetensors").open("r+b") as file:
        file.seek(-3, 2)
        file.write(b"xyz")
    with pytest.raises(SnapshotError, match="must have checksum"):
        engine.adopt(snapshot, version)


def test_servers_of_this_version_refuse_tensors_outside_a_session(servers) -> None:
    """Why begin and end are sent: without them 0.5.21 answers 400."""
    server = servers.servers[0]
    assert server.info.release >= (0, 5, 21)
    body = {"serialized_named_tensors": ["AAAA"], "load_format": "flattened_bucket"}
    with pytest.raises(RequestRefusedError, match="must run between begin_weight_update"):
        server.client.tell("/update_weights_from_tensor", body)


@pytest.mark.parametrize(
    ("way", "mode"), [("disk", "retract"), ("distributed", "in_place"), ("tensor", "abort"), ("disk", "wait")]
)
def test_update_in_the_middle_of_a_completion(way, mode, attach, requests, publish) -> None:
    """Tokens keep the version that sampled them; abort ends what runs, wait lets it end."""
    engine = attach(weights=way, pause=mode)
    first, version = publish()
    engine.adopt(first, version)
    second, later = publish()
    asked = [replace(requests[-1], max_new_tokens=LONG_TOKENS, num_samples=3, greedy=False, temperature=1.0)]
    asked = [replace(asked[0], token_ids=asked[0].token_ids[:-1])]
    completions = []
    worker = threading.Thread(target=lambda: completions.extend(engine.generate(asked)))
    worker.start()
    until_running(engine)
    engine.adopt(second, later)
    worker.join(120)
    assert len(completions) == 3
    seen = set()
    for each in completions:
        versions = each.token_policy_versions
        assert len(versions) == len(each.token_ids) == len(each.logprobs)
        assert (np.diff(versions) >= 0).all()
        seen |= set(versions.tolist())
    assert seen <= {version, later}
    if mode == "abort":
        assert seen == {version}
        assert "abort" in {each.finish_reason for each in completions}
    if mode == "wait":
        assert seen == {version}
    if mode in ("retract", "in_place"):
        longest = max(completions, key=lambda each: len(each.token_ids))
        assert len(longest.token_ids) < LONG_TOKENS or set(longest.token_policy_versions) == {version, later}
        _check_interrupted(engine, longest, first, second, asked[0], mode)
    after = engine.generate([requests[-1]])
    assert set(after[0].token_policy_versions) == {later}


def _check_interrupted(engine, completion, first, second, request, mode) -> None:
    """Each token's logprob is that of its own version's weights (of the old cache too, unless it was retracted)."""
    import torch

    from relax.models.batch import collate, hf_inputs
    from relax.models.inputs import PromptInputs
    from relax.models.snapshot import read_snapshot
    from relax.models.thinker import checkpoint_views, load_thinker

    loaded = load_thinker(engine._fleet._launch.model_dir)
    # A plain forward pass would take a sampled placeholder for a medium: look at what comes before it.
    pads = [loaded.spec.image_token_id, loaded.spec.audio_token_id, loaded.spec.video_token_id]
    is_pad = np.isin(completion.token_ids, pads)
    readable = int(is_pad.argmax()) + 1 if is_pad.any() else len(is_pad)
    views = checkpoint_views(loaded)
    ids = np.concatenate((request.token_ids, completion.token_ids[: readable - 1]))
    batch = collate([PromptInputs(ids, request.media)], loaded.spec)
    for snapshot in (first, second):
        version, tensors = read_snapshot(snapshot)
        chosen = completion.token_policy_versions[:readable] == version
        if version != completion.token_policy_versions[0] and mode == "in_place":
            continue  # computed with a cache of the old weights
        with torch.no_grad():
            for name, view in views.items():
                view.copy_(tensors[name])
            logits = loaded.hf(**hf_inputs(batch, loaded.spec)).logits[0, len(request.token_ids) - 1 :]
        tokens = torch.from_numpy(completion.token_ids[:readable]).long()
        expected = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0].numpy()
        np.testing.assert_allclose(completion.logprobs[:readable][chosen], expected[chosen], atol=1e-3)


def until_running(engine) -> None:
    """Wait until a server has begun to decode: some tokens are there, many are to come."""
    client = engine.servers[0].client
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        loads = client._call("GET", "/v1/loads?include=core", None, 10.0)
        if b'"num_running_reqs":3' in loads.replace(b" ", b""):
            return
        time.sleep(0.02)
    raise AssertionError(f"nothing ran within 60 s: {loads!r}")
