"""Reads a decoder from a directory as Hugging Face has it: config.json and safetensors, in one file or several.

Needs the package safetensors. Files are untrusted: nothing in them is unpickled.
"""

import json
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_ref.checks import MAX_LISTED, check_integer
from torch_ref.decoder import Decoder, DecoderConfig, RotaryScaling, load_params

__all__ = ["load_model", "read_config"]

# What a family has where config.json does not say: the defaults of the package `transformers`.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"sliding_window": None},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
}
_SIZES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "width",
    "intermediate_size": "mlp_width",
    "num_attention_heads": "num_heads",
    "vocab_size": "vocab_size",
}
_SWITCHES = ("tie_word_embeddings", "attention_bias", "use_sliding_window", "begins_samples")
_READ = {
    *("model_type", "num_key_value_heads", "head_dim", "rms_norm_eps", "sliding_window", "max_window_layers"),
    *("layer_types", "rope_parameters", "rope_scaling", "rope_theta", "hidden_act", *_SIZES, *_SWITCHES),
}
_OF_NO_EFFECT = {
    *("architectures", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "initializer_range"),
    *("max_position_embeddings", "pretraining_tp", "transformers_version", "use_cache", "_name_or_path"),
}
_OF_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_length",
}


def read_config(path: str | PathLike[str]) -> DecoderConfig:
    """Read the shape of a decoder.

    Args:
        path: config.json of a model of the type llama, mistral, qwen2 or qwen3, or the directory with it.

    Returns:
        The shape. `begins_samples` is false unless config.json has a field of that name.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is no JSON object, or of another type; or if a field is missing, out of its range, or of
            something that this decoder does not have. Fields are named.
    """
    path = Path(path)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}")
    try:
        fields = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is no JSON object: {error}") from None
    try:
        return _config_of(fields)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _config_of(fields: dict[str, Any]) -> DecoderConfig:
    """Return the shape that the fields of config.json describe."""
    family = fields.get("model_type")
    if family not in _DEFAULTS:
        raise ValueError(f"model_type must be one of {', '.join(_DEFAULTS)}, got {family!r}")
    if missing := [name for name in _SIZES if name not in fields]:
        raise ValueError(f"these fields are missing: {', '.join(missing)}")
    read = _READ - ({"sliding_window"} if family == "llama" else set())
    read -= {"attention_bias"} if family in ("mistral", "qwen2") else set()
    unknown = {name: value for name, value in fields.items() if value and name not in read | _OF_NO_EFFECT}
    if fields.get("hidden_act", "silu") != "silu":
        unknown["hidden_act"] = fields["hidden_act"]
    if unknown:
        listed = ", ".join(f"{name}={value!r}" for name, value in list(unknown.items())[:MAX_LISTED])
        raise ValueError(f"this decoder has no such thing: {listed}")
    settings = {**_DEFAULTS[family], **fields}
    if wrong := [name for name in _SWITCHES if not isinstance(settings.get(name, False), bool)]:
        raise ValueError(f"these fields must be true or false: {', '.join(wrong)}")
    if settings.get("begins_samples") and settings.get("bos_token_id") not in (None, settings["vocab_size"] - 1):
        raise ValueError(f"bos_token_id must be the last token, which begins samples, got {settings['bos_token_id']!r}")
    has_bias = settings.get("attention_bias", False)
    base, scaling = _rotary_of(settings)
    return DecoderConfig(
        **{name: settings[field] for field, name in _SIZES.items()},
        num_kv_heads=settings.get("num_key_value_heads"),
        head_size=settings.get("head_dim"),
        begins_samples=settings.get("begins_samples", False),
        tied=settings.get("tie_word_embeddings", False),
        qkv_bias=has_bias or family == "qwen2",
        out_bias=has_bias,
        qk_norm=family == "qwen3",
        windows=_windows_of(family, settings),
        norm_epsilon=settings.get("rms_norm_eps", 1e-6),
        rotary_base=base,
        rotary_scaling=scaling,
    )


