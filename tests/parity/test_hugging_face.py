"""Models of Hugging Face in torch_ref, against `transformers` and against jvarlen; others are refused."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
import torch

import torch_ref
from jvarlen import no_recompiles
from jvarlen.inference import generate
from jvarlen.models import DecoderConfig, init_params
from jvarlen.models.config import RotaryScaling
from jvarlen.models.hugging_face import hugging_face_tensors, to_hugging_face
from jvarlen.models.hugging_face_config import read_config

from .twin import to_torch_config

safetensors_torch = pytest.importorskip("safetensors.torch")

COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# By name: the class of transformers, what is particular, and the fields of the decoder that it makes another than the
# demo's.
FAMILIES = {
    "llama 3": ("Llama", {"head_dim": 16, "rms_norm_eps": 1e-5, "rope_parameters": LLAMA_3}, {"head_size": 16}),
    "llama": (
        "Llama",
        {"attention_bias": True, "tie_word_embeddings": True},
        {"qkv_bias": True, "out_bias": True, "tied": True},
    ),
    "qwen 2.5": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        {"qkv_bias": True, "out_bias": False, "windows": (0, 4, 4)},
    ),
    "qwen 3": ("Qwen3", {"head_dim": 24, "tie_word_embeddings": True}, {"qk_norm": True, "head_size": 24}),
    "mistral": ("Mistral", {"sliding_window": 5}, {"windows": (5, 5, 5)}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_logits_are_those_of_transformers(family, tmp_path):
    """From its own checkpoint, in one file or in shards, with parameters large enough that attention decides."""
    transformers = pytest.importorskip("transformers")
    name, particular, settings = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**COMMON | particular)
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for weight in theirs.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB" if family == "qwen 3" else "5GB")
    assert len(list(tmp_path.glob("*.safetensors"))) == (10 if family == "qwen 3" else 1)
    ours = torch_ref.load_model(tmp_path)
    assert {name: getattr(ours.config, name) for name in settings} == settings
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 97, (2, 23)))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)


def fields_of(family, **changes):
    fields = COMMON | {"model_type": family} | changes
    return {name: value for name, value in fields.items() if value is not ...}


OLD_SCALED = {name: value for name, value in LLAMA_3.items() if name != "rope_theta"}
SCALED_FROM_ALL = {name: value for name, value in LLAMA_3.items() if name != "original_max_position_embeddings"}


@pytest.mark.parametrize(
    "fields",
    [
        fields_of("llama", num_key_value_heads=...),
        fields_of(
            "llama", num_key_value_heads=None, head_dim=None, rope_theta=5e5, rope_scaling=None, pretraining_tp=1
        ),
        fields_of(
            "llama", rope_theta=5e5, rope_scaling=OLD_SCALED, mlp_bias=False, attention_bias=True, torch_dtype="x"
        ),
        fields_of("llama", rope_parameters=SCALED_FROM_ALL, layer_types=["full_attention"] * 3),
        fields_of(
            "mistral", num_attention_heads=16, num_key_value_heads=..., sliding_window=..., attention_dropout=0.0
        ),
        fields_of("mistral", sliding_window=None, head_dim=6, eos_token_id=[1, 2]),
        fields_of("qwen2", num_attention_heads=32, hidden_size=64, num_key_value_heads=..., use_sliding_window=False),
        fields_of("qwen2", use_sliding_window=True, max_window_layers=2),
        fields_of(
            "qwen2", use_sliding_window=True, layer_types=["full_attention", "sliding_attention", "full_attention"]
        ),
        fields_of("qwen3", head_dim=..., attention_bias=True, sliding_window=7),
        fields_of("qwen3", rope_parameters={"rope_theta": 1e6, "partial_rotary_factor": 1.0}, tie_word_embeddings=True),
        fields_of("llama", begins_samples=True, bos_token_id=96),
        fields_of("llama", hidden_act="swish", attn_implementation="sdpa", _anything=1, unk_token_id=3, top_k=50),
        fields_of("llama", architectures=["LlamaForCausalLM"], is_causal=True, use_sliding_window=None, mlp_bias=0),
        fields_of("llama", rope_parameters=LLAMA_3, original_max_position_embeddings=10),
        fields_of("llama", rope_scaling=LLAMA_3 | {"original_max_position_embeddings": None}),
        fields_of("llama", rope_scaling={}, rope_parameters=LLAMA_3),
        fields_of("llama", rope_scaling={"rope_type": "default", "type": "linear"}, partial_rotary_factor=1.0),
        fields_of("qwen2", attention_bias=True, use_sliding_window=True, layer_types=["sliding_attention"] * 3),
        fields_of("qwen2", attention_bias=None, pruned_heads={}, logit_scale=None),
        fields_of("qwen3", use_sliding_window=True, max_window_layers=0, sliding_window=None),
        fields_of("mistral", attention_bias=None, use_sliding_window=True, layer_types=["sliding_attention"] * 3),
    ],
    ids=lambda fields: " ".join(f"{name}={value}" for name, value in fields.items() if name not in COMMON),
)
def test_both_packages_read_the_same_fields(fields, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert torch_ref.read_config(tmp_path) == to_torch_config(read_config(tmp_path))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (fields_of("gemma"), "model_type"),
        (fields_of("llama", hidden_size=..., vocab_size=...), "vocab_size"),
        (fields_of("llama", hidden_act="gelu"), "hidden_act"),
        (fields_of("llama", mlp_bias=True), "mlp_bias"),
        (fields_of("llama", sliding_window=5), "sliding_window"),
        (fields_of("llama", attention_dropout=0.1), "attention_dropout"),
        (fields_of("llama", quantization_config={"bits": 4}), "quantization_config"),
        (fields_of("llama", rope_scaling={"type": "linear", "factor": 2.0}), "linear"),
        (fields_of("llama", rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}), "partial_rotary"),
        (fields_of("llama", rope_parameters=LLAMA_3 | {"mscale": 2}), "mscale"),
        (fields_of("llama", layer_types=["sliding_attention"] * 3), "layer_types"),
        (fields_of("qwen2", use_sliding_window=True, layer_types=["chunked_attention"] * 3), "layer_types"),
        (fields_of("llama", num_key_value_heads=3), "num_kv_heads"),
        (fields_of("llama", begins_samples=True, bos_token_id=1), "bos_token_id"),
        (fields_of("llama", tie_word_embeddings="false"), "tie_word_embeddings"),
        (fields_of("qwen2", is_causal=False), "is_causal"),
        (fields_of("llama", is_causal=None), "is_causal"),
        (fields_of("llama", logit_scale=0), "logit_scale"),
        (fields_of("llama", pretraining_tp=2), "pretraining_tp"),
        (fields_of("llama", use_sliding_window=True), "use_sliding_window"),
        (fields_of("mistral", use_sliding_window=False), "use_sliding_window"),
        (fields_of("qwen2", use_sliding_window=None), "use_sliding_window"),
        (fields_of("qwen2", attention_bias=False), "attention_bias"),
        (fields_of("qwen3", max_window_layers=None), "max_window_layers"),
        (fields_of("qwen2", sliding_window=0), "sliding_window"),
        (fields_of("mistral", sliding_window="8"), "sliding_window"),
        (fields_of("llama", architectures=["LlamaForSequenceClassification"]), "architectures"),
        (fields_of("llama", architectures=[]), "architectures"),
        (fields_of("llama", intermediate_size=None), "intermediate_size"),
        (fields_of("llama", hidden_size="32"), "hidden_size"),
        (fields_of("llama", num_hidden_layers=2**16), "num_hidden_layers"),
        (fields_of("llama", max_position_embeddings=None), "max_position_embeddings"),
        *(
            (fields_of("llama", **{name: value}), name)
            for name in ("rope_scaling", "rope_parameters")
            for value in ("linear", 0, False, "", [])
        ),
        *(
            (fields_of("llama", rope_scaling=LLAMA_3 | {name: value}), name)
            for name in ("original_max_position_embeddings", "rope_theta")
            for value in (0, False, "", -1)
        ),
        (fields_of("llama", rope_scaling=LLAMA_3, original_max_position_embeddings=0), "original_max_position"),
        (fields_of("llama", rope_scaling=LLAMA_3, original_max_position_embeddings=False), "original_max_position"),
        (fields_of("llama", original_max_position_embeddings=0), "original_max_position"),
        (fields_of("llama", rope_theta=None), "rope_theta"),
        (fields_of("llama", rms_norm_eps=None), "rms_norm_eps"),
        (fields_of("qwen3", layer_types=[]), "layer_types"),
        (fields_of("qwen3", layer_types=3), "layer_types"),
        (fields_of("qwen3", layer_types=["sliding_attention"] * 3), "layer_types"),
        ([1], "config.json"),
    ],
    ids=str,
)
def test_both_packages_refuse_the_same_configs_by_the_field(fields, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    for read in (read_config, torch_ref.read_config):
        with pytest.raises(ValueError, match=message) as raised:
            read(tmp_path)
        assert str(tmp_path / "config.json") in str(raised.value)


# Larger than at the start of a training, so that what is attended to decides.
CONFIG = DecoderConfig(num_layers=2, width=32, num_heads=4, num_kv_heads=2, vocab_size=300, qk_norm=True)


@functools.cache
def initial_params(config=CONFIG):
    with jax.enable_x64(False):
        return jax.tree.map(lambda leaf: leaf * 3, init_params(config, seed=1))


@pytest.fixture
def directory(tmp_path):
    to_hugging_face(tmp_path / "model", initial_params(), CONFIG, max_shard_bytes=50_000)
    return tmp_path / "model"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jvarlen_writes_what_torch_reads(dtype, tmp_path):
    """Every tensor, bit for bit, in torch's default type, and the config."""
    scaling = RotaryScaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=16)
    config = dataclasses.replace(CONFIG, qk_norm=False, tied=True, rotary_scaling=scaling)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), initial_params(config))
    to_hugging_face(tmp_path / "model", params, config)
    model = torch_ref.load_model(tmp_path / "model")
    assert model.config == dataclasses.replace(to_torch_config(config), mlp_width=96, head_size=8)
    expected = hugging_face_tensors(params, config)
    assert dict(model.named_parameters()).keys() == expected.keys()
    for name, weight in model.named_parameters():
        assert weight.dtype == torch.float32
        np.testing.assert_array_equal(weight.detach().numpy(), expected[name].astype(np.float32), err_msg=name)


