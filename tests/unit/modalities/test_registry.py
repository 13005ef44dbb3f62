"""Finding modalities: ours, those named in the configuration, those of installed packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from modalities.errors import ModalityError
from modalities.image import Image
from modalities.registry import load_class, load_modalities
from tests.kit.media import LIMITS, PROFILE

EXAMPLE = Path(__file__).parents[3] / "examples" / "depth_modality"


class Twin(Image):
    """Takes the columns of another modality under another name."""

    name = "twin"
    placeholder = "<image>"


class Nameless(Image):
    """Forgot its name."""

    name = ""
    placeholder = "twin"
    tower = "smell"  # type: ignore[assignment]


def test_registry_has_ours() -> None:
    """Image, audio and video, in that order, without any configuration."""
    assert list(load_modalities(PROFILE, LIMITS))[:3] == ["image", "audio", "video"]


def test_registry_loads_the_example_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line of configuration adds an encoder."""
    monkeypatch.syspath_prepend(EXAMPLE)
    modalities = load_modalities(PROFILE, LIMITS, ["depth_modality.depth:Depth"])
    assert modalities["depth"].placeholder == "<depth>"
    assert [column.name for column in modalities["depth"].columns()] == ["depth_patches", "depth_grid_thw"]


def test_registry_loads_installed_packages_by_entry_point(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The group relax.modalities; named in the configuration too, the class is loaded once."""
    metadata = tmp_path / "depth_modality-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: depth-modality\nVersion: 0.1.0\n")
    entry = (EXAMPLE / "setup.cfg").read_text().partition("relax.modalities =")[2].strip()
    (metadata / "entry_points.txt").write_text(f"[relax.modalities]\n{entry}\n")
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.syspath_prepend(tmp_path)
    assert "depth" in load_modalities(PROFILE, LIMITS)
    assert "depth" in load_modalities(PROFILE, LIMITS, ["depth_modality.depth:Depth"])


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("Depth", "Depth: must be package.module:Class, got no such form; for example my_pkg.depth:Depth"),
        (
            "no_such_pkg.depth:Depth",
            "no_such_pkg.depth:Depth: must be importable, got ModuleNotFoundError: No module named 'no_such_pkg'",
        ),
        (
            "modalities.image:Depth",
            "modalities.image:Depth: must be importable, got AttributeError: "
            "module 'modalities.image' has no attribute 'Depth'",
        ),
        (
            "modalities.base:MediaLimits",
            "modalities.base:MediaLimits: must be a subclass of modalities.base.Modality, "
            "got <class 'modalities.base.MediaLimits'>",
        ),
        (
            f"{__name__}:Nameless",
            f"{__name__}:Nameless: name must be an identifier other than 'text', got ''",
        ),
    ],
)
def test_registry_says_what_is_wrong_with_a_class(path: str, message: str) -> None:
    """The path, the rule and the value."""
    with pytest.raises(ModalityError) as caught:
        load_class(path)
    assert str(caught.value) == message


def test_registry_refuses_a_placeholder_that_is_taken() -> None:
    """Two modalities cannot read the same placeholder."""
    with pytest.raises(ModalityError) as caught:
        load_modalities(PROFILE, LIMITS, [f"{__name__}:Twin"])
    assert str(caught.value) == (
        f"{__name__}:Twin: placeholder must be its own, got '<image>', which modalities.image:Image has"
    )
