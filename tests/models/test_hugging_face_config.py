"""config.json of Hugging Face: every family as its class in transformers reads it; what is not implemented is named."""

import json

import pytest

from jvarlen.models.config import DecoderConfig, RotaryScaling
from jvarlen.models.hugging_face_config import hugging_face_fields, read_config

SIZES = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALING = RotaryScaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=64)


def read(tmp_path, family="llama", **fields):
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"model_type": family} | fields))
    return read_config(tmp_path)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {}),
        ("llama", {"num_key_value_heads": 8, "head_dim": 6, "attention_bias": True, "rms_norm_eps": 1e-5}),
        ("llama", {"head_dim": None, "num_key_value_heads": None, "tie_word_embeddings": True, "rope_theta": 500000.0}),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "original_max_position_embeddings": 64, **LLAMA3}}),
        ("llama", {"rope_scaling": {"type": "llama3", **LLAMA3}, "rope_theta": 5e5, "max_position_embeddings": 99}),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 7.0, **LLAMA3}, "rope_theta": 9.0}),
        ("qwen2", {}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 7, "max_window_layers": 0, "head_dim": 8}),
        ("qwen3", {}),
        ("qwen3", {"attention_bias": True, "head_dim": 8, "num_key_value_heads": 2}),
        (
            "qwen3",
            {
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "use_sliding_window": True,
                "sliding_window": 9,
            },
        ),
        ("mistral", {}),
        ("mistral", {"sliding_window": None, "num_key_value_heads": 16, "head_dim": None}),
        ("mistral", {"sliding_window": 5, "layer_types": ["sliding_attention"] * 4, "head_dim": 16}),
    ],
)
def test_fields_mean_what_they_mean_in_transformers(tmp_path, family, fields):
    transformers = pytest.importorskip("transformers")
    config = read(tmp_path, family, **fields)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    heads = (config.num_heads, config.kv_heads, config.size_of_head)
    size = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert heads == (theirs.num_attention_heads, theirs.num_key_value_heads, size)
    sizes = (config.vocab_size, config.width, config.mlp_features, config.num_layers)
    assert sizes == (theirs.vocab_size, theirs.hidden_size, theirs.intermediate_size, theirs.num_hidden_layers)
    assert (config.tied, config.norm_epsilon) == (theirs.tie_word_embeddings, theirs.rms_norm_eps)
    has_bias = getattr(theirs, "attention_bias", False)
    assert (config.qkv_bias, config.out_bias) == (family == "qwen2" or has_bias, family != "qwen2" and has_bias)
    assert config.qk_norm == (family == "qwen3")
    assert not config.begins_samples
    if family == "mistral":
        expected = [theirs.sliding_window or 0] * 4
    else:
        kinds = getattr(theirs, "layer_types", None) or ["full_attention"] * 4
        expected = [theirs.sliding_window if kind == "sliding_attention" else 0 for kind in kinds]
    assert config.windows == (tuple(expected) if any(expected) else ())
    rotary = dict(theirs.rope_parameters)
    assert config.rotary_base == rotary.pop("rope_theta")
    if rotary.pop("rope_type") == "default":
        assert config.rotary_scaling is None
        assert not rotary
    else:
        assert config.rotary_scaling == RotaryScaling(
            factor=rotary["factor"],
            low_frequency_factor=rotary["low_freq_factor"],
            high_frequency_factor=rotary["high_freq_factor"],
            original_length=rotary["original_max_position_embeddings"],
        )


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, r"rope_scaling\.rope_type \('yarn'\)"),
        (
            "qwen2",
            {"rope_scaling": {"type": "default", "mrope_section": [1]}},
            r"rope_scaling\.mrope_section \(\[1\]\)",
        ),
        ("llama", {"rope_scaling": {"type": "llama3", "factor": 2.0}}, r"low_freq_factor \(None\), .*high_freq_factor"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor \(0\.5\)"),
        ("llama", {"rope_theta": None}, r"rope_theta \(None\)"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "llama3", "original_max_position_embeddings": 0, **LLAMA3}},
            r"rope_scaling\.original_max_position_embeddings \(0\)",
        ),
        ("llama", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor \(0\.5\)"),
        ("llama", {"hidden_act": "gelu"}, r"hidden_act \('gelu'\)"),
        ("mistral", {"attention_bias": True}, r"mistral: attention_bias \(True\)"),
        ("qwen3", {"attention_bias": "false"}, r"attention_bias \('false'\)"),
        ("llama", {"attention_dropout": 0.1}, r"attention_dropout \(0\.1\)"),
        ("llama", {"is_causal": False}, r"is_causal \(False\)"),
        ("llama", {"quantization_config": {"bits": 4}}, r"quantization_config \({'bits': 4}\)"),
        ("llama", {"sliding_window": 8}, r"sliding_window \(8\)"),
        ("mistral", {"use_sliding_window": False}, r"use_sliding_window \(False\)"),
        ("qwen2", {"sliding_window": "8", "use_sliding_window": True}, r"sliding_window \('8'\)"),
        ("mistral", {"layer_types": ["full_attention"] * 4}, r"layer_types .*sliding_window \(4096\)"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 4}, r"layer_types .*sliding_window \(None\)"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 4}, r"layer_types"),
        ("llama", {"logit_scale": 2.0, "residual_multiplier": 3}, r"logit_scale \(2\.0\), residual_multiplier \(3\)"),
        ("llama", {"auto_map": {"AutoModel": "own.Own"}}, r"auto_map"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, r"architectures \(\['LlamaForSeq"),
        ("gemma2", {}, r"model_type \('gemma2'\) must be one of llama, qwen2, qwen3, mistral"),
        ("llama", {"hidden_size": None}, r"missing: hidden_size"),
        ("llama", {"hidden_size": "128"}, r"hidden_size \('128'\)"),
        ("mistral", {"num_hidden_layers": 10**9}, r"num_hidden_layers \(1000000000\)"),
        ("llama", {"num_key_value_heads": 5}, r"num_kv_heads \(5\) must divide"),
        ("llama", {"begins_samples": True, "bos_token_id": 1}, r"bos_token_id \(1\) must be the last token"),
    ],
)
def test_what_would_change_the_numbers_is_named_with_its_value(tmp_path, family, fields, named):
    with pytest.raises(ValueError, match=rf"config\.json: .*{named}"):
        read(tmp_path, family, **fields)


