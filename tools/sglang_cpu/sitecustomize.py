"""Run by Python at its start: declares torchvision's operators, whose CUDA build cannot load, when it is imported."""

from __future__ import annotations

import importlib.abc
import sys

_libraries = []  # an operator library lives as long as its object


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Finds nothing; the search for torchvision is the moment to act, and torch is not imported before it."""

    def find_spec(self, fullname, path, target=None):
        if fullname != "torchvision":
            return
        sys.meta_path.remove(self)
        import stand_in

        if stand_in.needed():
            _declare_operators()
        return


def _declare_operators() -> None:
    import torch

    if hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)


sys.meta_path.insert(0, _BeforeTorchvision())
