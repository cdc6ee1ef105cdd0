"""A transformer described in a JSON file, so that layouts can be chosen without the model."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from jvarlen._common.checks import check_at_least_one, check_choices
from jvarlen._common.files import load_dataclass
from jvarlen.models import DecoderConfig, init_params, layered, stack_layers
from jvarlen.parallel.layers import LayeredModel, LayeredParams
from jvarlen.training.master_weights import with_float32_master

__all__ = ["ModelFile"]

_Type = Literal["float32", "bfloat16"]
_Optimizer = Literal["adamw", "lion", "sgd"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFile:
    """The shape of a decoder of the built-in kind, as JSON names it.

    Attributes:
      layers: number of layers.
      width: of the residual stream.
      heads: attention heads, which divide the width into even sizes.
      vocabulary: number of tokens.
      params_dtype: of parameters; with `"bfloat16"`, the optimizer keeps float32 copies.
      compute_dtype: of activations.
      optimizer: `"adamw"` keeps two numbers a parameter, `"lion"` one, `"sgd"` none.

    Raises:
      ValueError: sizes below 1, heads that do not divide the width, or unknown types.

    Example:
      >>> ModelFile(layers=2, width=64, heads=4, vocabulary=256).num_params
      131456
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    params_dtype: _Type = "float32"
    compute_dtype: _Type = "float32"
    optimizer: _Optimizer = "adamw"

    def __post_init__(self):
        check_at_least_one(layers=self.layers, width=self.width, heads=self.heads, vocabulary=self.vocabulary)
        check_choices(
            params_dtype=(self.params_dtype, _Type),
            compute_dtype=(self.compute_dtype, _Type),
            optimizer=(self.optimizer, _Optimizer),
        )
        _ = self._config  # which checks sizes that do not divide

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ModelFile:
        """Reads a model.

        Args:
          path: a JSON file with the attributes of a model.

        Returns:
          The model.

        Raises:
          ValueError: unknown or missing keys, or values that are not valid.
        """
        return load_dataclass(cls, path, "model")

    @property
    def _config(self) -> DecoderConfig:
        return DecoderConfig(
            num_layers=self.layers,
            width=self.width,
            num_heads=self.heads,
            vocab_size=self.vocabulary,
            compute_dtype="bfloat16" if self.compute_dtype == "bfloat16" else None,
        )

    @property
    def model(self) -> LayeredModel:
        """The model by layers."""
        return layered(self._config)

    @property
    def params(self) -> Any:
        """`LayeredParams` of `jax.ShapeDtypeStruct`."""
        one_layer = dataclasses.replace(self._config, num_layers=1)
        ends, layers = jax.eval_shape(lambda: stack_layers(init_params(one_layer, seed=0)))
        dtype = jnp.dtype(self.params_dtype)
        return LayeredParams(
            jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), ends),
            jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((self.layers, *leaf.shape[1:]), dtype), layers),
        )

    @property
    def num_params(self) -> int:
        """Parameters in all."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))

    def make_optimizer(self) -> optax.GradientTransformation:
        """The optimizer.

        Returns:
          An Optax optimizer, with some learning rate.
        """
        optimizer = {"adamw": optax.adamw, "lion": optax.lion, "sgd": optax.sgd}[self.optimizer](1e-3)
        return with_float32_master(optimizer) if self.params_dtype == "bfloat16" else optimizer
