"""Finer splits of a model than layouts have, for information only: no program of the library runs them.

- `choice`: how to split each operator of a layer over devices.
- `cutting`: pipeline stages of layers whose costs differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jvarlen._common.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from jvarlen.experimental.operators.choice import Operator, choose_operators, transformer_operators
    from jvarlen.experimental.operators.cutting import cut_layers

__all__ = ["Operator", "choose_operators", "cut_layers", "transformer_operators"]

__getattr__, __dir__ = lazy_imports(__name__)
