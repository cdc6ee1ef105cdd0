"""Reads a decoder from a directory as Hugging Face has it: config.json and safetensors, in one file or several.

Needs the package safetensors. Files are untrusted: nothing in them is unpickled.
"""

import json
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_ref.checks import MAX_LISTED, check_integer, check_number, known_keywords
from torch_ref.training.decoder import Decoder, DecoderConfig, RotaryScaling, load_params

__all__ = ["load_model", "read_config"]

Json = Any  # what the JSON of a field may hold
Fields = dict[str, Json]

# What a family has where config.json does not say: the defaults of the package `transformers`.
_DEFAULTS: dict[str, Fields] = {
    "llama": {"sliding_window": None, "max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131_072},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096, "max_position_embeddings": 32_768},
    "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "max_position_embeddings": 32_768, "head_dim": 128},
}
_OF_ALL = {"max_window_layers": 28, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0}
_SIZES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "width",
    "intermediate_size": "mlp_width",
    "num_attention_heads": "num_heads",
    "vocab_size": "vocab_size",
}
_MAX_LAYERS = 2**16 - 1
_SWITCHES = ("tie_word_embeddings", "attention_bias", "use_sliding_window", "begins_samples")
_READ = {
    *("model_type", "num_key_value_heads", "head_dim", "rms_norm_eps", "sliding_window", "max_window_layers"),
    *("layer_types", "rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings"),
    *("original_max_position_embeddings", *_SIZES, *_SWITCHES),
}
# Fields of other decoders, or that are fixed for a family, with what they may be other than null.
_FIXED: dict[str, tuple[Json, ...]] = {
    "hidden_act": ("silu", "swish"),
    "is_causal": (True,),
    "pruned_heads": ({},),
    **dict.fromkeys(("partial_rotary_factor", "pretraining_tp"), (1,)),
    **dict.fromkeys(("attention_dropout", "chunk_size_feed_forward"), (0,)),
    **dict.fromkeys(("mlp_bias", "rope_interleaved", "use_mrope"), (False,)),
    **dict.fromkeys(("is_encoder_decoder", "add_cross_attention"), (False,)),
    **dict.fromkeys(("quantization_config", "auto_map", "cross_attention_hidden_size"), ()),
}
_FIXED_IN: dict[str, dict[str, tuple[Json, ...]]] = {
    "llama": {"architectures": (["LlamaForCausalLM"],), "sliding_window": (), "use_sliding_window": (False,)},
    "mistral": {
        "architectures": (["MistralForCausalLM"],),
        "attention_bias": (False,),
        "use_sliding_window": (True,),
    },
    "qwen2": {"architectures": (["Qwen2ForCausalLM"],), "attention_bias": (True,)},
    "qwen3": {"architectures": (["Qwen3ForCausalLM"],)},
}
# Where a model comes from, how it runs, and how texts are drawn. So are names that begin with "_" and special tokens.
_OF_NO_EFFECT = {
    *("name_or_path", "transformers_version", "transformers.js_config", "torch_dtype", "dtype", "torchscript"),
    *("use_bfloat16", "use_cache", "attn_implementation", "output_attentions", "output_hidden_states", "return_dict"),
    *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params"),
    *("tokenizer_class", "is_decoder", "is_llama_config", "tie_encoder_decoder", "initializer_range", "prefix"),
    *("model_max_length", "max_sequence_length", "unsloth_fixed", "unsloth_version", "max_length", "min_length"),
    *("do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k"),
    *("top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size"),
    *("encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores"),
    *("return_dict_in_generate", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens"),
    *("begin_suppress_tokens",),
}
_OF_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_length",
}


@known_keywords
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


def _config_of(fields: Fields) -> DecoderConfig:
    """Return the shape that the fields of config.json describe."""
    family = fields.get("model_type")
    if family not in [*_DEFAULTS]:
        raise ValueError(f"model_type must be one of {', '.join(_DEFAULTS)}, got {family!r}")
    if missing := [name for name in _SIZES if fields.get(name) is None]:
        raise ValueError(f"these fields are missing: {', '.join(missing)}")
    fixed = _FIXED | _FIXED_IN[family]
    unknown = {}
    for name, value in fields.items():
        is_known = value is None or name in _READ | _OF_NO_EFFECT or name.startswith("_") or name.endswith("_token_id")
        if name in fixed:  # transformers takes is_causal=null as false
            is_known = value in fixed[name] or (value is None and name != "is_causal")
        if not is_known:
            unknown[name] = value
    _refuse(unknown)
    settings: Fields = {**dict.fromkeys(_SWITCHES, False), **_OF_ALL, **_DEFAULTS[family]}
    settings |= {name: value for name, value in fields.items() if name not in fixed}
    _check(settings)
    has_bias = settings["attention_bias"]
    base, scaling = _rotary_of(settings)
    return DecoderConfig(
        **{name: settings[field] for field, name in _SIZES.items()},
        num_kv_heads=settings.get("num_key_value_heads"),
        head_size=settings.get("head_dim"),
        begins_samples=settings["begins_samples"],
        tied=settings["tie_word_embeddings"],
        qkv_bias=has_bias or family == "qwen2",
        out_bias=has_bias,
        qk_norm=family == "qwen3",
        windows=_windows_of(family, settings),
        norm_epsilon=settings["rms_norm_eps"],
        rotary_base=base,
        rotary_scaling=scaling,
    )


