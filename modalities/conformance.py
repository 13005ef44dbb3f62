"""Checks that a modality keeps its promises: for ours in the tests, for yours before a run depends on it.

    python -m modalities.conformance my_pkg.depth:Depth sample1.png sample2.png
    python -m modalities.conformance my_pkg.depth:Depth sample1.png --model-dir path/to/model

In a test:

    check_modality(Depth, [path.read_bytes() for path in samples])
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from modalities.base import Encoded, EncodingProfile, MediaLimits, Modality, num_encoded_tokens
from modalities.errors import MediaError, ModalityError
from modalities.registry import class_problems, load_class

BROKEN_FILES = {
    "an empty file": b"",
    "text": b"This is no media file.\n" * 8,
    "zeros": bytes(4096),
    "random bytes": np.random.default_rng(0).integers(0, 256, 4096, np.uint8).tobytes(),
}


def check_modality(
    modality_class: type[Modality],
    samples: Sequence[bytes],
    *,
    profile: EncodingProfile | None = None,
    limits: MediaLimits | None = None,
) -> None:
    """Run every check.

    Args:
        modality_class: The class to check.
        samples: Contents of one or more good files, different ones if possible.
        profile: What the model's processor does; absent: the numbers of Qwen3-Omni.
        limits: What a file may cost; absent: the defaults.

    Raises:
        ModalityError: the class breaks promises; the message lists all that were found.
    """
    problems = find_problems(modality_class, samples, profile=profile, limits=limits)
    if problems:
        raise ModalityError("".join(f"\n  - {problem}" for problem in problems), modality_class.__qualname__)


def find_problems(
    modality_class: type[Modality],
    samples: Sequence[bytes],
    *,
    profile: EncodingProfile | None = None,
    limits: MediaLimits | None = None,
) -> list[str]:
    """Return what `check_modality` would complain about; empty when all is well."""
    if problems := class_problems(modality_class):
        return problems
    if not samples:
        return ["samples must hold at least one file, got none"]
    modality = modality_class(profile or EncodingProfile(), limits or MediaLimits())
    problems = list(_column_problems(modality))
    try:
        encoded = [modality.encode(modality.decode(sample)) for sample in samples]
        again = [modality.encode(modality.decode(sample)) for sample in samples]
    except Exception as error:  # a report of whatever the class under test does
        return [*problems, f"decode and encode must accept the samples, got {type(error).__name__}: {error}"]
    for number, (first, second) in enumerate(zip(encoded, again, strict=True)):
        problems += [f"sample {number}: {problem}" for problem in _encoded_problems(modality, first)]
        if not _same(first, second):
            problems.append(f"sample {number}: encode must give the same arrays each time, got others")
    problems += _identity_problems(modality, samples)
    if problems:
        return problems
    return [*_arrow_problems(modality, encoded), *_broken_file_problems(modality, samples)]


def _column_problems(modality: Modality) -> Iterator[str]:
    columns = modality.columns()
    names = [column.name for column in columns]
    if not columns or len(set(names)) < len(names):
        yield f"columns must be one or more, each with a name of its own, got {names}"
    for column in columns:
        if not column.name.startswith(f"{modality.name}_"):
            yield f"column {column.name!r} must start with '{modality.name}_'"
        if not column.nullable:
            yield f"column {column.name!r} must be nullable, since a row may lack the modality"
        if not column.meaning:
            yield f"column {column.name!r} must have a meaning, got none"


def _encoded_problems(modality: Modality, encoded: Encoded) -> Iterator[str]:
    expected = _tower_arrays(modality)
    if not isinstance(encoded, dict) or set(encoded) != set(expected):
        yield f"encode must return the keys {sorted(expected)} of the {modality.tower} tower, got {sorted(encoded)}"
        return
    for key, (dtype, shape) in expected.items():
        array = encoded[key]
        fits = isinstance(array, np.ndarray) and len(array.shape) == len(shape)
        fits = fits and all(size in (None, real) for size, real in zip(shape, array.shape, strict=True))
        if not fits or array.dtype != dtype:
            got = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else repr(type(array))
            yield f"{key} must be {dtype} {['n' if size is None else size for size in shape]}, got {got}"
            return
        if not np.isfinite(array).all():
            yield f"{key} must be finite, got NaN or infinity"
    if modality.tower != "audio":
        grid, merge = encoded["grid_thw"], modality.profile.merge_size
        if int(grid.prod()) != len(encoded["patches"]) or (grid < 1).any() or (grid[1:] % merge).any():
            yield (
                f"grid_thw must multiply to the number of patches {len(encoded['patches'])}, height and width "
                f"multiples of {merge}, got {grid.tolist()}"
            )
            return
    wanted = num_encoded_tokens(modality.tower, encoded, modality.profile)
    if (num_tokens := modality.num_tokens(encoded)) != wanted or num_tokens < 1:
        yield f"num_tokens must be the tower's {wanted}, got {num_tokens}"


def _identity_problems(modality: Modality, samples: Sequence[bytes]) -> Iterator[str]:
    """Compare with an encoder that has other numbers: what makes other arrays must not share stored media."""
    same = type(modality)(modality.profile, modality.limits)
    if same.identity() != modality.identity():
        yield f"identity must be the same for the same profile, got {modality.identity()!r} and {same.identity()!r}"
    profile = replace(
        modality.profile,
        min_pixels=modality.profile.min_pixels * 4,
        max_pixels=modality.profile.max_pixels * 4,
        video_min_pixels=modality.profile.video_min_pixels * 4,
        video_max_pixels=modality.profile.video_max_pixels * 4,
        hop_length_samples=modality.profile.hop_length_samples * 2,
    )
    other = type(modality)(profile, modality.limits)
    try:
        makes_others = any(
            not _same(*(each.encode(each.decode(sample)) for each in (modality, other))) for sample in samples
        )
    except MediaError:  # it may refuse with other numbers what it takes with these
        makes_others = True
    if makes_others and other.identity() == modality.identity():
        yield "identity must tell apart encoders that make different arrays, got the same for two profiles"


def _tower_arrays(modality: Modality) -> dict[str, tuple[type, tuple[int | None, ...]]]:
    profile = modality.profile
    if modality.tower == "audio":
        return {"features": (np.float32, (profile.num_mel_bins, None))}
    arrays: dict[str, tuple[type, tuple[int | None, ...]]] = {
        "patches": (np.uint8, (None, profile.patch_values)),
        "grid_thw": (np.int32, (3,)),
    }
    return arrays | ({"second_per_grid": (np.float32, ())} if modality.tower == "video" else {})


def _arrow_problems(modality: Modality, encoded: Sequence[Encoded]) -> Iterator[str]:
    rows = [[], [encoded[0]], [], list(encoded), [*encoded, encoded[0]], []]
    schema = pa.schema([column.to_field() for column in modality.columns()])
    try:
        columns = modality.to_arrow(rows)
        if sorted(columns) != sorted(schema.names):
            yield f"to_arrow must return the columns {schema.names}, got {sorted(columns)}"
            return
        for field in schema:
            array = columns[field.name]
            if array.type != field.type:
                yield f"to_arrow must return {field.name} as {field.type}, got {array.type}"
            if [value.is_valid for value in array] != [bool(row) for row in rows]:
                yield f"to_arrow must make {field.name} null where a row is empty, and only there"
        table = pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)
        table.validate(full=True)
        views: dict[str, tuple[Callable[[], pa.Table], list]] = {
            "the same table": (lambda: table, rows),
            "a slice": (lambda: table.slice(2, 3), rows[2:5]),
            "a table in chunks": (lambda: pa.concat_tables([table.slice(0, 2), table.slice(2)]), rows),
            "a table that crossed a stream": (lambda: _streamed(table), rows),
            "a table with no row": (lambda: table.slice(0, 0), []),
            "a table without the modality": (lambda: table.slice(0, 1), rows[:1]),
        }
        for name, (make, expected) in views.items():
            back = modality.from_arrow(make())
            same = len(back) == len(expected) and all(map(_same_row, back, expected))
            if not same:
                yield f"from_arrow must return what to_arrow was given, got something else for {name}"
    except Exception as error:  # a report of whatever the class under test does
        yield f"to_arrow and from_arrow must not fail, got {type(error).__name__}: {error}"


def _broken_file_problems(modality: Modality, samples: Sequence[bytes]) -> Iterator[str]:
    broken = dict(BROKEN_FILES)
    broken["the first 16 bytes of a sample"] = samples[0][:16]
    broken["a file larger than allowed"] = samples[0]
    for name, data in broken.items():
        checked = modality
        if name == "a file larger than allowed":
            checked = type(modality)(
                modality.profile, MediaLimits(max_pixels=1, max_frames=1, max_seconds=1e-3, max_bytes=1)
            )
        try:
            checked.encode(checked.decode(data))
        except MediaError:
            continue
        except Exception as error:  # a report of whatever the class under test does
            yield f"decode must raise a MediaError for {name}, got {type(error).__name__}: {error}"
        else:
            yield f"decode must raise a MediaError for {name}, got no error"


def _streamed(table: pa.Table) -> pa.Table:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return pa.ipc.open_stream(sink.getvalue()).read_all()


def _same_row(first: Sequence[Encoded], second: Sequence[Encoded]) -> bool:
    return len(first) == len(second) and all(map(_same, first, second))


def _same(first: Encoded, second: Encoded) -> bool:
    return set(first) == set(second) and all(
        first[key].dtype == second[key].dtype and np.array_equal(first[key], second[key]) for key in first
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a class from the command line; 0 when it keeps its promises."""
    parser = argparse.ArgumentParser(prog="python -m modalities.conformance", description="Check a modality.")
    parser.add_argument("modality", help="package.module:Class")
    parser.add_argument("samples", nargs="+", type=Path, help="good media files")
    parser.add_argument("--model-dir", type=Path, help="model directory whose processor numbers to use")
    options = parser.parse_args(arguments)
    try:
        profile = EncodingProfile.from_pretrained(options.model_dir) if options.model_dir else None
        modality_class = load_class(options.modality)
        problems = find_problems(
            modality_class, [path.read_bytes() for path in options.samples], profile=profile
        )
    except (MediaError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    for problem in problems:
        print(f"{options.modality}: {problem}")
    if not problems:
        print(f"{options.modality}: keeps its promises ({len(options.samples)} samples)")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
