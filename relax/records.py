"""The tables of a run: every column, who writes it and who needs it. It holds no rows and opens no socket.

    prompts ----take----> rollout ----put----> rollouts ----take----> actor ----put (columns)----> rollouts
       ^                     ^                                          ^                             |
    preprocess --> media ----+------------------read by id--------------+         recorder <---take---+

`rollouts` rows are written in two parts: the rollout role writes the sample, the actor adds what training saw. A file
of media lies in `media` once, for as long as prompts or rollouts refer to it (`media_ids`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.compute as pc

from flight.schema import Column, ConsumerSpec, StalenessPolicy, StalenessSpec, TableSpec, TicketSpec
from relax.partial_records import partial_table
from relax.served_columns import ServedColumns

TOKENS = pa.list_(pa.int32())
PER_TOKEN = pa.list_(pa.float32())
STRINGS = pa.list_(pa.string())
INSTANT = pa.timestamp("us", tz="UTC")


def _columns(writer: str, *rows: tuple) -> tuple[Column, ...]:
    made = []
    for name, arrow_type, meaning, *notes in rows:
        unit, shape, references = (*notes, "", "", "")[:3]
        made.append(
            Column(
                name=name,
                type=arrow_type,
                meaning=meaning,
                unit=unit,
                shape=shape,
                writer=writer,
                references=references,
            )
        )
    return tuple(made)


PROMPT_COLUMNS = _columns(
    "preprocess",
    ("prompt_index", pa.int64(), "row of the source, from 0"),
    ("source", pa.string(), "name of the source, or of the evaluation set"),
    ("epoch", pa.int32(), "pass over the source, from 0"),
    (
        "modality",
        pa.string(),
        "modalities of the prompt, sorted and joined by '+'; 'text' when there are none",
    ),
    ("messages", pa.string(), "the conversation in chat form, as JSON"),
    ("prompt_text", pa.string(), "the user's words, media as <image>, <audio>, <video>"),
    (
        "prompt_token_ids",
        TOKENS,
        "the rendered conversation, one placeholder per media token",
        "",
        "[num_prompt_tokens]",
    ),
    ("reference_answer", pa.string(), "the answer that the reward compares with"),
    ("media_paths", STRINGS, "sources of the media in prompt order", "", "[num_media]"),
    ("media_ids", STRINGS, "rows of table media in prompt order", "", "[num_media]", "media"),
)

SAMPLE_COLUMNS = _columns(
    "rollout",
    ("prompt_index", pa.int64(), "row of the source, from 0"),
    ("source", pa.string(), "name of the source, or of the evaluation set"),
    ("epoch", pa.int32(), "pass over the source, from 0"),
    ("modality", pa.string(), "modalities of the prompt, sorted and joined by '+'"),
    ("prompt_text", pa.string(), "the user's words, media as <image>, <audio>, <video>"),
    ("prompt_token_ids", TOKENS, "tokens the completion follows", "", "[num_prompt_tokens]"),
    ("completion_token_ids", TOKENS, "tokens that were sampled", "", "[num_completion_tokens]"),
    ("completion_text", pa.string(), "the completion as text, special tokens left out"),
    (
        "rollout_logprobs",
        PER_TOKEN,
        "log-probability under the sampling distribution",
        "nats",
        "[num_completion_tokens]",
    ),
    (
        "token_policy_versions",
        TOKENS,
        "weights that sampled each token",
        "policy versions",
        "[num_completion_tokens]",
    ),
    ("policy_version_start", pa.int64(), "weights at the first token", "policy versions"),
    ("policy_version_end", pa.int64(), "weights at the last token", "policy versions"),
    ("reward", pa.float32(), "score of the completion"),
    ("reference_answer", pa.string(), "the answer that the reward compared with"),
    ("finish_reason", pa.string(), "stop (end token), length (limit reached) or abort"),
    ("temperature", pa.float32(), "sampling temperature; 0 is greedy"),
    ("seed", pa.int64(), "seed of the group's random generator"),
    ("rollout_worker", pa.string(), "service that generated the row"),
    ("generate_s", pa.float32(), "time of the generate call that made the row", "seconds"),
    ("media_paths", STRINGS, "sources of the media in prompt order", "", "[num_media]"),
    ("media_ids", STRINGS, "content addresses of the media in prompt order", "", "[num_media]", "media"),
    ("created_at", INSTANT, "when the row was put", "UTC"),
)


def reward_columns(labels: Iterable[str]) -> tuple[Column, ...]:
    """Return the columns of what each part of the reward gave, and of why one failed."""
    parts = [
        (
            f"reward_{label}",
            pa.float32(),
            f"part {label!r} of the reward, without its weight; null where it failed",
        )
        for label in labels
    ]
    error = (
        "reward_error",
        pa.string(),
        "why there is no reward and the configured value stands for it; or null",
    )
    return tuple(replace(column, nullable=True) for column in _columns("rollout", *parts, error))


AGENT_COLUMNS = tuple(
    replace(column, nullable=True)
    for column in _columns(
        "rollout",
        (
            "loss_mask",
            pa.list_(pa.bool_()),
            "tokens that the policy sampled; false for those that it observed, which nothing is trained on",
            "",
            "[num_completion_tokens]",
        ),
        ("num_turns", pa.int32(), "turns that the policy took"),
    )
)
"""Columns that rollouts of agents have besides; a completion is then all that follows the first prompt, answers and
observations, and `media_ids` are those of both."""

TRAINED_COLUMNS = _columns(
    "actor",
    ("advantages", PER_TOKEN, "advantage that weighted each token", "", "[num_completion_tokens]"),
    (
        "trainer_logprobs",
        PER_TOKEN,
        "log-probability under the weights before the step",
        "nats",
        "[num_completion_tokens]",
    ),
    ("importance_ratio", pa.float32(), "mean over tokens of exp(trainer_logprobs - rollout_logprobs)"),
    (
        "trained_policy_version",
        pa.int64(),
        "weights before the optimizer step that used the row",
        "policy versions",
    ),
    (
        "optimizer_step",
        pa.int64(),
        "number of that optimizer step, from 1; 0: left out, as all rewards of its group were equal",
    ),
    ("staleness", pa.int32(), "trained_policy_version - policy_version_start", "policy versions"),
)

METRIC_COLUMNS = _columns(
    "",
    ("step", pa.int64(), "optimizer step the value belongs to"),
    ("policy_version", pa.int64(), "weights the value belongs to", "policy versions"),
    ("role", pa.string(), "service that measured it"),
    ("name", pa.string(), "what was measured; its unit is the name's last word"),
    ("value", pa.float64(), "the value"),
    ("time", INSTANT, "when it was measured", "UTC"),
)

ROW_ERROR_COLUMNS = _columns(
    "",
    ("stage", pa.string(), "service that refused the row"),
    ("place", pa.string(), "manifest line, file or row"),
    ("reason", pa.string(), "the rule that was broken and the value that broke it"),
)

POSITION_COLUMNS = _columns(
    "preprocess",
    ("service", pa.string(), "service that the position is of"),
    ("next_draw", pa.int64(), "number of the draw that comes next, from 0"),
    ("order", pa.string(), "digest of the order that it counts in; empty at the beginning"),
    (
        "curriculum",
        pa.string(),
        "means of the prompts that have a reward, as JSON; empty without a curriculum",
    ),
    ("evaluation", pa.int64(), "last round of evaluation whose prompts were put; 0: none"),
)

EVALUATED_VERSION = "evaluated_policy_version"
"""Column of held-out prompts and answers: weights that their round asks for."""


def _evaluated_version(writer: str) -> Column:
    meaning = "weights that the round of evaluation asks for"
    (column,) = _columns(writer, (EVALUATED_VERSION, pa.int64(), meaning, "policy versions"))
    return column


PROMPT_BASICS = tuple(column.name for column in PROMPT_COLUMNS)
ACTOR_READS = (
    "modality",
    "prompt_token_ids",
    "completion_token_ids",
    "rollout_logprobs",
    "policy_version_start",
    "reward",
    "media_ids",
)
REWARD_READS = ("source", "prompt_index", "reward")
"""What a curriculum has to know of a rollout."""

MEDIA_FACTS = ("modality", "content_hash")
"""Columns that every row of `media` has, whatever it keeps."""

MEDIA_GRACE_S = 600.0
"""Seconds that a file's row waits for the first prompt that refers to it."""

