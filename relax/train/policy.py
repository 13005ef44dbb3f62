"""The policy that is trained: Hugging Face towers and Megatron-core language model, from and to one checkpoint format.

It is the same for every family of models (`relax.models.families`); a text model has no towers.

It turns prompts into embeddings once for each group, and micro-batches into the hidden states that predict the
completion tokens. It computes no loss and updates nothing. On several ranks each has its part of the language model;
the towers are on those of the first stage.

Shapes: P prompts, T tokens (padded), F = P * T flat prompt places, C completion tokens of the batch, N predicted
tokens of a micro-batch, R tokens of a sequence on this rank, B sequences, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from relax.errors import TrainingError
from relax.models.checkpoint_files import read_tensors, tensor_files
from relax.models.inputs import PromptInputs
from relax.models.thinker import collate, embed, load_towers, train_towers
from relax.train.batch import MicroBatch, RoutingShape
from relax.train.decoder_inputs import Completions, Predicted, PromptTable, lay_out, predicted, routed
from relax.train.language_model import DecoderInputs, ThinkerLanguageModel, moe_layers
from relax.train.mcore_compat import parallel_state
from relax.train.names import NameMap
from relax.train.ranks import GatherRows, World
from relax.train.replay import ReplaySession, replay_routing
from relax.train.shards import gather_whole, global_name
from relax.train.vocabulary import VocabularyPart

LANGUAGE_MODEL = "language_model."
"""What the names of the language model's parameters start with; the towers' are those of Hugging Face."""


class MicroRun:
    """One micro-batch on its way through this rank's layers, forward and later backward."""

    def __init__(
        self, policy: OmniPolicy, inputs: DecoderInputs, predicted: Predicted, session: ReplaySession
    ) -> None:
        self._policy = policy
        self._inputs = inputs
        self._predicted = predicted
        self.session = session

    @property
    def own_targets(self) -> Tensor:
        """Which completion tokens of the batch this rank predicts, on the last stage."""
        return self._predicted.target_N

    @property
    def targets(self) -> Tensor:
        """Those that all context parallel ranks predict, in the order of `joined`."""
        return self._predicted.all_target_N

    def forward(self, received_RBH: Tensor | None = None) -> Tensor:
        """Return hidden states [R, B, H] for the next stage, or on the last one those [N, H] that predict."""
        with self.session.forward():
            hidden = self._policy.language_model.hidden_states(self._inputs, received_RBH)
        return hidden.flatten(0, 1)[self._predicted.place_N] if self._policy.world.is_last_stage else hidden

    def joined(self, values: Tensor) -> Tensor:
        """Return values [N, ...] of `own_targets` of all context parallel ranks, those of `targets`."""
        world = self._policy.world
        if world.layout.cp == 1:
            return values
        return GatherRows.apply(values, self._predicted.counts, world.cp_group)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Run the backward pass of this micro-batch in the block: recompute then sees what the forward pass saw."""
        self._policy.language_model.keep_visuals(self._inputs)
        with self.session.backward():
            yield


class OmniPolicy(nn.Module):
    """Towers and language model of one model directory, as far as they are this rank's."""

    def __init__(
        self,
        model_dir: Path,
        world: World,
        *,
        freeze_towers: bool = False,
        recompute: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Load the directory onto this rank's device.

        Raises:
            relax.models.errors.CheckpointError: files or tensors of the thinker are missing.
            TrainingError: the directory holds a tensor that the model does not have, or one of another shape.
            ConfigError: the model cannot be cut by the layout.
        """
        super().__init__()
        self.world = world
        self._thinker = load_towers(model_dir, dtype, empty=not world.is_first_stage)
        self._spec, self._names = self._thinker.spec, self._thinker.names
        text_config = self._thinker.hf.config.get_text_config()
        train_towers(self._thinker, not freeze_towers)
        self._towers = list(self._thinker.towers) if world.is_first_stage else []
        for name in self._towers:
            self.add_module(name, self._thinker.towers[name])
        self.language_model = ThinkerLanguageModel(
            text_config,
            family=self._spec.family,
            layout=world.layout,
            stage=world.place.pp_rank,
            tied=self._spec.tied,
            recompute=recompute,
            dtype=dtype,
        )
        self._is_moe = moe_layers(text_config)
        self._files = tensor_files(model_dir)
        self._dtypes = self._load(model_dir)
        self.to(world.device)

    @property
    def vocab_size(self) -> int:
        return self._spec.vocab_size

    @property
    def routed_layers(self) -> list[int]:
        """Layers of this stage that have experts, counted over the whole model."""
        first = self.language_model.first_layer
        end = first + len(self.language_model.decoder.layers)
        return [layer for layer in range(first, end) if self._is_moe[layer]]

    @property
    def routing_shape(self) -> RoutingShape | None:
        """What the rollout's routing must look like on this rank; None for a stage without experts."""
        config = self.language_model.config
        if not self.routed_layers:
            return None
        return RoutingShape(
            num_layers=len(self.routed_layers),
            top_k=config.moe_router_topk,
            num_experts=config.num_moe_experts,
        )

    @property
    def vocabulary(self) -> VocabularyPart | None:
        """Which words the language model's logits on this rank are of; None: all."""
        ranks = self.world.layout.tp
        if ranks == 1:
            return None
        each = self.language_model.padded_vocab_size // ranks
        return VocabularyPart(self.world.place.tp_rank * each, self.world.tp_group)

    def towers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the towers' parameters."""
        for name, parameter in self.named_parameters():
            if not name.startswith(LANGUAGE_MODEL):
                yield name, parameter

    def global_names(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the language model's parameters under names that count layers and experts over all ranks."""
        for name, parameter in self.language_model.named_parameters():
            yield self._global_name(name), parameter

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return all weights under the directory's names and in its types; views where the layouts allow.

        All ranks must call it; rank 0 gets the weights, the others nothing.
        """
        return self.checkpoint_part(self.state_dict())

    def checkpoint_names(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors of the policy's names (weights, gradients) under the directory's names and layouts.

        All ranks must call it; rank 0 gets whole tensors, the others nothing.
        """
        ours = {n.removeprefix(LANGUAGE_MODEL): t for n, t in tensors.items() if n.startswith(LANGUAGE_MODEL)}
        parts = {self._global_name(name): tensor for name, tensor in ours.items() if torch.is_tensor(tensor)}
        whole = gather_whole(self.world, parts)
        if self.world.rank:
            return {}
        named = self._stacks.join(dict(self._name_map.to_checkpoint(whole.items())))
        embedding = f"{self._names.text}embed_tokens.weight"
        if self._names.head in self._dtypes and self._spec.tied and embedding in named:
            named[self._names.head] = named[embedding]
        return named | {
            self._tower_name(n): t for n, t in tensors.items() if not n.startswith(LANGUAGE_MODEL)
        }

    def checkpoint_part(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return some weights, by the policy's names, under the directory's names and in its types.

        All ranks must call it with their parts of the same weights; rank 0 gets whole tensors, the others nothing.
        """
        named = self.checkpoint_names(tensors)
        return {name: named[name].to(dtype) for name, dtype in self._dtypes.items() if name in named}

    def stack_of(self, name: str) -> str:
        """Return which stack of experts a weight belongs to, by its name on all ranks; '' if to none.

        A stack is one tensor of the directory: all of its weights have to be gathered together.
        """
        stem, found, _ = name.partition(".experts.")
        return stem if found and self._stacks else ""

    def held_parts(self) -> dict[str, tuple[str, Tensor]]:
        """Return this rank's parts of the weights, each with its name here, by names that are the same on all ranks."""
        held = {}
        for name, tensor in self.state_dict().items():
            if torch.is_tensor(tensor):
                is_part = name.startswith(LANGUAGE_MODEL)
                known = self._global_name(name.removeprefix(LANGUAGE_MODEL)) if is_part else name
                held[LANGUAGE_MODEL + known if is_part else known] = name, tensor
        return held

    @torch.no_grad()
    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Take other weights, of the directory's names as `checkpoint_tensors` returned them, in place of those here.

        Raises:
            TrainingError: a tensor is missing or has another shape.
        """
        place, layout = self.world.place, self.world.layout
        apart = self._stacks.split(tensors)
        self._name_map.from_checkpoint(self.global_names(), apart, tp_rank=place.tp_rank, tp_size=layout.tp)
        for name, tensor in self._tower_state():
            known = self._tower_name(name)
            if known not in tensors:
                raise TrainingError(f"adopt: weights must hold {known!r}, got nothing there")
            tensor.copy_(tensors[known])

    def embed_prompts(self, prompts: Sequence[PromptInputs]) -> PromptTable:
        """Run the towers once over the prompts; the result carries their graph unless they are frozen.

        All ranks of the stages must call it with the same prompts; past the first stage media are not looked at.
        """
        if not self.world.is_first_stage:
            longest = max(len(prompt.token_ids) for prompt in prompts)
            return self._share_positions(len(prompts), longest, None)
        batch = collate(prompts, self._spec, "right").to(self.world.device)
        token_embeds = self.language_model.embed_tokens(batch.input_ids_BT)
        embedded = embed(self._thinker, batch, token_embeds)
        visual_F = embedded.visual_mask_BT.flatten()
        table = PromptTable(
            embeds_FH=embedded.inputs_embeds_BTH.flatten(0, 1),
            position_ids_3F=embedded.position_ids_3BT.flatten(1).contiguous(),
            visual_rank_F=torch.where(visual_F, visual_F.long().cumsum(0) - 1, -1),
            deepstack=embedded.deepstack,
            next_position_P=embedded.next_position_B,
        )
        return self._share_positions(len(prompts), batch.input_ids_BT.shape[1], table)

    def begin(self, prompts: PromptTable, completions: Completions, micro: MicroBatch) -> MicroRun:
        """Lay a micro-batch out on this rank, to be run forward and backward.

        Args:
            prompts: From `embed_prompts`, or its leaves.
            completions: The batch's completion tokens, row after row.
            micro: Which of them, and where; the experts that it names are replayed or compared, as it says.
        """
        inputs = lay_out(self.language_model.embed_tokens, prompts, completions, micro, self.world)
        return MicroRun(self, inputs, predicted(micro, self.world), self._replay(micro))

    def _replay(self, micro: MicroBatch) -> ReplaySession:
        routers = self.language_model.routers
        if micro.experts_BTLK is None or not routers:
            return ReplaySession((), (), None)
        experts_NLK, counted_N = routed(micro, self.world)
        return replay_routing(routers, experts_NLK, counted_N, replay=micro.replay)

    def _share_positions(self, num_prompts: int, longest: int, table: PromptTable | None) -> PromptTable:
        """Send the first stage's rotary positions to the other stages."""
        if self.world.layout.pp == 1 and table is not None:
            return table
        source, group = parallel_state.get_pipeline_model_parallel_first_rank(), self.world.pp_group
        if table is None:
            device = self.world.device
            table = PromptTable(
                embeds_FH=None,
                position_ids_3F=torch.empty((3, num_prompts * longest), device=device),
                visual_rank_F=torch.empty(0, dtype=torch.long, device=device),
                deepstack=[],
                next_position_P=torch.empty(num_prompts, device=device),
            )
        for positions in (table.position_ids_3F, table.next_position_P):
            dist.broadcast(positions, source, group=group)
        return table

    def _global_name(self, name: str) -> str:
        config = self.language_model.config
        each = (config.num_moe_experts or 0) // self.world.layout.ep
        return global_name(name, self.language_model.first_layer, self.world.place.ep_rank * each)

    def _load(self, model_dir: Path) -> dict[str, torch.dtype]:
        """Read the language model's tensors and return the type of every tensor of the model, by its name there."""
        config, names, family = self.language_model.config, self._names, self._spec.family
        self._name_map = NameMap(
            text=names.text,
            head=names.head,
            num_heads=config.num_attention_heads,
            num_groups=config.num_query_groups,
            head_size=config.kv_channels,
            padding=self.language_model.padded_vocab_size - self.vocab_size,
        )
        self._stacks = self._thinker.stacks
        stored = read_tensors(
            model_dir, [name for name in self._files if not name.startswith(family.foreign)]
        )
        used = self._name_map.from_checkpoint(
            self.global_names(),
            self._stacks.split(stored),
            tp_rank=self.world.place.tp_rank,
            tp_size=self.world.layout.tp,
        )
        used |= {self._tower_name(name) for name, _ in self._tower_state()}
        if self._spec.tied:
            used.add(names.head)
        unknown = self._unused(sorted(self._stacks.split(stored)), used)
        if unknown:
            raise TrainingError(
                f"load: {model_dir} must hold only tensors of a {family.name}, got {len(unknown)} others, "
                f"first {unknown[0]!r}; drop them or extend relax.train.names"
            )
        return {name: tensor.dtype for name, tensor in stored.items()}

    def _unused(self, names: list[str], used: set[str]) -> list[str]:
        """Return the names that no rank uses."""
        uses = self.world.sum(torch.tensor([float(name in used) for name in names], device=self.world.device))
        return [name for name, count in zip(names, uses.tolist(), strict=True) if not count]

    def _tower_name(self, name: str) -> str:
        """Return the checkpoint's name of a tower's tensor."""
        tower, _, rest = name.partition(".")
        return self._names.towers[tower] + rest

    def _tower_state(self) -> Iterator[tuple[str, Tensor]]:
        for tower in self._towers:
            for name, tensor in getattr(self, tower).state_dict().items():
                yield f"{tower}.{name}", tensor
