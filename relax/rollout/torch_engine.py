"""The embedded rollout engine: the transformers model in this process, where there is no inference server.

Towers and prompt run once for a group, all samples of a micro-batch decode together. It knows no queues and no
rewards. Implements `relax.rollout.engine.RolloutEngine`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from relax.data.chat import ChatTokenizer
from relax.errors import SnapshotError
from relax.models.snapshot import Snapshot, read_changes
from relax.models.thinker import checkpoint_views, load_thinker
from relax.rollout.engine import Completion, GenerateRequest, refused
from relax.rollout.refusal import refusal
from relax.rollout.step_gate import StepGate
from relax.rollout.torch_engine_decode import Decoding, RoutingTap


class TorchEngine:
    """Samples from a model directory of any family; see `relax.rollout.engine` for the contract.

    Args:
        model_dir: Directory in Hugging Face layout with tokenizer; its weights are policy version 0.
        num_threads: CPU threads of torch, for the whole process.
        dtype: Of weights and activations; sampling is in float32 and float64.
        device: Where the model runs.
        max_batch_tokens: Most tokens (samples x longest sequence) decoded together; a larger request runs alone.
        max_pause_s: Longest time that `generate` waits while paused before it gives up with a TimeoutError.
    """

    def __init__(
        self,
        model_dir: Path | str,
        *,
        num_threads: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        max_batch_tokens: int = 1 << 16,
        max_pause_s: float = 600.0,
    ) -> None:
        torch.set_num_threads(num_threads)
        self.policy_version = 0
        self._thinker = load_thinker(model_dir, dtype, device=device)
        self._thinker.hf.requires_grad_(False)
        self._tokenizer = ChatTokenizer(model_dir)
        self._weights = checkpoint_views(self._thinker)
        self._adopted: dict[str, frozenset[str]] = {}
        """Checksums of the files that the weights are of, and the names in them."""
        self._routing = RoutingTap(self._thinker)
        self._gate = StepGate(max_pause_s)
        self._max_batch_tokens = max_batch_tokens
        self._one_at_a_time = threading.Lock()

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Return completions request by request; see the protocol. Calls from several threads take turns.

        Raises:
            TimeoutError: Paused for longer than `max_pause_s`.
        """
        mark = self._gate.begin_round()
        answers: dict[int, list[Completion]] = {}
        fitting: list[int] = []
        for index, request in enumerate(requests):
            reason = refusal(request, self._thinker.spec)
            if reason:
                answers[index] = [refused(request, reason)]
            else:
                fitting.append(index)
        with self._one_at_a_time, torch.inference_mode():
            for indices in self._micro_batches(requests, fitting):
                made = self._decode([requests[index] for index in indices], mark)
                for index in indices:
                    count = requests[index].num_samples
                    answers[index], made = made[:count], made[count:]
        return [completion for index in range(len(requests)) for completion in answers[index]]

    def adopt(self, snapshot_dir: Path | str, policy_version: int) -> None:
        """Replace all weights between two steps, or none of them; see the protocol.

        Files of the snapshot that the engine has already, by their checksums, are neither read nor copied.
        """
        snapshot = read_changes(snapshot_dir, self._adopted.keys())
        if snapshot.policy_version != policy_version:
            raise SnapshotError(
                f"TorchEngine.adopt: {snapshot_dir} must be policy version {policy_version}, "
                f"got {snapshot.policy_version}"
            )
        held = {checksum: self._adopted.get(checksum, frozenset()) for checksum in snapshot.checksums}
        held |= snapshot.names
        self._check_tensors(snapshot, frozenset().union(*held.values()), snapshot_dir)
        names = list(snapshot.tensors)
        with self._gate.between_steps(), torch.inference_mode(False), torch.no_grad():
            self._adopted = {}  # of no snapshot until all is copied
            if names:
                torch._foreach_copy_(
                    [self._weights[name] for name in names], [snapshot.tensors[name] for name in names]
                )
            self._adopted = held
            self.policy_version = policy_version

    def pause(self) -> None:
        """Hold generation before its next step; caches are kept."""
        self._gate.pause()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._gate.resume()

    def abort(self) -> None:
        """End the `generate` calls in flight with what they have."""
        self._gate.abort()

    def close(self) -> None:
        """Abort, and let go of the model's hooks."""
        self._gate.abort()
        self._routing.close()

    def _decode(self, requests: list[GenerateRequest], mark: int) -> list[Completion]:
        decoding = Decoding(self._thinker, requests, self._routing)
        advance = decoding.prefill
        more = True
        while more:
            with self._gate.step(mark) as allowed:
                if not allowed:
                    break
                more = advance(self.policy_version)
            advance = decoding.step
        return decoding.completions(self._tokenizer.decode)

    def _micro_batches(self, requests: Sequence[GenerateRequest], fitting: list[int]) -> list[list[int]]:
        """Group requests of similar length, each group within the token budget."""
        batches: list[list[int]] = []
        num_rows = longest = 0
        for index in sorted(fitting, key=lambda i: len(requests[i].token_ids) + requests[i].max_new_tokens):
            request = requests[index]
            longest = max(longest, len(request.token_ids) + request.max_new_tokens)
            num_rows += request.num_samples
            if not batches or num_rows * longest > self._max_batch_tokens:
                batches.append([])
                num_rows = request.num_samples
            batches[-1].append(index)
        return batches

    def _check_tensors(self, snapshot: Snapshot, names: frozenset[str], snapshot_dir: Path | str) -> None:
        missing, unknown = self._weights.keys() - names, names - self._weights.keys()
        if missing or unknown:
            raise SnapshotError(
                f"TorchEngine.adopt: {snapshot_dir} must hold exactly the model's tensors, "
                f"lacks {len(missing)} {sorted(missing)[:3]}, has {len(unknown)} unknown {sorted(unknown)[:3]}"
            )
        for name, tensor in snapshot.tensors.items():
            expected = self._weights[name].shape
            if tensor.shape != expected:
                raise SnapshotError(
                    f"TorchEngine.adopt: {name} must have shape {list(expected)}, got {list(tensor.shape)}"
                )
