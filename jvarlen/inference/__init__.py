"""Evaluation, results for every sample of a dataset, and generation.

- `evaluate`: the loss of a plan.
- `predict`: results of a function for every sample, by one compiled step in all of its shapes.
- `results`: which axes of results follow a batch, and the results of each sample.
- `generation`: samples from the decoder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jvarlen._common.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from jvarlen.inference.generation import generate

__all__ = ["generate"]

__getattr__, __dir__ = lazy_imports(__name__)
