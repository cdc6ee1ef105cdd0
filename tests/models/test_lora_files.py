"""Directories of adapters: PEFT opens what is written, what PEFT writes is read, and other adapters are refused."""

import dataclasses
import functools
import json
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jvarlen import UserError
from jvarlen.models import (
    LoraConfig,
    add_lora,
    from_hugging_face,
    hugging_face_tensors,
    merge_lora,
    params_from_tensors,
    read_config,
    to_hugging_face,
)
from jvarlen.models.decoder import Rows, graphs_of
from jvarlen.training.trainable import names_of
from tests.models.test_families import FAMILIES, new_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors_numpy = pytest.importorskip("safetensors.numpy")

TOKENS = np.random.default_rng(0).integers(0, 67, (2, 12), dtype=np.int32)
ALL = ("layers.*.attention.*.kernel", "layers.*.mlp.*.kernel")
CASES = {"llama3": "layers.*.attention.[qv].kernel", "qwen2": ALL, "qwen3": ALL, "mistral": "layers.*.mlp.down.kernel"}
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@functools.cache
def peft():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("peft")


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """The directory of a model of each family, as transformers writes it."""
    folder = tmp_path_factory.mktemp("bases")
    for family in FAMILIES:
        new_model(family).save_pretrained(folder / family)
    return folder


def open_model(directory):
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def with_peft(base, adapters):
    with warnings.catch_warnings():  # of PEFT, about what transformers will rename
        warnings.simplefilter("ignore", FutureWarning)
        return peft().PeftModel.from_pretrained(open_model(base), str(adapters)).eval()


