"""Adapters put beside the kernels of a base model, and merged into them."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from flax import nnx

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.types import Array
from jvarlen.models.config import DecoderConfig, LoraConfig
from jvarlen.models.decoder import check_names, param_shapes
from jvarlen.models.products import check_rank, first_adapter, rngs_of
from jvarlen.training.train_state import key_of_seed
from jvarlen.training.trainable import names_of, take_params

__all__ = ["add_lora", "merge_lora"]


def add_lora(params: nnx.State, config: DecoderConfig, seed: int) -> nnx.State:
    """The parameters of a base model with new adapters, which change nothing yet.

    Args:
      params: of the model without adapters, such as the result of `init_params` or of `from_hugging_face`.
      config: the model with adapters, `dataclasses.replace(base_config, lora=LoraConfig(…))`.
      seed: equal seeds give equal adapters; those of `init_params(config, seed)`.

    Returns:
      Parameters with the structure of `init_params(config, seed)`. The arrays of `params` are the same, not copied.
      Adapters are float32 whatever their type: `lora_a` [inputs, rank] is random, `lora_b` [rank, outputs] zero.

    Raises:
      ValueError: the config has no adapters, or the parameters have them already, or are not those of the config; they
        are listed.

    Example:
      >>> from jvarlen.models import init_params
      >>> config = DecoderConfig(width=16, lora=LoraConfig(rank=4))
      >>> params = add_lora(init_params(dataclasses.replace(config, lora=None), seed=0), config, seed=1)
      >>> params["layers"][0]["attention"]["q"]["lora_a"].shape
      (16, 4)
    """
    lora, shapes, rngs = _lora_of(config), param_shapes(config), rngs_of(key_of_seed(seed))
    if present := [name for name in names_of(params) if name.rpartition(".")[2] in ("lora_a", "lora_b")]:
        raise UserError(f"these parameters have adapters already, which merge_lora merges: {list_first(present)}")
    sizes = dict(zip(names_of(shapes), jax.tree.leaves(shapes), strict=True))
    adapters: dict[str, Array] = {}
    for index in range(config.num_layers):
        for product in config.adapted:
            name = f"layers.{index}.{product}"
            pair = first_adapter(sizes[f"{name}.kernel"].shape, lora.rank, rngs)
            adapters |= zip((f"{name}.lora_a", f"{name}.lora_b"), pair, strict=True)
    whole = jax.tree.unflatten(jax.tree.structure(shapes), [adapters.get(name, size) for name, size in sizes.items()])
    return take_params(params, whole, fresh="*.lora_[ab]", progress=False)


def merge_lora(params: nnx.State, config: DecoderConfig) -> nnx.State:
    """The parameters of a model without adapters that computes the same.

    Args:
      params: of the model with adapters, trained or not, such as the result of `TrainStep.gather_params`.
      config: the model that they belong to.

    Returns:
      Parameters with the structure of `init_params(dataclasses.replace(config, lora=None), seed)`. A kernel with an
      adapter becomes kernel + (alpha / rank) · lora_a @ lora_b, computed in float32 at least and rounded to the type of
      the kernel. Other arrays are the same, not copied.

    Raises:
      ValueError: the config has no adapters, or the parameters are not those of the config; they are listed.

    Example:
      >>> from jvarlen.models import init_params
      >>> config = DecoderConfig(width=16, lora=LoraConfig(rank=4))
      >>> sorted(merge_lora(init_params(config, seed=0), config)["layers"][0]["attention"]["q"])
      ['kernel']
    """
    lora, shapes = _lora_of(config), param_shapes(dataclasses.replace(config, lora=None))
    check_names(params, config)
    given = dict(zip(names_of(params), jax.tree.leaves(params), strict=True))

    def merged(name: str) -> Array:
        kernel, product = given[name], name.removesuffix(".kernel")
        if f"{product}.lora_a" not in given:
            return kernel
        wide = np.promote_types(kernel.dtype, np.float32)
        lora_a, lora_b = (given[f"{product}.{each}"].astype(wide) for each in ("lora_a", "lora_b"))
        check_rank(lora_a.shape[1], lora)
        with jax.default_matmul_precision("highest"):  # others round float32 on accelerators
            return (kernel.astype(wide) + lora.scale * (lora_a @ lora_b)).astype(kernel.dtype)

    return jax.tree.unflatten(jax.tree.structure(shapes), [merged(name) for name in names_of(shapes)])


def _lora_of(config: DecoderConfig) -> LoraConfig:
    if config.lora is None:
        raise UserError("this config has no adapters: DecoderConfig(lora=LoraConfig(…)) has")
    return config.lora