def _refuse(fields: Fields) -> None:
    """Raise ValueError for fields that this decoder does not have."""
    if fields:
        listed = ", ".join(f"{name}={value!r}" for name, value in list(fields.items())[:MAX_LISTED])
        raise ValueError(f"this decoder has no such thing: {listed}")


def _check(settings: Fields) -> None:
    """Raise ValueError, by the field, where a value is of another kind or out of range."""
    if wrong := [name for name in _SWITCHES if not isinstance(settings[name], bool)]:
        raise ValueError(f"these fields must be true or false: {', '.join(wrong)}")
    for name in (*_SIZES, "max_position_embeddings"):
        check_integer(name, settings[name])
    check_integer("num_hidden_layers", settings["num_hidden_layers"], maximum=_MAX_LAYERS)
    check_integer("max_window_layers", settings["max_window_layers"], minimum=0)
    for name in ("num_key_value_heads", "head_dim", "sliding_window", "original_max_position_embeddings"):
        if settings.get(name) is not None:
            check_integer(name, settings[name])
    check_number("rms_norm_eps", settings["rms_norm_eps"], above=0)
    if settings["begins_samples"] and settings.get("bos_token_id") not in (None, settings["vocab_size"] - 1):
        raise ValueError(f"bos_token_id must be the last token, which begins samples, got {settings['bos_token_id']!r}")


def _windows_of(family: str, settings: Fields) -> tuple[int, ...]:
    """Return the window of each layer, 0 where it has none."""
    by_layer = family.startswith("qwen")
    window = settings["sliding_window"] if settings["use_sliding_window"] or not by_layer else None
    first = settings["max_window_layers"] if by_layer else 0
    of_kind = {"full_attention": 0} | ({} if window is None else {"sliding_attention": window})
    windows = [0 if layer < first else window or 0 for layer in range(settings["num_hidden_layers"])]
    named = settings.get("layer_types")
    if named is not None:
        is_known = isinstance(named, list) and all(kind in [*of_kind] for kind in named)
        by_name = [of_kind[kind] for kind in named] if is_known else []
        if len(by_name) != len(windows) or (by_name != windows and not by_layer):
            _refuse({"layer_types": named, "sliding_window": window})
        windows = by_name
    return tuple(windows)


def _rotary_of(settings: Fields) -> tuple[float, RotaryScaling | None]:
    """Return base and scaling of rotary positions, which older files have in two fields."""
    named = {field: settings.get(field) for field in ("rope_scaling", "rope_parameters")}
    _refuse({field: value for field, value in named.items() if value is not None and not isinstance(value, dict)})
    field = "rope_scaling" if named["rope_scaling"] else "rope_parameters"
    rotary = dict(named[field] or {})
    base = check_number("rope_theta", rotary.pop("rope_theta", settings["rope_theta"]), above=0)
    other_kind = rotary.pop("type", "default")
    kind = rotary.pop("rope_type", other_kind)
    if rotary.get("partial_rotary_factor") == 1:
        del rotary["partial_rotary_factor"]
    if kind == "default" and not rotary:
        return base, None
    if kind == "llama3":  # the length before scaling may be in three places
        name = "original_max_position_embeddings"
        lengths = settings.get(name), rotary.get(name), settings["max_position_embeddings"]
        rotary[name] = check_integer(name, next(length for length in lengths if length is not None))
    if kind != "llama3" or rotary.keys() != _OF_SCALING.keys():
        got = ", ".join([str(kind), *rotary])
        raise ValueError(f"{field} must be default, or llama3 with {', '.join(_OF_SCALING)}, got {got}")
    return base, RotaryScaling(**{name: rotary[field] for field, name in _OF_SCALING.items()})


@known_keywords
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
        if not torch.equal(head, tensors.setdefault("model.embed_tokens.weight", head)):
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
