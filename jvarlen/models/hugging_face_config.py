"""The decoder's settings as a config.json of Hugging Face, for the model types llama, qwen2, qwen3 and mistral.

References: the classes of the same names in https://github.com/huggingface/transformers.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from jvarlen._common.checks import UserError, is_integer, is_number, list_first
from jvarlen._common.files import read_object
from jvarlen._common.types import Json, JsonObject
from jvarlen.models.adapter_config import ADAPTER_CONFIG, ADAPTER_WEIGHTS, base_of, is_adapter, read_lora
from jvarlen.models.config import DecoderConfig, RotaryScaling

__all__ = ["KEPT_FIELDS", "hugging_face_fields", "read_config"]

_ARCHITECTURES = {name: f"{name.capitalize()}ForCausalLM" for name in ("llama", "qwen2", "qwen3", "mistral")}
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# What the classes give fields that are missing; null is something else.
_DEFAULTS: JsonObject = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "head_dim": None,
    "layer_types": None,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "original_max_position_embeddings": None,
    "begins_samples": False,  # of this library alone
}
_DEFAULTS_OF: dict[str, JsonObject] = {
    "llama": {"num_key_value_heads": None, "sliding_window": None, "max_position_embeddings": 2048},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131_072},
}
_ROTARY = ("rope_scaling", "rope_parameters")  # as transformers 4 and 5 write it
_READ = {*_DEFAULTS, *_REQUIRED, *_ROTARY, "model_type"}
# Fields that are read at these values alone.
_ONLY: dict[str, tuple[Json, ...]] = {
    "hidden_act": ("silu", "swish"),
    "is_causal": (True,),
    "pruned_heads": ({},),
    **dict.fromkeys(("mlp_bias", "is_encoder_decoder", "add_cross_attention"), (False,)),
    **dict.fromkeys(("rope_interleaved", "use_mrope"), (False,)),
    **dict.fromkeys(("attention_dropout", "chunk_size_feed_forward"), (0,)),
    **dict.fromkeys(("pretraining_tp", "partial_rotary_factor"), (1,)),
    **dict.fromkeys(("cross_attention_hidden_size", "quantization_config", "auto_map"), ()),  # the last names code
}
_ONLY_OF: dict[str, dict[str, tuple[Json, ...]]] = {
    "llama": {"sliding_window": (), "use_sliding_window": (False,)},
    "qwen2": {"attention_bias": (True,)},  # the class has it, whatever the field says
    "qwen3": {},
    "mistral": {"attention_bias": (False,), "use_sliding_window": (True,)},
}
# Beside private names and ids of special tokens, what changes neither logits nor gradients: where the model comes from,
# how transformers runs it, and generation, which older files have. Padding has no say: rows here are padded by lengths.
_HARMLESS = {
    "name_or_path", "transformers_version", "transformers.js_config", "torch_dtype", "dtype", "torchscript",
    "use_bfloat16", "use_cache", "attn_implementation", "output_attentions", "output_hidden_states", "return_dict",
    "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params", "tokenizer_class",
    "is_decoder", "is_llama_config", "tie_encoder_decoder", "initializer_range", "prefix", "model_max_length",
    "max_sequence_length", "unsloth_fixed", "unsloth_version", "max_length", "min_length", "do_sample",
    "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p",
    "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "bad_words_ids", "num_return_sequences", "output_scores", "return_dict_in_generate", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
}  # fmt: skip
KEPT_FIELDS = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range")
"""What a config.json says beyond the decoder, for those who use the model elsewhere."""
_SWITCHES = ("tie_word_embeddings", "attention_bias", "use_sliding_window", "begins_samples")
_OPTIONAL_COUNTS = ("num_key_value_heads", "head_dim", "sliding_window", "original_max_position_embeddings")
_OWN_SCALING = tuple(field.name for field in dataclasses.fields(RotaryScaling))
_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_config(path: str | os.PathLike[str], *, base_model: str | os.PathLike[str] | None = None) -> DecoderConfig:
    """The decoder of a config.json of Hugging Face.

    Args:
      path: the file, or its directory. Fields have the names of transformers 4 or 5; missing ones have the values that
        its classes give them. Or a directory of LoRA adapters, as PEFT writes them.
      base_model: the directory of the model that adapters are for; None for the one that adapter_config.json names.

    Returns:
      Its sizes and settings, with adapters in `lora`. How attention is computed, and in which type, is left to choose.

    Raises:
      FileNotFoundError: there is no such file; or adapters name a model that is not here.
      ValueError: it has another model type, or fields that would change the numbers and are not implemented, or
        adapters of which this is so. All are listed with their values.
    """
    if is_adapter(Path(path)):
        from jvarlen.models.tensor_files import map_file  # here: settings are read without JAX

        config = read_config(base_of(Path(path), base_model))
        tensors = map_file(Path(path) / ADAPTER_WEIGHTS)
        return dataclasses.replace(config, lora=read_lora(Path(path), tensors, config.num_layers))
    if base_model is not None:
        raise UserError(f"base_model ({base_model}) is for adapters, and {path} has no {ADAPTER_CONFIG}")
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        fields = read_object(file, "is not a config.json of a model")
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no {file}") from None
    try:
        return _config_of(fields)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def _config_of(fields: Mapping[str, Json]) -> DecoderConfig:
    family = fields.get("model_type")
    if family not in [*_ARCHITECTURES]:
        raise UserError(f"model_type ({family!r}) must be one of {', '.join(_ARCHITECTURES)}")
    if missing := [name for name in _REQUIRED if fields.get(name) is None]:
        raise UserError(f"fields are missing: {list_first(missing)}")
    only = _ONLY | _ONLY_OF[family] | {"architectures": ([_ARCHITECTURES[family]],)}
    known = {*_READ, *_HARMLESS, *only}
    # Null is as if it were missing; only for causal attention transformers takes it as false.
    kept = (_READ - {*only}) | {"is_causal"}
    fields = {name: value for name, value in fields.items() if value is not None or name in kept}
    is_known = {
        name: value in only.get(name, (value,))
        and (name in known or name.startswith("_") or name.endswith("_token_id"))
        for name, value in fields.items()
    }
    _refuse(family, {name: value for name, value in fields.items() if not is_known[name]})
    given = _DEFAULTS | _DEFAULTS_OF[family] | fields
    kinds: tuple[tuple[Callable[[Json], bool], tuple[str, ...]], ...] = (
        (lambda value: isinstance(value, bool), _SWITCHES),
        (lambda value: is_integer(value) and value > 0, (*_REQUIRED, "max_position_embeddings")),
        (lambda value: is_integer(value) and value >= 0, ("max_window_layers",)),
        (lambda value: is_integer(value) and value < 2**16, ("num_hidden_layers",)),
        (lambda value: value is None or (is_integer(value) and value > 0), _OPTIONAL_COUNTS),
        (is_number, ("rms_norm_eps",)),
    )
    _refuse(family, {name: given[name] for is_one, names in kinds for name in names if not is_one(given[name])})
    if given["begins_samples"] and given.get("bos_token_id") not in (None, given["vocab_size"] - 1):
        raise UserError(f"bos_token_id ({given['bos_token_id']!r}) must be the last token, which begins samples")
    base, scaling = _rotary(family, given)
    return DecoderConfig(
        num_layers=given["num_hidden_layers"],
        width=given["hidden_size"],
        mlp_width=given["intermediate_size"],
        num_heads=given["num_attention_heads"],
        num_kv_heads=given["num_key_value_heads"],
        head_size=given["head_dim"],
        vocab_size=given["vocab_size"],
        begins_samples=given["begins_samples"],
        tied=given["tie_word_embeddings"],
        qkv_bias=family == "qwen2" or given["attention_bias"],
        out_bias=family != "qwen2" and given["attention_bias"],
        qk_norm=family == "qwen3",
        windows=_windows(family, given),
        norm_epsilon=given["rms_norm_eps"],
        rotary_base=base,
        rotary_scaling=scaling,
    )


def _refuse(family: str, offenders: Mapping[str, Json]) -> None:
    if offenders:
        listed = list_first(f"{name} ({value!r})" for name, value in offenders.items())
        raise UserError(f"this decoder does not have, for the model type {family}: {listed}")


def _rotary(family: str, given: Mapping[str, Json]) -> tuple[float, RotaryScaling | None]:
    """The base of the rotary embedding, and its scaling."""
    said = {name: given[name] for name in _ROTARY if given.get(name) is not None}
    _refuse(family, {name: value for name, value in said.items() if not isinstance(value, dict)})
    name = next((name for name, value in said.items() if value), _ROTARY[-1])  # an empty object says nothing
    rotary = said.get(name, {})
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    if kind not in ("default", "llama3"):
        _refuse(family, {f"{name}.rope_type": kind})
    values: JsonObject = {key: rotary.get(key) for key in _SCALING} if kind == "llama3" else {}
    if values:
        lengths = given[_SCALING[-1]], values[_SCALING[-1]], given["max_position_embeddings"]
        values[_SCALING[-1]] = next(length for length in lengths if length is not None)
    base = rotary.get("rope_theta", given["rope_theta"])
    numbers = {"rope_theta": base, **values}
    others = {key: value for key, value in rotary.items() if key not in {"rope_type", "type", *numbers}}
    if others.get("partial_rotary_factor") == 1:
        del others["partial_rotary_factor"]
    others |= {key: value for key, value in numbers.items() if not is_number(value) or value <= 0}
    _refuse(family, {f"{name}.{key}": value for key, value in others.items()})
    return float(base), RotaryScaling(**dict(zip(_OWN_SCALING, values.values(), strict=True))) if values else None


def _windows(family: str, given: Mapping[str, Json]) -> tuple[int, ...]:
    """The window of each layer."""
    by_layer = family in ("qwen2", "qwen3")
    window: int | None = given["sliding_window"] if given["use_sliding_window"] or not by_layer else None
    first = given["max_window_layers"] if by_layer else 0
    kinds = [_FULL if window is None or i < first else _SLIDING for i in range(given["num_hidden_layers"])]
    if (named := given["layer_types"]) not in (None, kinds):
        known = [_FULL] if window is None else [_FULL, _SLIDING]
        is_known = isinstance(named, list) and len(named) == len(kinds) and all(kind in known for kind in named)
        if not (by_layer and is_known):
            _refuse(family, {"layer_types": named, "sliding_window": window})
        kinds = named
    return tuple(window if window and kind == _SLIDING else 0 for kind in kinds)


def hugging_face_fields(config: DecoderConfig, dtype: str, model_type: Json = None) -> JsonObject:
    """The fields of a config.json, as transformers 4 and 5 read them; ValueError if no model type has it."""
    windows = {*config.windows} - {0}
    is_plain = not (config.qkv_bias or config.out_bias or config.qk_norm)
    # transformers lets llama have no heads of other sizes.
    is_llama = config.width % config.num_heads == 0 if is_plain else config.qkv_bias and config.out_bias
    has_it = {
        "llama": is_llama and not (config.qk_norm or windows),
        "mistral": is_plain and len({*config.windows}) < 2,
        "qwen2": config.qkv_bias and not (config.out_bias or config.qk_norm) and len(windows) < 2,
        "qwen3": config.qk_norm and config.qkv_bias == config.out_bias and len(windows) < 2,
    }
    families = [name for name in has_it if has_it[name]]
    if not families:
        raise UserError(
            "no model type of Hugging Face has such a decoder: "
            + ", ".join(f"{name} {getattr(config, name)}" for name in ("qkv_bias", "out_bias", "qk_norm", "windows"))
        )
    family = model_type if model_type in families else families[0]
    scaling = config.rotary_scaling
    fields: JsonObject = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_features,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.size_of_head,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rotary_base,
        "rope_scaling": None
        if scaling is None
        else {"rope_type": "llama3"} | dict(zip(_SCALING, dataclasses.astuple(scaling), strict=True)),
        "tie_word_embeddings": config.tied,
        "torch_dtype": dtype,
        # Without these, the classes have other tokens.
        "bos_token_id": config.begin_token,
        "eos_token_id": None,
    }
    if family in ("llama", "qwen3"):
        fields["attention_bias"] = config.out_bias
    if family == "mistral" or windows:
        fields["sliding_window"] = max(windows, default=None)
    if windows and family != "mistral":
        kinds = [_SLIDING if window else _FULL for window in config.windows]
        fields |= {"use_sliding_window": True, "layer_types": kinds, "max_window_layers": kinds.index(_SLIDING)}
    if config.begins_samples:
        fields["begins_samples"] = True
    return fields
