"""Rollouts that were interrupted: kept as rows of `partial_rollouts`, and found again by whoever takes their prompts.

    take prompts -> `read` what was begun -> generate -> whole: put rollouts, `forget`, ack
                                                     \\-> interrupted: `give_back`: put rows, give the prompt back

In this order, whoever dies in between loses no prompt, and of tokens what it has sampled itself since its last put.
What is too old, or has been gone on with too often, is not kept: its prompt is answered anew, or dropped and counted.
"""

from __future__ import annotations

import uuid
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from modalities.packing import pack_list, unpack_present
from modalities.routing import LayerRange, routing_from_arrow, routing_to_arrow
from relax.partial_records import PARTIAL_COLUMNS, PARTIAL_TABLE
from relax.roles.service import Service
from relax.rollout.engine import Completion

TYPES = {column.name: column.type for column in PARTIAL_COLUMNS}


@dataclass(frozen=True, kw_only=True)
class Begun:
    """What was made of a prompt before: its completions so far, and the rows that hold them."""

    completions: tuple[Completion, ...]
    num_continuations: int
    row_uids: tuple[str, ...]

    @property
    def start_version(self) -> int:
        """Return the policy version of the oldest token."""
        return start_version(self.completions)


@dataclass(frozen=True, kw_only=True)
class Verdicts:
    """What becomes of interrupted prompts, by uid. All are given back but `dropped`."""

    kept: Mapping[str, int]
    """Policy version from which each was begun."""
    anew: Collection[str]
    """Nothing is kept of these."""
    dropped: Mapping[str, str]
    """Why nobody goes on with each."""


def start_version(completions: Iterable[Completion]) -> int:
    """Return the policy version of the oldest token; some completion must have one."""
    return min(int(each.token_policy_versions[0]) for each in completions if len(each.token_ids))