def test_greedy_tokens_of_a_hundred_prompts_are_the_same_and_only_buckets_are_compiled(directory):
    assert len(list(directory.glob("*.safetensors"))) > 1
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 299, length) for length in rng.integers(0, 50, 100)]
    with no_recompiles("count") as count:
        tokens = generate(
            initial_params(), CONFIG, prompts, max_new_tokens=8, max_tokens=2048, max_shapes=2, progress=False
        )
    assert count.functions == ["generate_step"] * 2
    model = torch_ref.load_model(directory)
    expected = torch_ref.generate(model, prompts, 8)
    assert [new.tolist() for new in tokens] == [new.tolist() for new in expected]
    assert len(set(np.concatenate(tokens).tolist())) > 50, "too few tokens to compare"

    end_token = int(expected[0][3])
    with_end = torch_ref.generate(model, prompts[:20], 8, end_token=end_token)
    cut = [new[: np.flatnonzero(new == end_token)[:1].sum() + 1] if end_token in new else new for new in expected[:20]]
    assert [new.tolist() for new in with_end] == [new.tolist() for new in cut]


def tensors_of(path):
    return safetensors_torch.load_file(path)


@pytest.fixture
def tied(tmp_path):
    config = dataclasses.replace(CONFIG, qk_norm=False, tied=True)
    to_hugging_face(tmp_path / "model", initial_params(config), config)
    return tmp_path / "model"


