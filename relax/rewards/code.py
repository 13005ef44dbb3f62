"""Reward `code`: the completion is a Python program, and is run against tests in a sandbox."""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass
from typing import Literal

import msgspec

from relax.errors import ConfigError
from relax.rewards.base import BoundedReward, RewardFailedError, RewardInput
from relax.rewards.sandbox import Isolation, Limits, Ran, run_program

MAX_CASES = 100


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run of the program: what it reads and what it has to write."""

    stdin: str = ""
    stdout: str = ""


@dataclass(frozen=True, kw_only=True)
class Code(BoundedReward):
    """Return 1 when the program passes all its tests, else 0; with `partial` the share of cases that it passes.

    The program is the last fenced block of the completion, or all of it without one. What breaks a limit does not
    pass; time that is over counts as cases not passed.
    """

    place = "process"
    deterministic = True
    reward_at_limit = 0.0

    tests: Literal["cases", "asserts"] = "cases"
    """What the reference answer is: `cases`: JSON, `[{"stdin": "1 2", "stdout": "3"}, …]`; `asserts`: Python that
    follows the program and shares its process, which a program made to do so can deceive."""
    partial: bool = False
    """Whether some cases are worth something."""
    isolation: Isolation = "namespaces"
    """`namespaces`: no network, no files of the host's; `limits`: resource limits alone, where the kernel refuses the
    former. With `limits` the program can use the network and every file that its user can."""
    wall_s: float = 5.0
    """Longest run in seconds."""
    max_memory_bytes: int = 512 << 20
    """Address space of each process."""
    max_files_bytes: int = 16 << 20
    """Files that it may write."""
    max_processes: int = 8
    """Processes and threads that it may have."""

    def __post_init__(self) -> None:
        for key, value, minimum in (
            ("wall_s", self.wall_s, 0.1),
            ("max_memory_bytes", self.max_memory_bytes, 64 << 20),
            ("max_files_bytes", self.max_files_bytes, 1 << 16),
            ("max_processes", self.max_processes, 1),
        ):
            if value < minimum:
                raise ConfigError(f"{key}: must be at least {minimum}, got {value}")

    def check(self) -> None:
        """Run a program that needs nothing."""
        try:
            ran = run_program("print(6 * 7)", "", Limits(wall_s=30.0), self.isolation)
        except RewardFailedError as error:
            raise ConfigError(f"isolation: {error}; see docs/rewards.md") from error
        if ran.output != b"42\n":
            shown = ran.errors.decode(errors="replace")[-200:]
            raise ConfigError(f"isolation: the sandbox must run Python, got code {ran.code}: {shown}")

    def bounded(self, sample: RewardInput, time_limit_s: float) -> float:
        """Run the program."""
        end_s = time.monotonic() + time_limit_s
        program = program_in(sample.completion_text)
        if self.tests == "asserts":
            return float(self._holds(program, sample.reference_answer, end_s))
        cases = self._cases(sample.reference_answer)
        if not self.partial:
            return float(all(self._passes(program, case, end_s) for case in cases))
        return sum(self._passes(program, case, end_s) for case in cases) / len(cases)

    def _cases(self, reference: str) -> list[Case]:
        try:
            cases = msgspec.json.decode(reference, type=list[Case])
        except msgspec.DecodeError as error:
            raise RewardFailedError(f"reference_answer: must be a JSON list of cases, got {error}") from error
        if not 1 <= len(cases) <= MAX_CASES:
            raise RewardFailedError(f"reference_answer: must hold 1 to {MAX_CASES} cases, got {len(cases)}")
        return cases

    def _passes(self, program: str, case: Case, end_s: float) -> bool:
        ran = self._run(program, case.stdin, end_s)
        written = ran.output.decode(errors="replace")
        return ran.ending == "exit" and ran.code == 0 and _lines(written) == _lines(case.stdout)

    def _holds(self, program: str, tests: str, end_s: float) -> bool:
        # A program that leaves early with code 0 does not write the last line.
        seal = secrets.token_hex(16)
        ran = self._run(f"{program}\n\n{tests}\n\nprint('\\n{seal}')\n", "", end_s)
        return ran.ending == "exit" and ran.code == 0 and ran.output.endswith(f"\n{seal}\n".encode())

    def _run(self, program: str, stdin: str, end_s: float) -> Ran:
        wall_s = min(self.wall_s, end_s - time.monotonic())
        if wall_s <= 0:
            return Ran(ending="time", code=0, output=b"", errors=b"")
        limits = Limits(
            wall_s=wall_s,
            max_memory_bytes=self.max_memory_bytes,
            max_files_bytes=self.max_files_bytes,
            max_processes=self.max_processes,
        )
        return run_program(program, stdin, limits, self.isolation)


def program_in(text: str) -> str:
    """Return the last fenced block of a text, all of it when there is none."""
    blocks = re.findall(r"^```[^\n`]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return blocks[-1] if blocks else text


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
