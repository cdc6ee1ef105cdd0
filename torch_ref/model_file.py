"""Reads the demo model from a safetensors file that `jvarlen export` wrote.

Needs the package safetensors. The file is untrusted: nothing in it is unpickled.
"""

import json
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from torch_ref.checks import MAX_LISTED
from torch_ref.model import Transformer, load_params

__all__ = ["load_model"]

_SIZES = {"width": "embed_dim", "num_layers": "num_layers", "num_heads": "num_heads", "vocab_size": "vocab_size"}
# How the trained model computes, not what: here the parameters' dtype decides, or `torch.autocast`.
_OF_COMPUTATION = {"attention", "packed_attention", "compute_dtype"}


def load_model(path: str | PathLike[str]) -> Transformer:
    """Read a model and its weights.

    Args:
        path: a safetensors file with the sizes of the model as JSON under `config` in its metadata, and its tensors
            under the names that `load_params` takes.

    Returns:
        The model on the CPU, in torch's default dtype.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if safetensors is not installed, if the file is no safetensors file or of another model, or if the
            model has settings that there are none of here. Tensors and settings are named.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no model file {path}")
    try:
        from safetensors import SafetensorError, safe_open  # here: an extra
    except ModuleNotFoundError:
        raise ValueError(f"{path} can only be read with safetensors: pip install safetensors") from None
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
    except SafetensorError as error:
        raise ValueError(f"{path} is no readable safetensors file: {error}") from None
    if "config" not in metadata:
        named = ", ".join(sorted(tensors)[:MAX_LISTED])
        raise ValueError(f"{path} is of another model: its metadata have no config; its tensors are {named}, ...")
    try:
        model = Transformer(**_sizes(metadata["config"]))
        load_params(model, {name: tensor.to(torch.get_default_dtype()).numpy() for name, tensor in tensors.items()})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return model


def _sizes(config: str) -> dict[str, int]:
    """Return the sizes as arguments of `Transformer`; raise ValueError where there are other settings."""
    try:
        settings: dict[str, Any] = dict(json.loads(config))
    except (ValueError, TypeError) as error:
        raise ValueError(f"its config is no JSON object: {error}") from None
    if wrong := [name for name in _SIZES if type(settings.get(name)) is not int]:
        raise ValueError(f"its config must have integers as {', '.join(wrong)}")
    unknown = [name for name in settings if name not in _SIZES and name not in _OF_COMPUTATION]
    if unknown:
        listed = ", ".join(f"{name}={settings[name]!r}" for name in unknown)
        raise ValueError(f"there is no such setting of the model here: {listed}")
    return {argument: settings[name] for name, argument in _SIZES.items()}