class PartialRollouts:
    """One rollout service's view of the table.

    Args:
        service: The rollout service; its configuration has `rollout.partial`.
        layer_groups: Layers of each column of routes.
        num_experts: Of a layer.
    """

    def __init__(self, service: Service, layer_groups: Sequence[LayerRange], num_experts: int) -> None:
        self._service = service
        self._config = service.config.rollout.partial
        self._max_age = self._config.max_age(service.config.max_staleness)
        self._layer_groups = layer_groups
        self._num_experts = num_experts
        self._counts: Counter[str] = Counter()

    def read(self, prompts: pa.Table, policy_version: int) -> dict[str, Begun]:
        """Return what can be gone on with under weights `policy_version`, by prompt; what is too old is let go."""
        uids = [
            uid
            for uid, attempt in zip(prompts["uid"].to_pylist(), prompts["attempt"].to_pylist(), strict=True)
            if attempt > 1
        ]
        if not uids:
            return {}
        found = _newest(self._completions(uids))
        too_old = [uid for uid, each in found.items() if policy_version - each.start_version > self._max_age]
        for uid in too_old:
            self._count_dropped(found[uid].completions)
        self.forget(found, too_old)
        found = {uid: each for uid, each in found.items() if uid not in too_old}
        unfinished = [c for each in found.values() for c in each.completions if not c.is_finished]
        self._counts["continued"] += len(unfinished)
        self._counts["tokens_saved"] += sum(
            len(completion.token_ids) for each in found.values() for completion in each.completions
        )
        return found

    def judge(
        self, groups: Mapping[str, Sequence[Completion]], begun: Mapping[str, Begun], policy_version: int
    ) -> Verdicts:
        """Decide what becomes of interrupted groups, by prompt; `policy_version` is the newest one."""
        kept: dict[str, int] = {}
        anew: list[str] = []
        dropped: dict[str, str] = {}
        for uid, group in groups.items():
            if not any(len(each.token_ids) for each in group):
                anew.append(uid)
                continue
            start = start_version(group)
            reason = self._objection(policy_version - start, _continuations(begun, uid) + 1)
            if not reason:
                kept[uid] = start
                continue
            self._count_dropped(group)
            if self._config.on_limit == "drop":
                dropped[uid] = reason
            else:
                anew.append(uid)
        return Verdicts(kept=kept, anew=anew, dropped=dropped)

    def keep(
        self, groups: Mapping[str, Sequence[Completion]], begun: Mapping[str, Begun], uids: Collection[str]
    ) -> None:
        """Put what there is of the groups of these prompts; what was put before may then be forgotten."""
        rows = [
            (uid, _continuations(begun, uid) + 1, each)
            for uid in uids
            for each in groups[uid]
            if len(each.token_ids)
        ]
        if rows:
            self._service.queue.put(PARTIAL_TABLE, self._rows(rows), writer="rollout")
            self._counts["interrupted"] += sum(not each.is_finished for _, _, each in rows)

    def forget(self, begun: Mapping[str, Begun], uids: Collection[str]) -> None:
        """Let go of the rows that were read of these prompts."""
        row_uids = [row_uid for uid in uids if uid in begun for row_uid in begun[uid].row_uids]
        if row_uids:
            self._service.queue.ack(PARTIAL_TABLE, "rollout", uids=row_uids)

    def count_surplus(self, completions: Sequence[Completion]) -> None:
        """Count over-sampled completions that nobody needs."""
        self._counts["surplus"] += len(completions)
        self._counts["surplus_tokens"] += sum(len(each.token_ids) for each in completions)

    def report(self) -> dict[str, float]:
        """Return the metrics `partial/<what>` since the last call, those that are not 0."""
        counts, self._counts = self._counts, Counter()
        return {f"partial/{name}": float(value) for name, value in counts.items() if value}

    def _objection(self, age: int, num_continuations: int) -> str:
        if age > self._max_age:
            return (
                f"rollout: must be at most {self._max_age} policy versions old to be gone on with, got {age}"
            )
        limit = self._config.max_continuations
        if num_continuations > limit:
            return f"rollout: must be finished after {limit} interruptions, got one more"
        return ""

    def _count_dropped(self, completions: Sequence[Completion]) -> None:
        self._counts["dropped"] += len(completions)
        self._counts["tokens_dropped"] += sum(len(each.token_ids) for each in completions)

    def _completions(self, uids: Sequence[str]) -> dict[str, list[tuple[str, int, Completion]]]:
        """Return (row, interruptions, completion) of every row that is there, by prompt."""
        where = {"column": "group_id", "op": "in", "value": list(uids)}
        rows = self._service.queue.read(PARTIAL_TABLE, filter=where)
        tokens, versions = (
            unpack_present(rows[name]) for name in ("completion_token_ids", "token_policy_versions")
        )
        logprobs, routes = unpack_present(rows["rollout_logprobs"]), routing_from_arrow(rows)
        names = ["uid", "group_id", "sample_index", "num_continuations", "finish_reason", "completion_text"]
        found: dict[str, list[tuple[str, int, Completion]]] = defaultdict(list)
        for number, facts in enumerate(rows.select(names).to_pylist()):
            completion = Completion(
                uid=facts["group_id"],
                sample_index=facts["sample_index"],
                token_ids=tokens[number],
                logprobs=logprobs[number],
                token_policy_versions=versions[number],
                routed_experts=routes[number],
                finish_reason=facts["finish_reason"],
                text=facts["completion_text"],
            )
            found[facts["group_id"]].append((facts["uid"], facts["num_continuations"], completion))
        return found

    def _rows(self, rows: Sequence[tuple[str, int, Completion]]) -> pa.Table:
        completions = [each for _, _, each in rows]
        uids = [uid for uid, _, _ in rows]
        columns = {
            "uid": [f"{uid}/{each.sample_index}~{uuid.uuid4().hex[:12]}" for uid, _, each in rows],
            "group_id": uids,
            "sample_index": [each.sample_index for each in completions],
            "num_continuations": [number for _, number, _ in rows],
            "completion_token_ids": pack_list([[each.token_ids] for each in completions], pa.int32()),
            "completion_text": [each.text for each in completions],
            "rollout_logprobs": pack_list([[each.logprobs] for each in completions], pa.float32()),
            "token_policy_versions": pack_list(
                [[each.token_policy_versions] for each in completions], pa.int32()
            ),
            "finish_reason": [each.finish_reason for each in completions],
            "rollout_worker": [self._service.name] * len(rows),
        }
        routes = routing_to_arrow(
            [each.routed_experts for each in completions], self._num_experts, self._layer_groups
        )
        typed = {
            name: values if isinstance(values, pa.Array) else pa.array(values, TYPES.get(name, pa.string()))
            for name, values in columns.items()
        }
        return pa.table(typed | routes)


def _newest(rows: Mapping[str, Sequence[tuple[str, int, Completion]]]) -> dict[str, Begun]:
    """Return the newest of each completion; older ones are there if a worker died before it let them go."""
    found = {}
    for uid, of_prompt in rows.items():
        newest = {
            each.sample_index: each for _, _, each in sorted(of_prompt, key=lambda row: (row[1], row[0]))
        }
        found[uid] = Begun(
            completions=tuple(newest[sample] for sample in sorted(newest)),
            num_continuations=max(number for _, number, _ in of_prompt),
            row_uids=tuple(row_uid for row_uid, _, _ in of_prompt),
        )
    return found


def _continuations(begun: Mapping[str, Begun], uid: str) -> int:
    return begun[uid].num_continuations if uid in begun else 0


def older_tokens(rows: pa.Table) -> list[np.ndarray]:
    """Return which tokens of each row are not of the newest policy in it, bool [num_completion_tokens]."""
    return [versions < versions.max(initial=0) for versions in unpack_present(rows["token_policy_versions"])]
