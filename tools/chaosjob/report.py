"""What a series has shown, as text: faults by kind and target, recoveries, the books of every run."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from statistics import median

from chaosjob.campaign import Met, RunRecord
from chaosjob.plan import Kind

LEDGER = ("prompts_issued", "prompts_answered", "prompts_waiting", "prompts_refused")
ROWS = ("rows_generated", "rows_trained", "rows_waiting", "rows_dropped")


def text(undisturbed: Sequence[RunRecord], records: Sequence[RunRecord], seconds: float) -> str:
    """Return the whole report."""
    met = [each for record in records for each in record.counted()]
    missed = sum(len(record.met) for record in records) - len(met)
    resumes = sum(record.num_resumes for record in records)
    parts = [
        f"{len(met)} faults in {len(records)} runs, {resumes} times resumed, {seconds:.0f} s in all; "
        f"{missed} more met nobody",
        by_target(met),
        times(met, "kind", lambda each: each.fault.kind.value),
        times(met, "target", lambda each: each.fault.target),
        books([*undisturbed, *records]),
    ]
    return "\n\n".join(part for part in parts if part)


def by_target(met: Sequence[Met]) -> str:
    """Return how often each kind met each target."""
    if not met:
        return ""
    targets = sorted({each.fault.target for each in met})
    rows = [
        [
            kind.value,
            *(
                str(sum(each.fault.kind == kind and each.fault.target == target for each in met) or "")
                for target in targets
            ),
            str(sum(each.fault.kind == kind for each in met)),
        ]
        for kind in Kind
        if any(each.fault.kind == kind for each in met)
    ]
    return table(["faults", *targets, "all"], rows)


def times(met: Sequence[Met], what: str, key: Callable[[Met], str]) -> str:
    """Return how long it took to get over the faults of each kind or target."""
    if not met:
        return ""
    rows = []
    for name in sorted({key(each) for each in met}):
        own = [each for each in met if key(each) == name]
        took = [each.recovery_s for each in own if each.recovery_s is not None]
        shown = [f"{median(took):.1f}", f"{max(took):.1f}"] if took else ["", ""]
        rows.append([name, str(len(own)), str(len(took)), *shown])
    return table([f"by {what}", "faults", "got over", "median s", "max s"], rows)


def books(records: Sequence[RunRecord]) -> str:
    """Return the ledger of every run."""
    rows = []
    for record in records:
        ledger = record.books.ledger
        prompts = " ".join(str(ledger.get(name, "?")) for name in LEDGER)
        counts = " ".join(str(ledger.get(name, "?")) for name in ROWS)
        verdict = "hold" if not record.problems else f"{len(record.problems)} problems"
        rows.append(
            [
                record.name,
                str(len(record.counted())),
                str(record.num_resumes),
                prompts,
                counts,
                f"{record.books.reward:.3f}",
                verdict,
            ]
        )
    prompts_title = "prompts issued = answered + waiting + refused"
    rows_title = "rows made = trained + waiting + dropped"
    return table(["run", "faults", "resumed", prompts_title, rows_title, "reward", "books"], rows)


def line(met: Met) -> str:
    """Return one fault and what became of it."""
    if met.injected is None:
        return f"{met.fault}: met nobody: {met.missed or 'the run was over'}"
    took = "never got over" if met.recovery_s is None else f"got over after {met.recovery_s:.1f} s"
    notes = "".join(f"; {note}" for note in met.notes)
    return f"{met.fault} ({met.injected.service or 'run'}): {took}{notes}"


def command(seed: int, words: Sequence[str]) -> str:
    """Return how a series is repeated: the words that it was started with, its seed among them."""
    seeded = [] if any(word.startswith("--seed") for word in words) else ["--seed", str(seed)]
    return shlex.join(["python", "tools/chaos.py", *words, *seeded])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows in columns as wide as they need."""
    widths = [max(len(line[at]) for line in (head, *rows)) for at in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
    )
