"""Parameters of the decoder by name, and as a safetensors file that says what it holds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.files import check_place, write_atomically
from jvarlen.models.config import DecoderConfig
from jvarlen.models.decoder import init_params

__all__ = ["flat_params", "params_from_flat", "save_params"]

_SIZES = ("num_layers", "width", "vocab_size", "num_heads")


def save_params(
    path: Path, params: nnx.State, config: DecoderConfig, *, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes parameters to a safetensors file, atomically.

    Tensors have the names and shapes of `flat_params`. The metadata hold `format`, "flax", since kernels are [inputs,
    outputs], and `config`: JSON of the model's sizes and of all other settings that are not the defaults.

    Args:
      path: the file; its directory must exist, and an existing file is replaced.
      params: the result of `init_params`, trained or not.
      config: the model that they belong to.
      metadata: more texts by name, such as `tokenizer`.

    Raises:
      ValueError: safetensors is not installed.

    Example:
      >>> import tempfile
      >>> from jvarlen.models import init_params
      >>> from safetensors import safe_open
      >>> config = DecoderConfig(width=16)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save_params(Path(folder) / "model.safetensors", init_params(config, 0), config)
      ...     with safe_open(Path(folder) / "model.safetensors", "numpy") as file:
      ...         file.metadata()["config"], file.get_tensor("embed.embedding").shape
      ('{"num_layers": 2, "width": 16, "num_heads": 2, "vocab_size": 257}', (257, 16))

    References:
      The format: https://huggingface.co/docs/safetensors
    """
    check_place(path)
    try:
        from safetensors.numpy import save  # here: an extra
    except ModuleNotFoundError:
        raise UserError(f"{path} can only be written with safetensors: pip install 'jvarlen[export]'") from None
    defaults = dataclasses.asdict(DecoderConfig())
    settings = {
        name: value for name, value in dataclasses.asdict(config).items() if name in _SIZES or value != defaults[name]
    }
    content = save(flat_params(params), {"format": "flax", "config": json.dumps(settings), **(metadata or {})})
    with write_atomically(path) as file:
        file.write(content)


def flat_params(params: nnx.State) -> dict[str, np.ndarray]:
    """The parameters as host arrays under dotted names, to carry them into another framework.

    Args:
      params: the result of `init_params`, trained or not.

    Returns:
      A dict from names such as `blocks.0.qkv.kernel` to float32 arrays; kernels are [inputs, outputs].
    """
    return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(params)}


def params_from_flat(config: DecoderConfig, arrays: Mapping[str, Any]) -> nnx.State:
    """The parameters of a model from arrays under dotted names; the inverse of `flat_params`.

    Args:
      config: the model that they belong to.
      arrays: all of its parameters, by name.

    Returns:
      A pytree as `init_params` returns it, of the given arrays.

    Raises:
      ValueError: names are missing or unexpected, or shapes differ. All kinds are listed.

    Example:
      >>> config = DecoderConfig(width=16)
      >>> params = init_params(config, seed=0)
      >>> bool((params_from_flat(config, flat_params(params))["head"]["kernel"][...] == params["head"]["kernel"]).all())
      True
    """
    expected = {
        ".".join(map(str, path)): (path, leaf)
        for path, leaf in nnx.to_flat_state(jax.eval_shape(lambda: init_params(config, 0)))
    }
    missing = [name for name in expected if name not in arrays]
    unexpected = [name for name in arrays if name not in expected]
    misshapen = [
        f"{name} {np.shape(arrays[name])}, expected {leaf.shape}"
        for name, (_, leaf) in expected.items()
        if name in arrays and np.shape(arrays[name]) != leaf.shape
    ]
    named = (("missing", missing), ("unexpected", unexpected), ("of another shape", misshapen))
    if problems := [f"{kind}: {list_first(names)}" for kind, names in named if names]:
        raise UserError(f"these are not the parameters of the built-in model: {'; '.join(problems)}")
    leaves = [(path, leaf.replace(jnp.asarray(arrays[name]))) for name, (path, leaf) in expected.items()]
    return nnx.from_flat_state(leaves)