MAX_ATTEMPTS = 8
"""Deliveries of a prompt, those to go on with it left out, after which it is given up."""

RECORDED = tuple(column.name for column in (*SAMPLE_COLUMNS, *TRAINED_COLUMNS))


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """The numbers of a run that its tables depend on.

    prompts_per_step: groups in a training batch. group_size: rollouts of one prompt.
    max_staleness: policy versions. lookahead_steps: training batches of prompts prepared in advance.
    reward_labels: parts of the reward, each with a column of its own.
    num_reward_readers: preprocess services that learn of rewards, for the curriculum.
    served: what roles that are services add.
    max_continuations: interruptions of a rollout; 0: none is ever interrupted. num_samples: completions asked for of a
        prompt; 0: group_size.
    agents: rollouts are episodes of several turns.
    """

    prompts_per_step: int
    group_size: int
    max_staleness: int
    staleness_policy: StalenessPolicy = "pace"
    lookahead_steps: int = 2
    num_eval_prompts: int = 0
    capacity_bytes: int = 1 << 30
    record_media: bool = False
    reward_labels: Sequence[str] = ()
    num_reward_readers: int = 0
    served: ServedColumns = field(default_factory=ServedColumns)
    max_continuations: int = 0
    num_samples: int = 0
    agents: bool = False

    @property
    def rows_per_version(self) -> int:
        return self.prompts_per_step * self.group_size

    @property
    def max_prompts_alive(self) -> int:
        """Prompts waiting or in flight: the bound's share plus the lookahead."""
        return (self.max_staleness + 1 + self.lookahead_steps) * self.prompts_per_step