def test_a_tied_head_may_be_in_the_file_and_old_leftovers_too(tied):
    """As older versions of transformers wrote them."""
    tensors = tensors_of(tied / "model.safetensors")
    expected = torch_ref.load_model(tied).state_dict()
    extras = {
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    safetensors_torch.save_file(tensors | extras, tied / "model.safetensors")
    torch.testing.assert_close(torch_ref.load_model(tied).state_dict(), expected, rtol=0, atol=0)
    head_only = {name: tensor for name, tensor in (tensors | extras).items() if name != "model.embed_tokens.weight"}
    safetensors_torch.save_file(head_only, tied / "model.safetensors")
    torch.testing.assert_close(torch_ref.load_model(tied).state_dict(), expected, rtol=0, atol=0)
    extras["lm_head.weight"][3, 3] += 1
    safetensors_torch.save_file(tensors | extras, tied / "model.safetensors")
    with pytest.raises(ValueError, match=r"by tie_word_embeddings lm_head\.weight is the embedding, but they differ"):
        torch_ref.load_model(tied)


def test_damaged_directories_are_refused_with_the_names_of_what_is_wrong(tied):
    with pytest.raises(FileNotFoundError, match=r"there is no .*nothing"):
        torch_ref.load_model(tied / "nothing")
    tensors = tensors_of(tied / "model.safetensors")
    norm, embedding = tensors.pop("model.norm.weight"), tensors["model.embed_tokens.weight"]
    tensors |= {"model.embed_tokens.weight": embedding[1:].clone(), "model.bias": norm}
    safetensors_torch.save_file(tensors, tied / "model.safetensors")
    wrong = r"missing: model\.norm\.weight; unexpected: model\.bias; model\.embed_tokens\.weight: shape \(299, 32\)"
    with pytest.raises(ValueError, match=wrong):
        torch_ref.load_model(tied)
    (tied / "model.safetensors").write_bytes(b"no safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors is no readable safetensors file"):
        torch_ref.load_model(tied)


def test_damaged_shards_are_refused_by_their_names(directory):
    first, second, *_ = sorted(directory.glob("*.safetensors"))
    tensors = tensors_of(first)
    lost = sorted(tensors)[0]
    safetensors_torch.save_file({name: value for name, value in tensors.items() if name != lost}, first)
    with pytest.raises(ValueError, match=rf"{first.name} does not hold what .* says: {lost}"):
        torch_ref.load_model(directory)
    second.unlink()
    with pytest.raises(FileNotFoundError, match=f"there is no .*{second.name}"):
        torch_ref.load_model(directory)
    index = directory / "model.safetensors.index.json"
    index.write_text("[]")
    with pytest.raises(ValueError, match=r"index\.json is no index of safetensors files"):
        torch_ref.load_model(directory)
    index.unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no .*model\.safetensors"):
        torch_ref.load_model(directory)
