"""The settings of low-rank adapters as an adapter_config.json of PEFT.

References: `LoraConfig` in https://github.com/huggingface/peft.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Collection
from pathlib import Path

from jvarlen._common.checks import UserError, is_integer, is_number, list_first
from jvarlen._common.files import read_object
from jvarlen._common.types import Json, JsonObject
from jvarlen.models.config import PRODUCTS, DecoderConfig, LoraConfig
from jvarlen.models.tensor_names import tensor_name

__all__ = ["ADAPTER_CONFIG", "ADAPTER_WEIGHTS", "adapter_fields", "base_of", "is_adapter", "read_lora"]

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_BASE = "base_model_name_or_path"
_KIND: JsonObject = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none"}
# Fields that are read at these values alone.
_ONLY: dict[str, tuple[Json, ...]] = {
    **{name: (value, None) for name, value in _KIND.items()},
    "peft_type": ("LORA",),
    # Others change the weights of the model as well.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal"),
}
# Read, or without effect on the numbers of such adapters. All fields that are in neither must be null, false or empty.
_KNOWN = {
    _BASE, "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "layers_pattern", "revision",
    "peft_version", "auto_mapping", "inference_mode", "megatron_core", "qalora_group_size", "runtime_config",
}  # fmt: skip


def is_adapter(directory: Path) -> bool:
    """Whether a directory holds adapters, whose model is elsewhere."""
    return (directory / ADAPTER_CONFIG).exists()


def base_of(directory: Path, base_model: str | os.PathLike[str] | None = None) -> Path:
    """The directory of the model that adapters are for: the given one, or that of their settings; absolute."""
    named = base_model
    if named is None:
        named = _read_fields(directory).get(_BASE)
    if isinstance(named, str | os.PathLike) and os.fspath(named):
        base = Path(named).absolute()  # runs are resumed, and adapters opened, from other directories
        if base.is_dir() and not is_adapter(base):
            return base
    raise FileNotFoundError(
        f"{directory} holds adapters alone, and their model ({named!r}) is no directory of one here: give "
        f"base_model=, or write its directory into {ADAPTER_CONFIG} as {_BASE}"
    )


def _read_fields(directory: Path) -> JsonObject:
    return read_object(directory / ADAPTER_CONFIG, "is not an adapter_config.json of PEFT")


def read_lora(directory: Path, tensors: Collection[str], num_layers: int) -> LoraConfig:
    """The adapters of a directory that has tensors of these names, which tell the products with adapters.

    Raises ValueError for fields and tensors that would change the numbers and are not implemented; all are listed.
    """
    fields = _read_fields(directory)
    rank, alpha, dropout = (fields.get(name, 0) for name in ("r", "lora_alpha", "lora_dropout"))
    is_right = {
        "r": is_integer(rank) and rank > 0,
        "lora_alpha": is_number(alpha) and alpha > 0,
        "lora_dropout": is_number(dropout) and 0 <= dropout < 1,
    } | {
        name: value in _ONLY[name] if name in _ONLY else not value
        for name, value in {"peft_type": None, **fields}.items()
        if name not in _KNOWN
    }
    refused = [f"{name} ({reprlib.repr(fields.get(name))})" for name, right in is_right.items() if not right]
    layers_of: dict[str, set[int]] = {}
    known = set()
    for layer in range(num_layers):
        for product in PRODUCTS:
            names = {tensor_name(f"layers.{layer}.{product}.{part}") for part in ("lora_a", "lora_b")}
            if found := names.intersection(tensors):
                layers_of.setdefault(product, set()).add(layer)
                known |= found
    refused += [f"the tensor {name}" for name in sorted({*tensors} - known)]
    targets = fields.get("target_modules")
    for product, layers in layers_of.items():
        module = tensor_name(f"layers.0.{product}.kernel").removesuffix(".weight")
        if len(layers) < num_layers:
            refused.append(f"adapters of {module.partition('0.')[2]} in {len(layers)} of {num_layers} layers")
        if isinstance(targets, list) and not any(f".{module}".endswith(f".{target}") for target in targets):
            refused.append(f"tensors of {module}, which is not in target_modules")
    if not layers_of and not refused:
        refused = ["no adapters"]
    if refused:
        raise UserError(
            f"{directory / ADAPTER_CONFIG}: these adapters are not implemented, only LoRA of the same products in all "
            f"layers: {list_first(refused)}"
        )
    patterns = tuple(f"layers.*.{product}.kernel" for product in PRODUCTS if product in layers_of)
    return LoraConfig(rank=rank, alpha=alpha, dropout=dropout, targets=patterns)


def adapter_fields(config: DecoderConfig, base_model: str | os.PathLike[str]) -> JsonObject:
    """The fields of an adapter_config.json."""
    lora = config.lora
    assert lora is not None
    modules = [tensor_name(f"layers.0.{name}.kernel").split(".")[-2] for name in config.adapted]
    return _KIND | {
        _BASE: os.fspath(base_model),
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": modules,
        "inference_mode": True,
    }
