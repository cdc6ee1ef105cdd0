"""Parameters of the demo transformer as a safetensors file that says what it holds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from flax import nnx

from jvarlen._common.checks import UserError
from jvarlen._common.files import check_place, write_atomically
from jvarlen.models.config import TransformerConfig
from jvarlen.models.transformer import flat_params

__all__ = ["save_params"]

_SIZES = ("num_layers", "width", "vocab_size", "num_heads")


def save_params(
    path: Path, params: nnx.State, config: TransformerConfig, *, metadata: Mapping[str, str] | None = None
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
      >>> config = TransformerConfig(width=16)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save_params(Path(folder) / "model.safetensors", init_params(config, 0), config)
      ...     with safe_open(Path(folder) / "model.safetensors", "numpy") as file:
      ...         file.metadata()["config"], file.get_tensor("embed.embedding").shape
      ('{"num_layers": 2, "width": 16, "vocab_size": 256, "num_heads": 2}', (257, 16))

    References:
      The format: https://huggingface.co/docs/safetensors
    """
    check_place(path)
    try:
        from safetensors.numpy import save  # here: an extra
    except ModuleNotFoundError:
        raise UserError(f"{path} can only be written with safetensors: pip install 'jvarlen[export]'") from None
    defaults = dataclasses.asdict(TransformerConfig())
    settings = {
        name: value for name, value in dataclasses.asdict(config).items() if name in _SIZES or value != defaults[name]
    }
    content = save(flat_params(params), {"format": "flax", "config": json.dumps(settings), **(metadata or {})})
    with write_atomically(path) as file:
        file.write(content)
