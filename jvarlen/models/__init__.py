"""Small Flax NNX models for examples and benchmarks."""

from jvarlen.models.transformer import Transformer, TransformerConfig, flat_params, init_params, make_loss_fn

__all__ = ["Transformer", "TransformerConfig", "flat_params", "init_params", "make_loss_fn"]