def table_specs(
    shape: RunShape, media_columns: Sequence[Column], routing_columns: Sequence[Column]
) -> dict[str, TableSpec]:
    """Return the specification of every table of a run, by name; one that others refer to comes before them."""
    routing_names = tuple(column.name for column in routing_columns)
    rewards = (*reward_columns(shape.reward_labels), *(AGENT_COLUMNS if shape.agents else ()))
    reward_names = tuple(column.name for column in rewards)
    sample_columns = (*SAMPLE_COLUMNS, *rewards, *routing_columns)
    recorder = ConsumerSpec(name="recorder", columns=MEDIA_FACTS)
    specs = [
        TableSpec(
            name="media",
            columns=tuple(media_columns),
            consumers=(recorder,) if shape.record_media else (),
            capacity_bytes=shape.capacity_bytes,
            max_age_s=MEDIA_GRACE_S,
        ),
        TableSpec(
            name="prompts",
            columns=PROMPT_COLUMNS,
            consumers=(ConsumerSpec(name="rollout", columns=PROMPT_BASICS),),
            tickets=TicketSpec(table="rollouts", rows_per_ticket=shape.group_size),
            capacity_rows=shape.max_prompts_alive,
            capacity_bytes=shape.capacity_bytes,
            max_attempts=MAX_ATTEMPTS * (1 + shape.max_continuations),
        ),
        _rollouts(shape, sample_columns, reward_names, routing_names),
        TableSpec(
            name="eval_prompts",
            columns=(*PROMPT_COLUMNS, _evaluated_version("preprocess")),
            consumers=(ConsumerSpec(name="rollout", columns=(*PROMPT_BASICS, EVALUATED_VERSION)),),
            capacity_rows=max(64, 2 * shape.num_eval_prompts),
            capacity_bytes=shape.capacity_bytes,
        ),
        TableSpec(
            name="eval_rollouts",
            columns=(*sample_columns, _evaluated_version("rollout")),
            consumers=(
                ConsumerSpec(
                    name="driver",
                    columns=(*(column.name for column in SAMPLE_COLUMNS), EVALUATED_VERSION, *reward_names),
                ),
            ),
            capacity_rows=max(64, 4 * shape.num_eval_prompts),
            capacity_bytes=shape.capacity_bytes,
        ),
        TableSpec(
            name="positions",
            columns=POSITION_COLUMNS,
            consumers=(ConsumerSpec(name="preprocess", columns=(), sampler="keyed"),),
        ),
        TableSpec(
            name="metrics",
            columns=METRIC_COLUMNS,
            consumers=(ConsumerSpec(name="driver", columns=tuple(column.name for column in METRIC_COLUMNS)),),
        ),
        TableSpec(
            name="row_errors",
            columns=ROW_ERROR_COLUMNS,
            consumers=(
                ConsumerSpec(name="driver", columns=tuple(column.name for column in ROW_ERROR_COLUMNS)),
            ),
        ),
    ]
    if shape.max_continuations:
        num_completions = shape.max_prompts_alive * max(shape.num_samples, shape.group_size)
        specs.append(partial_table(num_completions, shape.capacity_bytes, routing_columns))
    return {spec.name: spec for spec in specs}


