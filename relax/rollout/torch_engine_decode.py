"""Decoding for the embedded engine: prefill once a prompt, then one token a step for all samples together.

A `Decoding` is a state machine without locks: `prefill()`, then `step()` until it returns False, then
`completions()`. The caller decides when steps may run (`relax.rollout.step_gate`). Completions that were begun before
are run once more behind their prompts, as one piece, and then go on with the others.

Shapes: B prompts, R samples ("rows") still decoding, T prompt tokens padded on the left, V vocabulary,
L layers, K experts a token, S steps, C tokens of what was begun, padded on the left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from relax.models.batch import collate
from relax.models.inputs import PromptInputs
from relax.models.thinker import Embedded, Thinker, embed, language_model
from relax.rollout.continuing import begun_by_sample, joined_routes, wanted
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
        self._wanted = np.array([wanted(request) for request in requests])
        self._sampler = Sampler(requests, num_steps, thinker)
        self._is_done = np.zeros(num_rows, bool)
        self._begun = self._take_up(requests)
        self._active = np.flatnonzero(~(self._is_done | self._is_surplus(np.arange(num_rows))))
        """Row of `_tokens` for each row of the cache."""

    def prefill(self, policy_version: int) -> bool:
        """Run towers and language model over the prompts, sample first tokens; return whether steps remain."""
        if not len(self._active):
            return False
        embedded = embed(self._thinker, self._batch)
        self._cache = DynamicCache(config=self._thinker.text.config)
        hidden_BTH = language_model(self._thinker, embedded, self._batch.attention_mask_BT, self._cache)
        logits_BV = self._thinker.hf.lm_head(hidden_BTH[:, -1])
        self._prompt_routes = self._routing.take(len(self._requests))
        rows = torch.from_numpy(self._prompt_of_row[self._active]).to(self._thinker.device)
        self._cache.batch_select_indices(rows)
        self._next_position_R = embedded.next_position_B[rows]
        self._mask_RT = self._batch.attention_mask_BT[rows]
        logits_RV = logits_BV.float()[rows]
        if self._lengths[self._active].any():
            logits_RV = self._run_begun(logits_RV)
        return self._sample(logits_RV, policy_version)

    def step(self, policy_version: int) -> bool:
        """Run the last sampled tokens and sample the next ones; return whether further steps remain."""
        steps_R = self._lengths[self._active] - 1
        tokens_R1 = self._tokens[self._active, steps_R][:, None]
        hidden_R1H = self._run(tokens_R1, np.ones_like(tokens_R1), steps_R[:, None])
        self._keep_routes(np.arange(len(self._active)), steps_R)
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

    def _take_up(self, requests: Sequence[GenerateRequest]) -> dict[int, Completion]:
        """Fill in what was made before; return it by row."""
        begun: dict[int, Completion] = {}
        first_row = 0
        for request in requests:
            for sample, old in begun_by_sample(request).items():
                row, length = first_row + sample, len(old.token_ids)
                self._tokens[row, :length] = old.token_ids
                self._logprobs[row, :length] = old.logprobs
                self._versions[row, :length] = old.token_policy_versions
                self._lengths[row] = length
                self._is_done[row] = old.is_finished
                self._reasons[row] = old.finish_reason
                begun[row] = old
            first_row += request.num_samples
        return begun

    def _run_begun(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """Run what was begun behind the prompts; return the logits of its last tokens, else of the prompts'."""
        lengths_R = self._lengths[self._active]
        longest = int(lengths_R.max())
        places_RC = np.arange(longest) - (longest - lengths_R)[:, None]
        mask_RC = (places_RC >= 0).astype(np.int64)
        places_RC = places_RC.clip(min=0)
        hidden_RCH = self._run(self._tokens[self._active[:, None], places_RC], mask_RC, places_RC)
        self._keep_routes(np.flatnonzero(lengths_R), lengths_R - 1)
        is_begun_R1 = torch.from_numpy(lengths_R > 0)[:, None].to(logits_RV.device)
        return torch.where(is_begun_R1, self._thinker.hf.lm_head(hidden_RCH[:, -1]).float(), logits_RV)

    def _run(self, tokens_RC: np.ndarray, mask_RC: np.ndarray, places_RC: np.ndarray) -> torch.Tensor:
        """Run completion tokens of the active rows behind the cache; return the hidden states [R, C, H].

        Args:
            tokens_RC: As plain words, placeholders too.
            mask_RC: 0 for padding.
            places_RC: Of the tokens within their completions, from 0.
        """
        device = self._thinker.device
        mask = torch.from_numpy(mask_RC).to(self._mask_RT)
        self._mask_RT = torch.cat((self._mask_RT, mask), 1)
        positions_RC = self._next_position_R[:, None] + torch.from_numpy(places_RC).to(device)
        embedded = Embedded(
            self._thinker.hf.get_input_embeddings()(torch.from_numpy(tokens_RC.astype(np.int64)).to(device)),
            positions_RC[None].expand(3, -1, -1),
            self._next_position_R,
            torch.zeros(positions_RC.shape, dtype=torch.bool, device=device),
            [],
        )
        return language_model(self._thinker, embedded, self._mask_RT, self._cache)

    def _keep_routes(self, which: np.ndarray, places_R: np.ndarray) -> None:
        """Keep the experts of the last token run, for the active rows `which`, at its place in their completions."""
        routes = self._routing.take(len(self._active))
        if routes is None:  # of a model without experts
            return
        if self._step_routes is None:
            shape = (len(self._tokens), self._tokens.shape[1], *routes.shape[2:])
            self._step_routes = np.zeros(shape, routes.dtype)
        self._step_routes[self._active[which], places_R[which]] = routes[which, -1]

    def _is_surplus(self, rows: np.ndarray) -> np.ndarray:
        """Return which of these rows belong to prompts of which enough samples have finished."""
        prompts = self._prompt_of_row
        num_done = np.bincount(prompts[self._is_done], minlength=len(self._requests))
        return (num_done >= self._wanted)[prompts[rows]]

    def _sample(self, logits_RV: torch.Tensor, policy_version: int) -> bool:
        active = self._active
        steps_R = self._lengths[active]
        tokens_R, logprobs_R = self._sampler.sample(logits_RV, active, steps_R)
        self._tokens[active, steps_R] = tokens_R
        self._logprobs[active, steps_R] = logprobs_R
        self._versions[active, steps_R] = policy_version
        self._lengths[active] = steps_R + 1
        stopped = np.isin(tokens_R, self._thinker.spec.eos_token_ids)
        done = stopped | (self._limits[active] <= steps_R + 1)
        for row, by_token in zip(active[done].tolist(), stopped[done].tolist(), strict=True):
            self._reasons[row] = "stop" if by_token else "length"
        self._is_done[active[done]] = True
        done |= self._is_surplus(active)
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
        num_prompt_tokens = len(self._requests[index].token_ids)
        old = self._begun.get(row)
        if old is not None:
            num_old = len(old.token_ids)
            if length == num_old or self._step_routes is None:
                return old.routed_experts
            new = self._step_routes[row, num_old - 1 : length - 1]
            return joined_routes(old.routed_experts, new, num_prompt_tokens, num_old)
        if self._prompt_routes is None or not length:
            return None
        prompt = self._prompt_routes[index, -num_prompt_tokens:]
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

    def sample(
        self, logits_RV: torch.Tensor, rows: np.ndarray, steps_R: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens int64 [R], logprobs float32 [R]) for `rows` of all samples, each at its own step.

        Logits that are not finite give a token of no meaning and a logprob that is not finite either.
        """
        index = torch.from_numpy(rows)
        scaled_RV = logits_RV / self._temperature_R1[index].to(self._device)
        logprobs_RV = scaled_RV.log_softmax(-1)
        cumulative_RV = logprobs_RV.double().exp().cumsum(-1)
        target_R1 = (
            self._uniform_RS[index, torch.from_numpy(steps_R), None].to(self._device) * cumulative_RV[:, -1:]
        )
        # right=True: a token of probability 0 repeats its predecessor's sum and can never be drawn.
        drawn_R1 = torch.searchsorted(cumulative_RV, target_R1, right=True)
        tokens_R1 = drawn_R1.clamp_(max=logits_RV.shape[-1] - 1)
        if self._greedy.any():
            greedy_R1 = torch.from_numpy(self._greedy[rows])[:, None].to(self._device)
            tokens_R1 = torch.where(greedy_R1, logprobs_RV.argmax(-1, keepdim=True), tokens_R1)
        chosen_R = logprobs_RV.gather(-1, tokens_R1)[:, 0]
        return tokens_R1[:, 0].cpu().numpy(), chosen_R.cpu().numpy()
