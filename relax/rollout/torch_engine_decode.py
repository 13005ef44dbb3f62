"""Decoding for the embedded engine: prefill once a prompt, then one token a step for all samples together.

A `Decoding` is a state machine without locks: `prefill()`, then `step()` until it returns False, then
`completions()`. The caller decides when steps may run (`relax.rollout.step_gate`).

Shapes: B prompts, R samples ("rows") still decoding, T prompt tokens padded on the left, V vocabulary,
L layers, K experts a token, S steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from relax.models.batch import collate
from relax.models.inputs import PromptInputs
from relax.models.thinker import Embedded, Thinker, embed, language_model
from relax.rollout.engine import Completion, FinishReason, GenerateRequest


class RoutingTap:
    """Keeps the experts that the routers chose in the last forward pass, by forward hooks; nothing of a dense model."""

    def __init__(self, thinker: Thinker) -> None:
        self._num_layers = thinker.spec.num_layers
        self._top_k = thinker.spec.top_k
        self.dtype = np.dtype(np.uint8 if thinker.spec.num_experts <= 256 else np.uint16)
        self._chosen: dict[int, torch.Tensor] = {}
        self._handles = [
            layer.mlp.gate.register_forward_hook(self._hook(index))
            for index, layer in enumerate(thinker.text.layers)
            if hasattr(layer.mlp, "gate")
        ]

    def take(self, num_rows: int) -> np.ndarray | None:
        """Return what the last forward pass chose, [num_rows, tokens, L, K]; layers without experts are 0."""
        if not self._chosen:
            return None
        first = next(iter(self._chosen.values()))
        shape = (num_rows, len(first) // num_rows, self._num_layers, self._top_k)
        routes = np.zeros(shape, self.dtype)
        for layer, chosen in self._chosen.items():
            routes[:, :, layer] = chosen.view(*shape[:2], self._top_k).cpu().numpy()
        self._chosen.clear()
        return routes

    def close(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, layer: int) -> Callable:
        def keep(_module: torch.nn.Module, _inputs: tuple, outputs: tuple) -> None:
            self._chosen[layer] = outputs[2]

        return keep


class Decoding:
    """One micro-batch of requests on its way to completions."""

    def __init__(self, thinker: Thinker, requests: Sequence[GenerateRequest], routing: RoutingTap) -> None:
        self._thinker = thinker
        self._requests = requests
        self._routing = routing
        self._batch = collate(
            [PromptInputs(request.token_ids, request.media) for request in requests],
            thinker.spec,
            check=False,
        ).to(thinker.device)
        samples = [request.num_samples for request in requests]
        self._prompt_of_row = np.repeat(np.arange(len(requests)), samples)
        num_rows, num_steps = len(self._prompt_of_row), max(request.max_new_tokens for request in requests)
        self._tokens = np.zeros((num_rows, num_steps), np.int32)
        self._logprobs = np.zeros((num_rows, num_steps), np.float32)
        self._versions = np.zeros((num_rows, num_steps), np.int32)
        self._lengths = np.zeros(num_rows, np.int64)
        self._reasons: list[FinishReason] = ["abort"] * num_rows
        self._step_routes: np.ndarray | None = None
        self._prompt_routes: np.ndarray | None = None
        self._limits = np.repeat([request.max_new_tokens for request in requests], samples)
        self._sampler = Sampler(requests, num_steps, thinker)
        self._num_done_steps = 0
        self._active = np.arange(num_rows)
        """Row of `_tokens` for each row of the cache."""

    def prefill(self, policy_version: int) -> bool:
        """Run towers and language model over the prompts, sample first tokens; return whether steps remain."""
        embedded = embed(self._thinker, self._batch)
        self._cache = DynamicCache(config=self._thinker.text.config)
        hidden_BTH = language_model(self._thinker, embedded, self._batch.attention_mask_BT, self._cache)
        logits_BV = self._thinker.hf.lm_head(hidden_BTH[:, -1])
        self._prompt_routes = self._routing.take(len(self._requests))
        rows = torch.from_numpy(self._prompt_of_row).to(self._thinker.device)
        self._cache.batch_select_indices(rows)
        self._next_position_R = embedded.next_position_B[rows]
        self._mask_RT = self._batch.attention_mask_BT[rows]
        return self._sample(logits_BV.float()[rows], policy_version)

    def step(self, policy_version: int) -> bool:
        """Run the last sampled tokens and sample the next ones; return whether further steps remain."""
        step = self._num_done_steps - 1
        device = self._thinker.device
        tokens_R = torch.from_numpy(self._tokens[self._active, step].astype(np.int64)).to(device)
        num_rows = len(self._active)
        self._mask_RT = torch.cat((self._mask_RT, self._mask_RT.new_ones(num_rows, 1)), 1)
        embedded = Embedded(
            self._thinker.hf.get_input_embeddings()(tokens_R)[:, None],
            (self._next_position_R + step)[None, :, None].expand(3, -1, -1),
            self._next_position_R,
            torch.zeros(num_rows, 1, dtype=torch.bool, device=device),
            [],
        )
        hidden_R1H = language_model(self._thinker, embedded, self._mask_RT, self._cache)
        routes = self._routing.take(num_rows)
        if routes is not None:
            if self._step_routes is None:
                shape = (len(self._tokens), self._tokens.shape[1], *routes.shape[2:])
                self._step_routes = np.zeros(shape, routes.dtype)
            self._step_routes[self._active, step] = routes[:, 0]
        return self._sample(self._thinker.hf.lm_head(hidden_R1H[:, 0]).float(), policy_version)

    def completions(self, decode: Callable[[list[int]], str]) -> list[Completion]:
        """Return what there is, request by request; rows that still had steps to go count as aborted."""
        texts: dict[tuple[int, ...], str] = {}
        made: list[Completion] = []
        first_row = 0
        for index, request in enumerate(self._requests):
            for sample in range(request.num_samples):
                row = first_row + sample
                length = int(self._lengths[row])
                tokens = self._tokens[row, :length]
                key = tuple(tokens.tolist())
                if key not in texts:
                    texts[key] = decode(list(key))
                made.append(
                    Completion(
                        uid=request.uid,
                        sample_index=sample,
                        token_ids=tokens,
                        logprobs=self._logprobs[row, :length],
                        token_policy_versions=self._versions[row, :length],
                        routed_experts=self._routes(index, row, length),
                        finish_reason=self._reasons[row],
                        text=texts[key],
                    )
                )
            first_row += request.num_samples
        return made

    def _sample(self, logits_RV: torch.Tensor, policy_version: int) -> bool:
        step, active = self._num_done_steps, self._active
        tokens_R, logprobs_R = self._sampler.sample(logits_RV, active, step)
        self._tokens[active, step] = tokens_R
        self._logprobs[active, step] = logprobs_R
        self._versions[active, step] = policy_version
        self._lengths[active] = step + 1
        self._num_done_steps += 1
        stopped = np.isin(tokens_R, self._thinker.spec.eos_token_ids)
        done = stopped | (self._limits[active] <= step + 1)
        for row, by_token in zip(active[done].tolist(), stopped[done].tolist(), strict=True):
            self._reasons[row] = "stop" if by_token else "length"
        if done.all():
            return False
        if done.any():
            self._keep(np.flatnonzero(~done))
        return True

    def _keep(self, rows: np.ndarray) -> None:
        """Drop the finished rows from everything that the next step reads."""
        index = torch.from_numpy(rows).to(self._thinker.device)
        self._active = self._active[rows]
        self._cache.batch_select_indices(index)
        self._mask_RT = self._mask_RT[index]
        self._next_position_R = self._next_position_R[index]

    def _routes(self, index: int, row: int, length: int) -> np.ndarray | None:
        if self._prompt_routes is None or not length:
            return None
        prompt = self._prompt_routes[index, -len(self._requests[index].token_ids) :]
        if self._step_routes is None or length == 1:
            return prompt
        return np.concatenate((prompt, self._step_routes[row, : length - 1]))


class Sampler:
    """Draws tokens by inverting the cumulative distribution at numbers that the request's seed decides."""

    def __init__(self, requests: Sequence[GenerateRequest], num_steps: int, thinker: Thinker) -> None:
        samples = [request.num_samples for request in requests]
        greedy = [request.greedy or request.temperature == 0 for request in requests]
        scale = [1.0 if not request.temperature else request.temperature for request in requests]
        self._greedy = np.repeat(greedy, samples)
        self._temperature_R1 = torch.from_numpy(np.repeat(scale, samples).astype(np.float32))[:, None]
        self._uniform_RS = torch.zeros(sum(samples), num_steps, dtype=torch.float64)
        first_row = 0
        for request, without_draws in zip(requests, greedy, strict=True):
            if not without_draws:
                generator = torch.Generator().manual_seed(request.seed)
                shape = (request.num_samples, request.max_new_tokens)
                rows = slice(first_row, first_row + request.num_samples)
                self._uniform_RS[rows, : request.max_new_tokens] = torch.rand(
                    shape, generator=generator, dtype=torch.float64
                )
            first_row += request.num_samples
        self._device = thinker.device

    def sample(self, logits_RV: torch.Tensor, rows: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens int64 [R], logprobs float32 [R]) for `rows` of all samples at `step`.

        Logits that are not finite give a token of no meaning and a logprob that is not finite either.
        """
        index = torch.from_numpy(rows)
        scaled_RV = logits_RV / self._temperature_R1[index].to(self._device)
        logprobs_RV = scaled_RV.log_softmax(-1)
        cumulative_RV = logprobs_RV.double().exp().cumsum(-1)
        target_R1 = self._uniform_RS[index, step, None].to(self._device) * cumulative_RV[:, -1:]
        # right=True: a token of probability 0 repeats its predecessor's sum and can never be drawn.
        drawn_R1 = torch.searchsorted(cumulative_RV, target_R1, right=True)
        tokens_R1 = drawn_R1.clamp_(max=logits_RV.shape[-1] - 1)
        if self._greedy.any():
            greedy_R1 = torch.from_numpy(self._greedy[rows])[:, None].to(self._device)
            tokens_R1 = torch.where(greedy_R1, logprobs_RV.argmax(-1, keepdim=True), tokens_R1)
        chosen_R = logprobs_RV.gather(-1, tokens_R1)[:, 0]
        return tokens_R1[:, 0].cpu().numpy(), chosen_R.cpu().numpy()
