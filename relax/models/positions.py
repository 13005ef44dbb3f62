"""Places of a prompt's tokens on the rotary axes time, height and width. Pure numpy.

    text, sound     all three axes go on by one
    picture, film   start where the text before ended and spread over their grid, films over time too
    text after      goes on after the medium, by its largest place or its longer side, as the family has it

Source: `get_rope_index` of each family in transformers 5.12, to which the tests compare.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from relax.models.inputs import Encoded, PromptInputs
from relax.models.spec import ThinkerSpec


def rotary_positions(prompt: PromptInputs, spec: ThinkerSpec) -> tuple[np.ndarray, float]:
    """Return places [3, num_tokens] in float64, and that of the token after the prompt, the same on all axes.

    Args:
        prompt: As `check_prompt` accepts it.
        spec: Of the model; decides how films count time.
    """
    ids = np.asarray(prompt.token_ids)
    waiting = {
        token_id: _grids(prompt.media.get(tower, ()), spec)
        for tower, token_id in (("image", spec.image_token_id), ("video", spec.video_token_id))
    }
    is_visual = np.isin(ids, list(waiting))
    edges = np.flatnonzero(np.diff(is_visual, prepend=False, append=False))
    positions = np.empty((3, len(ids)))
    following, at = 0.0, 0
    for begin, end in edges.reshape(-1, 2).tolist():
        positions[:, at:begin] = following + np.arange(begin - at)
        following += begin - at
        places, side = next(waiting[int(ids[begin])])
        positions[:, begin:end] = following + places
        following += side if spec.family.text_follows_side else places.max() + 1
        at = end
    positions[:, at:] = following + np.arange(len(ids) - at)
    return positions, following + len(ids) - at


def _grids(media: Sequence[Encoded], spec: ThinkerSpec) -> Iterator[tuple[np.ndarray, int]]:
    """Yield for each run of placeholders the places [3, num_tokens] from its beginning, and its longer side."""
    for item in media:
        frames, height, width = (int(each) for each in item["grid_thw"])
        height, width = height // spec.merge_size, width // spec.merge_size
        is_film = "second_per_grid" in item
        if is_film and spec.family.film_in_frames:
            runs, times = frames, np.zeros(1)
        elif is_film and spec.family.film_times is not None:
            seconds = float(item["second_per_grid"])
            runs, times = 1, spec.family.film_times(frames, seconds, spec.position_id_per_seconds)
        else:
            runs, times = 1, np.arange(float(frames))
        grid = np.meshgrid(times, np.arange(height), np.arange(width), indexing="ij")
        places = np.stack([axis.ravel() for axis in grid])
        yield from [(places, max(height, width))] * runs