def their_logits(model):
    with torch.no_grad():
        return model(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()


def our_logits(config, params):
    rows = Rows(lengths=jnp.full(len(TOKENS), TOKENS.shape[1]))
    return np.asarray(nnx.merge(graphs_of(config)[0], jax.tree.map(jnp.asarray, params))(jnp.asarray(TOKENS), rows))


def assert_equal_logits(one, other):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def adapted(base, **lora):
    """A decoder with adapters in which every parameter matters."""
    config, params = from_hugging_face(base)
    config = dataclasses.replace(config, lora=LoraConfig(**lora))
    params = add_lora(params, config, seed=0)
    rng = np.random.default_rng(0)
    leaves = [
        rng.normal(0, 0.2, leaf.shape).astype(np.float32) if "lora" in name else leaf
        for name, leaf in zip(names_of(params), jax.tree.leaves(params), strict=True)
    ]
    return config, jax.tree.unflatten(jax.tree.structure(params), leaves)


@pytest.mark.parametrize("family", CASES)
def test_written_adapters_have_equal_logits_in_peft_and_so_has_the_merged_model(bases, tmp_path, family):
    base = bases / family
    config, params = adapted(base, rank=4, alpha=6, targets=CASES[family])
    to_hugging_face(tmp_path / "adapters", params, config, base_model=base)
    assert {path.name for path in (tmp_path / "adapters").iterdir()} == {
        *("adapter_config.json", "adapter_model.safetensors")
    }
    logits = our_logits(config, params)
    assert np.abs(logits - their_logits(open_model(base))).max() > 0.1
    assert_equal_logits(logits, their_logits(with_peft(base, tmp_path / "adapters")))
    again, params_again = from_hugging_face(tmp_path / "adapters")
    assert again.adapted == config.adapted
    assert dataclasses.replace(again.lora, targets=config.lora.targets) == config.lora
    for name, one, other in zip(names_of(params), *map(jax.tree.leaves, (params, params_again)), strict=True):
        np.testing.assert_array_equal(one, other, strict=True, err_msg=name)
    merged = merge_lora(params, config)
    to_hugging_face(tmp_path / "merged", merged, dataclasses.replace(config, lora=None), tokenizer=base)
    np.testing.assert_allclose(their_logits(open_model(tmp_path / "merged")), logits, rtol=1e-4, atol=1e-4)


def write_with_peft(base, directory, dtype=torch.float32, **fields):
    """Adapters in which every parameter matters, as PEFT writes them; their logits."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lora = peft().LoraConfig(**{"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM"} | fields)
        model = peft().get_peft_model(open_model(base), lora).eval()
        with torch.no_grad():
            for name, param in model.named_parameters():
                if "lora_" in name:
                    param.normal_(0, 0.2)
                    param.copy_(param.to(dtype))
                    param.data = param.to(dtype)
        model.save_pretrained(directory)
        for param in model.parameters():
            param.data = param.float()
    return their_logits(model)


@pytest.mark.parametrize(
    ("family", "dtype", "fields"),
    [
        ("llama3", torch.float32, {"target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1}),
        ("llama_tied", torch.bfloat16, {"target_modules": r".*\.layers\.\d+\.mlp\.(up|down)_proj"}),
        ("qwen2", torch.float16, {"target_modules": "all-linear", "init_lora_weights": "gaussian"}),
        ("qwen3", torch.float32, {"target_modules": ["self_attn.o_proj"], "lora_alpha": 2.5}),
    ],
)
def test_adapters_of_peft_are_read_with_equal_logits(bases, tmp_path, family, dtype, fields):
    logits = write_with_peft(bases / family, tmp_path / "adapters", dtype, **fields)
    config, params = from_hugging_face(tmp_path / "adapters")
    assert config.lora.rank == 4
    assert config.lora.alpha == fields.get("lora_alpha", 6)
    assert config.lora.dropout == fields.get("lora_dropout", 0)
    assert read_config(tmp_path / "adapters") == config
    assert_equal_logits(our_logits(config, params), logits)
    named = zip(names_of(params), jax.tree.leaves(params), strict=True)
    assert {leaf.dtype.name for name, leaf in named if "lora" in name} == {"float32"}
    tensors = hugging_face_tensors(params, config)
    saved = safetensors_numpy.load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert saved.keys() < tensors.keys()
    again = params_from_tensors(tensors, config)
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_the_model_of_adapters_is_the_given_one_or_the_one_that_they_name(bases, tmp_path):
    config, params = adapted(bases / "llama3", rank=2)
    to_hugging_face(tmp_path / "adapters", params, config, base_model="someone/llama", tokenizer=bases / "llama3")
    with pytest.raises(FileNotFoundError, match=r"adapters alone, and their model \('someone/llama'\) is no directory"):
        from_hugging_face(tmp_path / "adapters")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        from_hugging_face(tmp_path / "adapters", base_model=tmp_path / "nowhere")
    assert from_hugging_face(tmp_path / "adapters", base_model=bases / "llama3")[0].adapted == config.adapted
    with pytest.raises(FileNotFoundError, match="is no directory of one here"):  # and not in a circle
        from_hugging_face(tmp_path / "adapters", base_model=tmp_path / "adapters")
    with pytest.raises(UserError, match=r"are not the tensors of the decoder: of another shape"):
        from_hugging_face(tmp_path / "adapters", base_model=bases / "qwen3")
    with pytest.raises(UserError, match=r"base_model \(x\) is for adapters, and .*llama3 has no adapter_config\.json"):
        from_hugging_face(bases / "llama3", base_model="x")
    with pytest.raises(UserError, match=r"adapters, which are written alone: give base_model=.*merge_lora"):
        to_hugging_face(tmp_path / "other", params, config)
    with pytest.raises(UserError, match=r"base_model \(x\) is for adapters, and this decoder has none"):
        to_hugging_face(
            tmp_path / "other", merge_lora(params, config), dataclasses.replace(config, lora=None), base_model="x"
        )
    assert not (tmp_path / "other").exists()


OTHERS = {
    "peft_type": "IA3", "task_type": "SEQ_CLS", "bias": "all", "use_rslora": True, "use_dora": True, "lora_bias": True,
    "modules_to_save": ["lm_head"], "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 2},
    "layers_to_transform": [0], "layer_replication": [[0, 1]], "fan_in_fan_out": True, "init_lora_weights": "pissa",
    "trainable_token_indices": [1], "target_parameters": ["x"], "of_tomorrow": 1, "r": 0, "lora_alpha": "1",
    "lora_dropout": 1,
}  # fmt: skip


@pytest.fixture
def adapters(bases, tmp_path):
    config, params = adapted(bases / "llama3", rank=2)
    to_hugging_face(tmp_path / "adapters", params, config, base_model=bases / "llama3")
    return tmp_path / "adapters"


def change(adapters, tensors=None, **fields):
    path = adapters / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    weights = adapters / "adapter_model.safetensors"
    saved = {name: np.array(array) for name, array in safetensors_numpy.load_file(weights).items()}
    safetensors_numpy.save_file(saved if tensors is None else tensors(saved), weights)


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_field_is_refused_by_name(adapters, name):
    change(adapters, **{name: OTHERS[name]})
    shown = re.escape(f"{name} ({OTHERS[name]!r})")
    with pytest.raises(UserError, match=rf"adapter_config\.json: these adapters are not implemented, .*: {shown}$"):
        from_hugging_face(adapters)


def test_all_that_is_refused_is_listed_at_once(adapters):
    def with_others(saved):
        (first, array), *rest = saved.items()
        return {**dict(rest), first: array, "base_model.model.lm_head.lora_A.weight": array}

    change(adapters, with_others, use_dora=True, use_rslora=True, bias="all", target_modules=["q_proj"])
    with pytest.raises(UserError) as refused:
        from_hugging_face(adapters)
    for each in (
        "use_dora (True), use_rslora (True)", "bias ('all')", "the tensor base_model.model.lm_head.lora_A.weight",
        "tensors of model.layers.0.self_attn.v_proj, which is not in target_modules",
    ):  # fmt: skip
        assert each in str(refused.value)


def test_adapters_are_the_same_in_all_layers_and_whole(adapters, bases, tmp_path):
    def in_the_first_layer(saved):
        return {name: array for name, array in saved.items() if ".layers.0." in name or "q_proj" in name}

    def halves(saved):
        return {name: array for name, array in saved.items() if "lora_A" in name}

    change(adapters, in_the_first_layer)
    with pytest.raises(
        UserError, match=r"same products in all layers: adapters of self_attn\.v_proj in 1 of 2 layers$"
    ):
        from_hugging_face(adapters)
    write_with_peft(bases / "llama3", tmp_path / "first", target_modules=["q_proj"], layers_to_transform=[0])
    with pytest.raises(
        UserError, match=r"layers_to_transform \(\[0\]\), adapters of self_attn\.q_proj in 1 of 2 layers"
    ):
        from_hugging_face(tmp_path / "first")
    write_with_peft(bases / "llama3", tmp_path / "embeds", target_modules=["q_proj", "embed_tokens"])
    with pytest.raises(UserError, match=r"the tensor base_model\.model\.model\.embed_tokens\.lora_embedding_A"):
        from_hugging_face(tmp_path / "embeds")
    change(tmp_path / "first", lambda saved: {}, layers_to_transform=None)
    with pytest.raises(UserError, match="no adapters"):
        from_hugging_face(tmp_path / "first")
    config, params = adapted(bases / "llama3", rank=2)
    to_hugging_face(tmp_path / "halves", params, config, base_model=bases / "llama3")
    change(tmp_path / "halves", halves)
    with pytest.raises(UserError, match=r"missing: base_model\.model\.model\.layers\.0\.self_attn\.q_proj\.lora_B"):
        from_hugging_face(tmp_path / "halves")
