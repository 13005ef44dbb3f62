"""The rules of the house: sizes, layers, one home per heavy library, names."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("flight", "modalities", "relax", "pipelines")
SHIPPED = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
ALL_CODE = SHIPPED + sorted(
    path for folder in ("tests", "tools", "examples") for path in (ROOT / folder).rglob("*.py")
)

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_CLASS_LINES = 300
MAX_PARAMETERS = 6
EXCEPTIONS: dict[str, str] = {
    "relax/roles/__main__.py:main": "the options of a command line are its parameters",
}

HOMES = {
    "torch": (
        "relax/models/",
        "relax/train/",
        "relax/algorithms/",
        "relax/rollout/torch_engine",
        "relax/rollout/sglang_weights",
        "relax/data/dataset.py",
        "pipelines/tiny_omni.py",
    ),
    "megatron": ("relax/train/",),
    "transformers": ("relax/models/", "relax/train/", "relax/rollout/torch_engine"),
    "zmq": ("relax/control/",),
    "cryptography": ("flight/security/",),
    "omegaconf": ("relax/config.py",),
    "PIL": ("modalities/image.py", "pipelines/toy_omni.py", "pipelines/zoom_task.py"),
    "av": ("modalities/video.py", "pipelines/toy_omni.py"),
    "math_verify": ("relax/rewards/math_equivalence.py",),
    "sympy": (),
    "librosa": ("modalities/audio.py",),
    "soundfile": ("modalities/audio.py", "pipelines/toy_omni.py"),
    "matplotlib": ("relax/observe/report.py", "relax/observe/charts.py"),
    "ray": ("relax/launch/",),
    "sglang": ("relax/rollout/",),
    "pickle": (),
}
FORBIDDEN_NAMES = {"utils", "common", "misc", "helpers", "manager"}


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _imports(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("path", ALL_CODE, ids=_relative)
def test_size_of_every_file_class_and_function_is_within_the_limits(path: Path) -> None:
    """No file, class, function or parameter list is longer than the house allows."""
    source = path.read_text()
    name = _relative(path)
    too_long = (
        [f"{name}: {len(source.splitlines())} lines"] if len(source.splitlines()) > MAX_FILE_LINES else []
    )
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            limit = MAX_CLASS_LINES if isinstance(node, ast.ClassDef) else MAX_FUNCTION_LINES
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > limit:
                too_long.append(f"{name}:{node.name}: {lines} lines")
        if isinstance(node, ast.FunctionDef) and f"{name}:{node.name}" not in EXCEPTIONS:
            arguments = node.args
            count = len(
                [a for a in (*arguments.posonlyargs, *arguments.args) if a.arg not in ("self", "cls")]
            )
            if count > MAX_PARAMETERS:
                too_long.append(f"{name}:{node.name}: {count} positional parameters")
    assert too_long == []


@pytest.mark.parametrize("path", SHIPPED, ids=_relative)
def test_heavy_libraries_are_imported_in_their_one_home(path: Path) -> None:
    """Each heavy library has one home, lazy imports counted."""
    name = _relative(path)
    strangers = {
        library
        for library in _imports(ast.parse(path.read_text())) & set(HOMES)
        if not name.startswith(HOMES[library] or ("-",))
    }
    assert strangers == set()


@pytest.mark.parametrize("path", SHIPPED, ids=_relative)
def test_shipped_code_has_no_assert_and_a_docstring(path: Path) -> None:
    """`raise` instead of `assert`; each module says what it is."""
    tree = ast.parse(path.read_text())
    asserts = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    assert asserts == []
    assert ast.get_docstring(tree) or not path.read_text().strip()


def test_no_module_has_a_name_that_says_nothing() -> None:
    """No utils, common, misc, helpers or manager."""
    assert [_relative(path) for path in SHIPPED if path.stem in FORBIDDEN_NAMES] == []


@pytest.mark.parametrize(
    "package", ["flight", "flight.client", "modalities", "modalities.registry", "relax.config"]
)
def test_light_packages_import_no_torch(package: str) -> None:
    """The bus, the modalities and the configuration can be used where no torch is."""
    code = f"import {package}, sys; raise SystemExit(int('torch' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_imported_are_ours(package: str) -> None:
    """PyPI has packages of these names; the ones imported are this repo's."""
    module = __import__(package)
    assert Path(module.__file__).resolve().is_relative_to(ROOT)
