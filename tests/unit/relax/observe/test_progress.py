"""Progress: the panel and the plain line, as text."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from relax.observe.progress import (
    ModalityReward,
    ProgressDisplay,
    ProgressState,
    format_duration,
    plain_line,
    render,
)

STATE = ProgressState(
    run_name="omni_grpo",
    step=50,
    num_steps=200,
    policy_version=50,
    elapsed_s=30.0,
    samples_per_s=320.5,
    rewards={
        "image": ModalityReward(train=0.52, held_out=0.5, num_held_out=64),
        "audio": ModalityReward(train=0.251),
    },
    staleness_mean=0.75,
    staleness_max=2,
    max_staleness=4,
    rows_per_version=192,
    rows_waiting={"prompts": 12, "rollouts": 96},
    roles={"rollout-0": "run", "actor": "[bold]drain"},
    num_row_errors=2,
    note="draining: finishing what is in flight",
)


def _text(state: ProgressState, width: int = 92) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False, legacy_windows=False)
    console.print(render(state))
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]


def test_render_shows_the_whole_state() -> None:
    """Text snapshot of a full panel."""
    assert _text(STATE) == SNAPSHOT.strip("\n")


def test_render_shows_an_empty_state() -> None:
    """Before the first step there are dashes, no errors."""
    text = _text(ProgressState(num_steps=10))
    assert "0/10 steps" in text
    assert "– left" in text
    assert "none yet" in text
    assert "row errors" not in text


def test_plain_line_says_the_same_on_one_line() -> None:
    """Text snapshot of the plain form."""
    assert plain_line(STATE) == (
        "step 50/200 | reward (train/held-out) audio=0.251/– image=0.520/0.500 | "
        "staleness 0.8 mean 2 max, bound 4 versions = 768 rollouts | waiting prompts=12 rollouts=96 | "
        "320.5 samples/s | left 1:30 | row errors 2 | draining: finishing what is in flight"
    )


def test_remaining_time_follows_the_recent_pace() -> None:
    """The recent pace wins over the mean so far; nothing is left at the end."""
    assert STATE.remaining_s == 90.0
    assert replace(STATE, step_s=0.1).remaining_s == 15.0
    assert replace(STATE, step=200).remaining_s == 0.0
    assert ProgressState(num_steps=5).remaining_s is None
    assert [format_duration(seconds) for seconds in (None, float("nan"), 59.6, 3725)] == [
        "–",
        "–",
        "1:00",
        "1:02:05",
    ]


def test_display_writes_plain_lines_every_few_steps() -> None:
    """Off a terminal: the first state, every tenth step, a changed note and the last step."""
    lines: list[str] = []
    quiet = replace(STATE, note="")
    with ProgressDisplay(
        "auto", console=Console(file=io.StringIO()), every_steps=10, write_line=lines.append
    ) as display:
        assert not display.is_live
        for step in range(26):
            display.update(replace(quiet, step=step, num_steps=25))
        display.update(replace(quiet, step=25, num_steps=25))
        display.update(replace(quiet, step=25, num_steps=25, note="saving"))
    assert [line.split(" | ")[0] for line in lines] == [f"step {step}/25" for step in (0, 10, 20, 25, 25)]
    assert lines[-1].endswith("saving")


def test_display_draws_live_on_a_terminal() -> None:
    """On a terminal the last state stays on the screen."""
    console = Console(file=io.StringIO(), force_terminal=True, width=92)
    with ProgressDisplay("auto", console=console) as display:
        assert display.is_live
        display.update(STATE)
    assert "50/200 steps" in console.file.getvalue()  # type: ignore[attr-defined]


SNAPSHOT = """
╭─ omni_grpo  policy version 50 ───────────────────────────────────────────────────────────╮
│ ━━━━━━━━╸                            50/200 steps  320.5 samples/s  0:30 gone, 1:30 left │
│                                                                                          │
│ reward  train  held-out  prompts                                                         │
│ audio   0.251         –        –                                                         │
│ image   0.520     0.500       64                                                         │
│                                                                                          │
│ staleness   mean 0.75, max 2; bound 4 versions = 768 rollouts                            │
│ waiting     prompts 12  rollouts 96                                                      │
│ roles       rollout-0 run  actor [bold]drain                                             │
│ row errors  2                                                                            │
│ draining: finishing what is in flight                                                    │
╰──────────────────────────────────────────────────────────────────────────────────────────╯
"""
