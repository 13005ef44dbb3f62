"""Runs the main job and breaks it in every way, by a seed; then checks that nothing was lost.

    python tools/chaos.py --seed 7 --minutes 10          # ten minutes of faults, the books of every run checked
    python tools/chaos.py --seed 7 --faults 40           # as many faults as that
    python tools/chaos.py --seed 7 --kinds kill,cut --targets queue,actor
    python tools/chaos.py --seed 7 num_steps=60 rollout.num_workers=3 max_staleness=0

Roles are killed (in the middle of a checkpoint, too), stopped for a while or for good, slowed and cut off; so is the
program; all processes at once, and then `resume=`; the disk and /dev/shm are full; the queue's journal is torn or
damaged. A run that ends before the time is over is followed by another with the next seed. An undisturbed run comes
first, for the reward. Exit code 0 only if every run kept its books; else the runs that did not stay under `--home`.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from chaosjob import plan, report, room  # noqa: E402  (after the path)
from chaosjob.books import check_reward  # noqa: E402
from chaosjob.campaign import Campaign, RunRecord  # noqa: E402
from chaosjob.job import Job, environment  # noqa: E402

WORDS = (
    "progress=plain",
    "num_steps=240",
    "prompts_per_step=8",
    "group_size=8",
    "max_staleness=1",
    "rollout.max_new_tokens=3",
    "rollout.num_workers=2",
    "algorithm.kl_coef=0.06",
    "actor.epsilon=1.0e-6",
    "checkpoint.interval_steps=8",
    "checkpoint.keep=3",
    "evaluation.interval_steps=60",
    "evaluation.max_prompts=12",
    "evaluation.deadline_s=60",
    "queue.lease_s=30",
    "restarts.max=100000",
    "restarts.first_delay_s=0.2",
    "restarts.max_delay_s=2",
    "restarts.silence_s=15",
)
"""Of the configuration: small steps, frequent checkpoints, a restart whatever has been before."""
PREPARE_DEADLINE_S = 900.0


def main(argv: list[str] | None = None) -> int:
    """Run the series; return the exit code."""
    arguments = _parse(argv)
    # So that a job goes away with the tool as it does after Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    place = room.enter(arguments.home)
    _say(f"runs lie in {place.disk}" + ("" if place.is_private else ": no namespace, nothing is filled"))
    words = [*WORDS, *_prepare(arguments), *arguments.words]
    began_at = time.monotonic()
    undisturbed = [_undisturbed(place, words, arguments, number) for number in range(arguments.controls)]
    problems = [f"undisturbed run {each.name}: {text}" for each in undisturbed for text in each.problems]
    rewards = [each.books.reward for each in undisturbed]
    series_began_at = time.monotonic()
    records: list[RunRecord] = []
    while not problems and _goes_on(arguments, records, series_began_at):
        record = _disturbed(place, words, arguments, records, series_began_at)
        if not record.problems:
            record.problems += check_reward(record.books.reward, rewards, arguments.margin)
        records.append(record)
        problems += [f"run {record.name}: {text}" for text in record.problems]
    print(report.text(undisturbed, records, time.monotonic() - began_at))
    for problem in problems:
        print(f"FAILED: {problem}")
    if problems:
        print(
            f"again: {report.command(arguments.seed, sys.argv[1:])}; what was left: {arguments.home}/failed"
        )
    return 1 if problems else 0


def _goes_on(arguments: argparse.Namespace, records: list[RunRecord], began_at: float) -> bool:
    """Whether another fault is wanted, after those of the runs so far and those of the present one."""
    if arguments.faults:
        return sum(len(each.counted()) for each in records) < arguments.faults
    return time.monotonic() - began_at < 60 * arguments.minutes


def _disturbed(
    place: room.Room,
    words: list[str],
    arguments: argparse.Namespace,
    before: list[RunRecord],
    began_at: float,
) -> RunRecord:
    seed = plan.run_seed(arguments.seed, len(before))
    record = RunRecord(name=f"chaos-{arguments.seed}-{len(before)}", seed=seed)
    faults = plan.faults(seed, plan.cards_of(arguments.kinds, arguments.targets))
    _carry_out(
        record,
        place,
        words,
        arguments,
        (faults, lambda: _goes_on(arguments, [*before, record], began_at)),
    )
    return record


def _undisturbed(place: room.Room, words: list[str], arguments: argparse.Namespace, number: int) -> RunRecord:
    record = RunRecord(name=f"undisturbed-{number}", seed=arguments.seed)
    _carry_out(record, place, words, arguments, (plan.faults(0), lambda: False))
    return record


def _carry_out(
    record: RunRecord,
    place: room.Room,
    words: list[str],
    arguments: argparse.Namespace,
    faults: tuple[Iterator[plan.Fault], Callable[[], bool]],
) -> None:
    run_dir = place.disk / "runs" / record.name
    shutil.rmtree(run_dir, ignore_errors=True)
    job = Job(arguments.home, run_dir, words)
    _say(f"run {record.name}, seed {record.seed}")
    Campaign(job, *faults, room=place, deadline_s=arguments.deadline_s, say=_say).run(record)
    outcome = "; ".join(record.problems) or f"reward {record.books.reward:.3f}, books hold"
    _say(f"run {record.name} ended after {record.seconds:.0f} s: {outcome}")
    if record.problems or arguments.keep:
        target = arguments.home / ("failed" if record.problems else "kept") / record.name
        room.save(run_dir, target)
        (target / "program.out").write_bytes(job.output_path.read_bytes())
        (target / "faults.txt").write_text("\n".join(map(report.line, record.met)) + "\n")
    shutil.rmtree(run_dir, ignore_errors=True)


def _prepare(arguments: argparse.Namespace) -> list[str]:
    """Make the data set and the model unless the words name others; return the words that name them."""
    if any(word.startswith("data.manifest=") for word in arguments.words):
        return []
    data, model = arguments.home / "data" / "toy_omni", arguments.home / "data" / "tiny_omni"
    for words in (
        ["toy_omni.py", "--out", str(data)],
        ["tiny_omni.py", "--out", str(model), "--source", str(data / "train.jsonl")],
    ):
        subprocess.run(
            [sys.executable, str(ROOT / "pipelines" / words[0]), *words[1:]],
            check=True,
            env=environment(),
            timeout=PREPARE_DEADLINE_S,
        )
    return [
        f"data.manifest={data / 'train.jsonl'}",
        f"data.eval.toy={data / 'eval.jsonl'}",
        f"model.path={model}",
    ]


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="key=value", help="of the job's configuration")
    parser.add_argument("--seed", type=int, default=0, help="decides which faults come, and when")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long faults come")
    parser.add_argument("--faults", type=int, default=0, help="how many faults come, instead of --minutes")
    parser.add_argument("--kinds", type=_names, default=[], help="which only, such as kill,cut")
    parser.add_argument("--targets", type=_names, default=[], help="which only, such as queue,everything")
    parser.add_argument(
        "--controls", type=int, default=1, help="undisturbed runs before; 0: no band of rewards"
    )
    parser.add_argument("--margin", type=float, default=0.15, help="how far a reward may be from theirs")
    parser.add_argument(
        "--deadline-s", type=float, default=240.0, help="longest time to recover from a fault"
    )
    parser.add_argument("--home", type=Path, default=Path("runs/chaos"), help="where all of it lies")
    parser.add_argument("--keep", action="store_true", help="keep the directories of all runs")
    arguments = parser.parse_args(argv)
    arguments.home = arguments.home.resolve()
    try:
        plan.cards_of(arguments.kinds, arguments.targets)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


if __name__ == "__main__":
    raise SystemExit(main())
