"""The progress of a run on a terminal, or as plain lines where there is none. It gathers nothing: it shows a state.

`render` and `plain_line` are pure; `ProgressDisplay` owns the terminal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, kw_only=True)
class ModalityReward:
    """Mean rewards of one modality; None where nothing was measured yet."""

    train: float | None = None
    """Moving mean over training rollouts."""
    held_out: float | None = None
    """Mean of the last evaluation."""
    num_held_out: int = 0
    """Prompts in that evaluation."""


@dataclass(frozen=True, kw_only=True)
class ProgressState:
    """All that the display shows, at one moment."""

    run_name: str = ""
    step: int = 0
    """Optimizer steps done."""
    num_steps: int = 0
    """Optimizer steps of the whole run."""
    policy_version: int = 0
    elapsed_s: float = 0.0
    """Seconds since the start of the run."""
    step_s: float | None = None
    """Recent seconds for a step; absent: the mean so far."""
    samples_per_s: float | None = None
    """Rollouts trained on each second, recently."""
    rewards: Mapping[str, ModalityReward] = field(default_factory=dict)
    """By modality."""
    staleness_mean: float | None = None
    """Policy versions, over the last training batch."""
    staleness_max: int | None = None
    """Policy versions, over the last training batch."""
    max_staleness: int = 0
    """The bound K in policy versions."""
    rows_per_version: int = 1
    """Rollouts that one policy version consumes."""
    rows_waiting: Mapping[str, int] = field(default_factory=dict)
    """Rows not yet taken, by table."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """State of each role, by role."""
    num_row_errors: int = 0
    """Rows refused so far."""
    note: str = ""
    """One line for the operator, such as what a Ctrl-C has begun."""

    @property
    def remaining_s(self) -> float | None:
        """Seconds to the last step at the recent pace; None before the first step."""
        pace_s = self.step_s
        if pace_s is None and self.step:
            pace_s = self.elapsed_s / self.step
        return None if pace_s is None else max(0, self.num_steps - self.step) * pace_s


def format_duration(seconds: float | None) -> str:
    """Return `1:02:03` or `2:03`; a dash for None or what is no number."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def plain_line(state: ProgressState) -> str:
    """Return the state as one line of plain text."""
    rewards = " ".join(
        f"{name}={_number(reward.train)}/{_number(reward.held_out)}"
        for name, reward in sorted(state.rewards.items())
    )
    waiting = " ".join(f"{table}={rows}" for table, rows in state.rows_waiting.items())
    parts = [
        f"step {state.step}/{state.num_steps}",
        f"reward (train/held-out) {rewards or '–'}",
        f"staleness {_number(state.staleness_mean, 1)} mean {_whole(state.staleness_max)} max, {_bound(state)}",
        f"waiting {waiting or '–'}",
        f"{_number(state.samples_per_s, 1)} samples/s",
        f"left {format_duration(state.remaining_s)}",
    ]
    if state.num_row_errors:
        parts.append(f"row errors {state.num_row_errors}")
    if state.note:
        parts.append(state.note)
    return " | ".join(parts)


def render(state: ProgressState) -> RenderableType:
    """Return the display of a state for rich to draw."""
    body: list[RenderableType] = [_headline(state), Text(), _rewards(state), Text(), _flow(state)]
    if state.note:
        body.append(Text(state.note, style="bold yellow"))
    title = Text.assemble((state.run_name or "run", "bold"), f"  policy version {state.policy_version}")
    return Panel(Group(*body), title=title, title_align="left", box=box.ROUNDED, padding=(0, 1))


def _headline(state: ProgressState) -> RenderableType:
    line = Table.grid(padding=(0, 2), expand=True)
    line.add_column(ratio=1)
    line.add_column(justify="right", no_wrap=True)
    line.add_column(justify="right", no_wrap=True)
    line.add_column(justify="right", no_wrap=True)
    line.add_row(
        ProgressBar(total=max(1, state.num_steps), completed=min(state.step, max(1, state.num_steps))),
        f"{state.step}/{state.num_steps} steps",
        f"{_number(state.samples_per_s, 1)} samples/s",
        f"{format_duration(state.elapsed_s)} gone, {format_duration(state.remaining_s)} left",
    )
    return line


def _rewards(state: ProgressState) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("reward", style="bold", no_wrap=True)
    for title in ("train", "held-out", "prompts"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, reward in sorted(state.rewards.items()):
        num_prompts = str(reward.num_held_out) if reward.held_out is not None else "–"
        table.add_row(Text(name), _number(reward.train), _number(reward.held_out), num_prompts)
    if not state.rewards:
        table.add_row("none yet", "–", "–", "–")
    return table


def _flow(state: ProgressState) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    mean, most = _number(state.staleness_mean, 2), _whole(state.staleness_max)
    table.add_row("staleness", Text(f"mean {mean}, max {most}; {_bound(state)}"))
    table.add_row(
        "waiting", Text("  ".join(f"{name} {rows}" for name, rows in state.rows_waiting.items()) or "–")
    )
    roles = Text()
    for name, status in state.roles.items():
        roles.append(f"{name} ").append(status, style=_STATUS_STYLES.get(status, "")).append("  ")
    table.add_row("roles", roles if state.roles else Text("–"))
    if state.num_row_errors:
        table.add_row("row errors", Text(str(state.num_row_errors), style="yellow"))
    return table


_STATUS_STYLES = {"run": "green", "pause": "yellow", "drain": "yellow", "stop": "dim", "lost": "bold red"}


def _bound(state: ProgressState) -> str:
    versions = "version" if state.max_staleness == 1 else "versions"
    return f"bound {state.max_staleness} {versions} = {state.max_staleness * state.rows_per_version} rollouts"


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def _whole(value: int | None) -> str:
    return "–" if value is None else str(value)


class ProgressDisplay:
    """Shows states as they come: a live panel on a terminal, otherwise one line for every `every_steps` steps.

    Args:
        mode: `live`, `plain`, or `auto` (live when the console is a terminal).
        write_line: receives the plain lines; by default they are printed.
    """

    def __init__(
        self,
        mode: Literal["auto", "live", "plain"] = "auto",
        *,
        console: Console | None = None,
        every_steps: int = 10,
        write_line: Callable[[str], None] | None = None,
    ) -> None:
        self._console = console or Console()
        self._every_steps = max(1, every_steps)
        self._write_line = write_line or self._print_line
        self._live: Live | None = None
        self._shown_step: int | None = None
        self._state: ProgressState | None = None
        if mode == "live" or (mode == "auto" and self._console.is_terminal):
            self._live = Live(console=self._console, refresh_per_second=4, transient=False)

    @property
    def is_live(self) -> bool:
        return self._live is not None

    def update(self, state: ProgressState) -> None:
        """Show `state`; in plain mode only when enough steps have passed, or the note has changed."""
        before, self._state = self._state, state
        if self._live is not None:
            self._live.update(render(state))
            return
        due = self._shown_step is None or state.step - self._shown_step >= self._every_steps
        ended = state.step >= state.num_steps and state.step != self._shown_step
        if due or ended or (before is not None and state.note != before.note):
            self._write_line(plain_line(state))
            self._shown_step = state.step

    def __enter__(self) -> ProgressDisplay:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def _print_line(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
