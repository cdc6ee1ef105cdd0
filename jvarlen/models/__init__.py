"""Small Flax NNX models for examples and benchmarks.

- `transformer`, `mixed_precision`: the demo transformer. `layers`: the same by layers. `pipelined`: in pipeline stages.
- `generation`: samples from it. `export`: its parameters as a safetensors file.
"""

from jvarlen.models.export import save_params
from jvarlen.models.generation import generate
from jvarlen.models.layers import layered, stack_layers, unstack_layers
from jvarlen.models.pipelined import make_stages, merge_stages, split_stages
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
    "make_stages",
    "merge_stages",
    "params_from_flat",
    "save_params",
    "split_stages",
    "stack_layers",
    "unstack_layers",
]