def _windows_of(family: str, settings: dict[str, Any]) -> tuple[int, ...]:
    """Return the window of each layer, 0 where it has none."""
    num_layers, window = check_integer("num_hidden_layers", settings["num_hidden_layers"]), settings["sliding_window"]
    kinds = ["full_attention"]
    if family == "mistral" and window is not None:
        kinds = ["sliding_attention"]
    kinds *= num_layers
    if family.startswith("qwen") and settings.get("use_sliding_window"):
        kinds[settings["max_window_layers"] :] = ["sliding_attention"] * (num_layers - settings["max_window_layers"])
        kinds = settings.get("layer_types") or kinds
    if settings.get("layer_types") not in (None, kinds) or not {*kinds} <= {"full_attention", "sliding_attention"}:
        raise ValueError(f"this decoder has no such thing: layer_types={settings['layer_types']!r}")
    if "sliding_attention" in kinds and window is None:
        raise ValueError("layers with sliding_attention need a sliding_window")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _rotary_of(settings: dict[str, Any]) -> tuple[float, RotaryScaling | None]:
    """Return base and scaling of rotary positions, which older files have in two fields."""
    rotary = dict(settings.get("rope_scaling") or settings.get("rope_parameters") or {})
    base = rotary.pop("rope_theta", settings.get("rope_theta") or 10_000.0)
    kinds = {rotary.pop(name) for name in ("rope_type", "type") if name in rotary} or {"default"}
    if kinds == {"llama3"} and "max_position_embeddings" in settings:
        rotary.setdefault("original_max_position_embeddings", settings["max_position_embeddings"])
    if rotary.get("partial_rotary_factor") == 1:
        del rotary["partial_rotary_factor"]
    if kinds == {"default"} and not rotary:
        return base, None
    if kinds != {"llama3"} or rotary.keys() != _OF_SCALING.keys():
        named = ", ".join([*sorted(map(str, kinds)), *rotary])
        raise ValueError(f"rotary positions must be default, or llama3 with {', '.join(_OF_SCALING)}, got {named}")
    return base, RotaryScaling(**{name: rotary[field] for field, name in _OF_SCALING.items()})


def load_model(directory: str | PathLike[str]) -> Decoder:
    """Read a decoder and its parameters.

    Args:
        directory: with config.json, and model.safetensors or model.safetensors.index.json and the files that it names.

    Returns:
        The model on the CPU, in torch's default dtype.

    Raises:
        FileNotFoundError: if a file is missing; it is named.
        ValueError: if safetensors is not installed, if a file is damaged, or if config.json or the tensors are not
            those of such a model. Fields and tensors are named.
    """
    directory = Path(directory)
    config = read_config(directory)
    tensors = _read_tensors(directory)
    if config.tied and "lm_head.weight" in tensors:
        head = tensors.pop("lm_head.weight")
        if not torch.equal(head, tensors.get("model.embed_tokens.weight", head)):
            raise ValueError(f"{directory}: by tie_word_embeddings lm_head.weight is the embedding, but they differ")
    model = Decoder(config)
    try:
        load_params(model, tensors)
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from None
    return model


def _read_tensors(directory: Path) -> dict[str, Tensor]:
    """Read all tensors by their names, but for those that older files hold and no model reads."""
    try:
        from safetensors import SafetensorError, safe_open  # here: an extra
    except ModuleNotFoundError:
        raise ValueError(f"{directory} can only be read with safetensors: pip install safetensors") from None
    index = directory / "model.safetensors.index.json"
    names_of: dict[str, set[str]] = {}
    if not (directory / "model.safetensors").is_file() and index.is_file():
        try:
            for name, file_name in json.loads(index.read_bytes())["weight_map"].items():
                names_of.setdefault(Path(file_name).name, set()).add(name)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{index} is no index of safetensors files: {error!r}") from None
    paths = [directory / name for name in names_of or ["model.safetensors"]]
    if missing := [str(path) for path in paths if not path.is_file()]:
        raise FileNotFoundError(f"there is no {', '.join(missing[:MAX_LISTED])}")
    tensors: dict[str, Tensor] = {}
    for path in paths:
        try:
            with safe_open(path, "pt") as file:
                held = set(file.keys())
                if differing := sorted(held ^ names_of.get(path.name, held))[:MAX_LISTED]:
                    raise ValueError(f"{path} does not hold what {index.name} says: {', '.join(differing)}")
                tensors |= {name: file.get_tensor(name) for name in held}
        except SafetensorError as error:
            raise ValueError(f"{path} is no readable safetensors file: {error}") from None
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