def test_files_that_are_no_config(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no .*config\.json"):
        read_config(tmp_path)
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"other\.json is not a config\.json of a model: it holds no JSON object"):
        read_config(tmp_path / "other.json")


def test_fields_that_change_nothing_are_read_over(tmp_path):
    others = {
        "torch_dtype": "bfloat16",
        "use_cache": False,
        "eos_token_id": [1, 2],
        "unk_token_id": 3,
        "_model_name_or_path": "tiny",
        "rope_interleaved": False,
        "temperature": 1,
    }
    assert read(tmp_path, **others, logit_scale=None) == read(tmp_path)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"rotary_base": 5e5, "num_kv_heads": 1, "tied": True, "begins_samples": True}),
        ("llama", {"qkv_bias": True, "out_bias": True, "norm_epsilon": 1e-5}),
        ("llama", {"rotary_scaling": SCALING}),
        ("qwen2", {"qkv_bias": True, "windows": (0, 0, 5)}),
        ("qwen2", {"qkv_bias": True}),
        ("qwen3", {"qk_norm": True, "windows": (5, 0, 5), "head_size": 8}),
        ("qwen3", {"qk_norm": True, "qkv_bias": True, "out_bias": True}),
        ("mistral", {"windows": (5, 5, 5)}),
        ("mistral", {"num_heads": 3, "head_size": 8}),
    ],
)
def test_there_and_back(tmp_path, family, settings):
    sizes = {"num_layers": 3, "width": 32, "mlp_width": 40, "num_kv_heads": 2, "head_size": 16, "begins_samples": False}
    if "num_heads" in settings:
        sizes["num_kv_heads"] = 3
    config = DecoderConfig(**sizes | settings)
    fields = hugging_face_fields(config, "float32")
    assert fields["model_type"] == family
    assert fields["bos_token_id"] == (256 if config.begins_samples else None)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert read_config(tmp_path) == config


@pytest.mark.parametrize(
    ("given", "settings", "written"),
    [
        ("mistral", {}, "mistral"),
        ("llama", {}, "llama"),
        ("qwen2", {}, "llama"),
        (["gemma"], {}, "llama"),
        ("llama", {"windows": (5, 5)}, "mistral"),
        ("mistral", {"qk_norm": True}, "qwen3"),
    ],
)
def test_the_model_type_stays_if_it_has_such_a_decoder(tmp_path, given, settings, written):
    config = DecoderConfig(width=32, mlp_width=40, num_kv_heads=2, head_size=16, begins_samples=False, **settings)
    fields = hugging_face_fields(config, "float32", given)
    assert fields["model_type"] == written
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert read_config(tmp_path) == config


@pytest.mark.parametrize(
    "settings",
    [
        {"windows": (5, 0)},
        {"windows": (5, 6), "qkv_bias": True},
        {"windows": (5, 5), "qkv_bias": True, "out_bias": True},
        {"out_bias": True},
        {"qk_norm": True, "qkv_bias": True},
    ],
)
def test_a_decoder_without_a_model_type_is_not_written(settings):
    with pytest.raises(ValueError, match=r"no model type of Hugging Face .*qkv_bias (True|False), out_bias .*windows"):
        hugging_face_fields(DecoderConfig(**settings), "float32")