def _rollouts(
    shape: RunShape,
    sample_columns: Sequence[Column],
    reward_names: Sequence[str],
    routing_names: Sequence[str],
) -> TableSpec:
    """Return the table that the trainer reads."""
    served = shape.served
    return TableSpec(
        name="rollouts",
        columns=(*sample_columns, *TRAINED_COLUMNS, *served.columns()),
        consumers=(
            ConsumerSpec(
                name="actor",
                columns=(
                    *ACTOR_READS,
                    *(["loss_mask"] if shape.agents else ()),
                    *routing_names,
                    *served.actor_reads(),
                ),
                sampler="groups",
            ),
            ConsumerSpec(
                name="recorder", columns=(*RECORDED, *reward_names, *routing_names, *served.names())
            ),
            *served.consumers((*ACTOR_READS, "token_policy_versions"), routing_names),
            *(
                ConsumerSpec(name=reward_reader(index), columns=REWARD_READS)
                for index in range(shape.num_reward_readers)
            ),
        ),
        group_size=shape.group_size,
        staleness=StalenessSpec(
            max_staleness=shape.max_staleness,
            rows_per_version=shape.rows_per_version,
            consumer="actor",
            policy=shape.staleness_policy,
        ),
        capacity_rows=(shape.max_staleness + 4) * shape.rows_per_version,
        capacity_bytes=shape.capacity_bytes,
    )


WRITES: Mapping[str, Mapping[str, Iterable[str]]] = {
    "preprocess": {
        "media": MEDIA_FACTS,
        "prompts": PROMPT_BASICS,
        "eval_prompts": [*PROMPT_BASICS, EVALUATED_VERSION],
        "positions": [column.name for column in POSITION_COLUMNS],
        "row_errors": [column.name for column in ROW_ERROR_COLUMNS],
    },
    "rollout": {
        "rollouts": [column.name for column in SAMPLE_COLUMNS],
        "eval_rollouts": [*(column.name for column in SAMPLE_COLUMNS), EVALUATED_VERSION],
    },
    "actor": {
        "rollouts": [column.name for column in TRAINED_COLUMNS],
        "metrics": [column.name for column in METRIC_COLUMNS],
    },
}
"""Columns that each role writes, by table: the other half of the wiring check."""


NUM_EVAL_PROMPTS_METRIC = "eval/num_prompts"
"""Metric that says how many held-out prompts a round of evaluation has; its step is the round's request number."""


def eval_uid(request: int, number: int) -> str:
    """Return the uid of a held-out prompt in the round of evaluation `request`; all sets are numbered through."""
    return f"eval{request}-{number}"


def reward_reader(index: int) -> str:
    """Return the consumer of `rollouts` that tells preprocess service `index` the rewards."""
    return f"curriculum-{index}"


def request_of(uid: str) -> int:
    """Return the round of evaluation that a prompt or rollout with that uid belongs to."""
    return int(uid.removeprefix("eval").split("-", 1)[0])


def eval_reward_metric(name: str, modality: str) -> str:
    """Return the metric for the mean reward of a modality in the evaluation set `name`."""
    return f"eval/{name}/reward/{modality}"


def split_by(rows: pa.Table, column: str) -> dict[str, pa.Table]:
    """Return the rows for each value of a column of strings, in alphabetical order; absent and null are ''."""
    if column not in rows.column_names:
        return {"": rows}
    values = pc.fill_null(rows[column], "")
    return {name: rows.filter(pc.equal(values, name)) for name in sorted(pc.unique(values).to_pylist())}


def mean_rewards(rows: pa.Table) -> dict[str, float]:
    """Return the mean of `reward` for each `modality` among rows of a rollouts table, in alphabetical order."""
    names = sorted(pc.unique(rows["modality"]).to_pylist())
    return {name: pc.mean(rows["reward"].filter(pc.equal(rows["modality"], name))).as_py() for name in names}
