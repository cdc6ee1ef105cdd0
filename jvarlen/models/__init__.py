"""Small Flax NNX models for examples and benchmarks.

- `transformer`, `mixed_precision`: the demo transformer. `layers`: the same by layers.
- `generation`: samples from it. `export`: its parameters as a safetensors file.
"""

from jvarlen.models.export import save_params
from jvarlen.models.generation import generate
from jvarlen.models.layers import layered, stack_layers, unstack_layers
from jvarlen.models.transformer import (
    Transformer,
    TransformerConfig,
    flat_params,
    init_params,
    make_loss_fn,
    params_from_flat,
)

__all__ = [
    "Transformer",
    "TransformerConfig",
    "flat_params",
    "generate",
    "init_params",
    "layered",
    "make_loss_fn",
    "params_from_flat",
    "save_params",
    "stack_layers",
    "unstack_layers",
]
