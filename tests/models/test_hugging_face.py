"""Directories of Hugging Face: what transformers writes is read, what is written transformers opens, bit for bit."""

import dataclasses
import functools
import json
import mmap
import struct
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvarlen.models import (
    DecoderConfig,
    from_hugging_face,
    hugging_face_tensors,
    init_params,
    params_from_tensors,
    read_config,
    to_hugging_face,
)

safetensors_numpy = pytest.importorskip("safetensors.numpy")

CONFIG = DecoderConfig(num_layers=2, width=16, num_heads=2, num_kv_heads=1, vocab_size=11, begins_samples=False)
TIED = DecoderConfig(num_layers=1, width=16, vocab_size=11, tied=True)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
FAMILIES = {
    "Llama": {"num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "Qwen2": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "Qwen3": {"num_key_value_heads": 4, "head_dim": 16, "max_window_layers": 1, "use_sliding_window": True},
    "Mistral": {"num_key_value_heads": 2, "head_dim": 10, "sliding_window": 4},
    "Mistral without window": {"num_key_value_heads": 2, "sliding_window": None},
}


@functools.cache
def initial_params(config=CONFIG):
    return init_params(config, seed=0)


@functools.cache
def tensors():
    return hugging_face_tensors(initial_params(), CONFIG)


@pytest.fixture
def directory(tmp_path):
    """A directory whose weights are a single file."""
    to_hugging_face(tmp_path / "model", initial_params(), CONFIG)
    return tmp_path / "model"


@pytest.fixture
def sharded(tmp_path):
    """A directory with several shards and their index."""
    to_hugging_face(tmp_path / "model", initial_params(), CONFIG, max_shard_bytes=4000)
    return tmp_path / "model"


def rewrite(directory, changed):
    whole = {name: np.ascontiguousarray(array) for name, array in changed.items()}
    safetensors_numpy.save_file(whole, directory / "model.safetensors", {"format": "pt"})


def assert_same_bytes(one, other):
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert array.dtype == other[name].dtype
        assert array.tobytes() == other[name].tobytes(), name


def opened(directory, dtype):
    transformers = pytest.importorskip("transformers")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(info.values())
    assert model.dtype == dtype
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_there_and_back_keeps_the_bytes_of_every_tensor(tmp_path, family, dtype):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    name = family.split()[0]
    config = getattr(transformers, f"{name}Config")(**SIZES, **FAMILIES[family])
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(getattr(torch, dtype)).eval()
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len([*(tmp_path / "theirs").glob("*.safetensors")]) > 1
    decoder, params = from_hugging_face(tmp_path / "theirs")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {dtype}
    to_hugging_face(tmp_path / "ours", params, decoder, tokenizer=tmp_path / "theirs")
    models = [opened(tmp_path / name, getattr(torch, dtype)) for name in ("theirs", "ours")]
    for again in models:
        assert type(again) is type(model)
        state, state_again = model.state_dict(), again.state_dict()
        assert state.keys() == state_again.keys()
        assert all(torch.equal(state[name], state_again[name]) for name in state)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(*(each(ids).logits for each in models))
    assert_same_bytes(
        *(hugging_face_tensors(from_hugging_face(tmp_path / name)[1], decoder) for name in ("theirs", "ours"))
    )


def test_parameters_are_views_of_the_mapped_file_in_the_form_of_init_params(directory):
    config, params = from_hugging_face(directory)
    assert config.kv_heads == 1
    assert jax.tree.structure(params) == jax.tree.structure(initial_params())
    jax.tree.map(np.testing.assert_array_equal, params, initial_params())
    for leaf in jax.tree.leaves(params):
        assert type(leaf) is np.ndarray
        assert not leaf.flags.writeable
        base = leaf
        while isinstance(base, np.ndarray):
            base = base.base
        assert isinstance(base.obj if isinstance(base, memoryview) else base, mmap.mmap)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="tells what of a mapped file is in memory")
def test_nothing_is_read_before_it_is_used(tmp_path):
    config = DecoderConfig(num_layers=1, width=256, vocab_size=4096)
    shapes = jax.eval_shape(lambda: init_params(config, 0))
    to_hugging_face(tmp_path / "model", jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), shapes), config)
    file = tmp_path / "model" / "model.safetensors"

    def bytes_in_memory():
        _, mapped = Path("/proc/self/smaps").read_text().split(f"{file}\n")
        return 1024 * int(mapped.split("Rss:")[1].split()[0])

    _, params = from_hugging_face(tmp_path / "model")
    assert bytes_in_memory() <= 2**18 < file.stat().st_size / 40  # the header, and what the system maps around it
    np.array(params["embed"]["embedding"][...])
    assert bytes_in_memory() >= 4 * 256 * 4096


def test_names_and_orientation_are_those_of_hugging_face():
    assert {name: array.shape for name, array in tensors().items() if ".1." not in name} == {
        "model.embed_tokens.weight": (11, 16),
        "model.layers.0.input_layernorm.weight": (16,),
        "model.layers.0.self_attn.q_proj.weight": (16, 16),
        "model.layers.0.self_attn.k_proj.weight": (8, 16),
        "model.layers.0.self_attn.v_proj.weight": (8, 16),
        "model.layers.0.self_attn.o_proj.weight": (16, 16),
        "model.layers.0.post_attention_layernorm.weight": (16,),
        "model.layers.0.mlp.gate_proj.weight": (48, 16),
        "model.layers.0.mlp.up_proj.weight": (48, 16),
        "model.layers.0.mlp.down_proj.weight": (16, 48),
        "model.norm.weight": (16,),
        "lm_head.weight": (11, 16),
    }
    kernel = initial_params()["layers"][1]["attention"]["q"]["kernel"][...]
    np.testing.assert_array_equal(tensors()["model.layers.1.self_attn.q_proj.weight"], np.asarray(kernel).T)


def test_tensors_that_are_not_those_of_the_decoder_are_listed(directory):
    changed = tensors() | {"model.layers.2.mlp.up_proj.weight": np.zeros(2, np.float32)}
    del changed["model.layers.0.self_attn.q_proj.weight"], changed["model.norm.weight"]
    changed["lm_head.weight"] = np.zeros((16, 11), np.float32)
    rewrite(directory, changed)
    with pytest.raises(
        ValueError,
        match=r"model: .*missing: model\.layers\.0\.self_attn\.q_proj\.weight, model\.norm\.weight; "
        r"unexpected: model\.layers\.2\.mlp\.up_proj\.weight; "
        r"of another shape: lm_head\.weight \(16, 11\), expected \(11, 16\)",
    ):
        from_hugging_face(directory)
    with pytest.raises(ValueError, match=r"unexpected: .*layers\.1\."):
        hugging_face_tensors(initial_params(), DecoderConfig(**vars(CONFIG) | {"num_layers": 1}))


def test_leftovers_of_older_files_are_ignored(directory):
    rewrite(directory, tensors() | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)})
    assert_same_bytes(hugging_face_tensors(from_hugging_face(directory)[1], CONFIG), tensors())


def test_the_head_of_a_tied_decoder_may_be_in_the_file(tmp_path):
    params = initial_params(TIED)
    to_hugging_face(tmp_path / "model", params, TIED)
    tied = hugging_face_tensors(params, TIED)
    assert HEAD not in tied
    head = np.array(tied[EMBEDDING])
    swapped = {HEAD if name == EMBEDDING else name: array for name, array in tied.items()}  # likewise in transformers
    for given in (tied | {HEAD: head}, swapped):
        rewrite(tmp_path / "model", given)
        assert_same_bytes(hugging_face_tensors(from_hugging_face(tmp_path / "model")[1], TIED), tied)
    head[-1, -1] += 1
    rewrite(tmp_path / "model", tied | {HEAD: head})
    with pytest.raises(ValueError, match=r"lm_head\.weight and model\.embed_tokens\.weight differ, but tie_word_emb"):
        from_hugging_face(tmp_path / "model")


def entry(start, stop, shape=(2, 3), dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("header", "num_bytes"),
    [
        ({"a": entry(0, 24)}, 20),  # truncated
        ({"a": entry(0, 24)}, 28),
        ({"a": entry(0, 24), "b": entry(0, 24)}, 24),  # overlapping
        ({"a": entry(0, 24), "b": entry(12, 36)}, 36),
        ({"a": entry(0, 24), "b": entry(28, 52)}, 52),  # a hole
        ({"a": entry(0, 24, (2, 4))}, 24),
        ({"a": entry(0, 24, (2**62, 2**62))}, 24),
        ({"a": entry(-24, 0)}, 24),
        ({"a": entry(24, 0)}, 24),
        ({"a": entry(2**40, 2**40 + 24)}, 24),
        ({"a": entry(0, 24, dtype="F31")}, 24),
        ({"a": {"dtype": "F32"}}, 24),
        ([], 0),
        (None, 0),
    ],
)
def test_headers_that_lie_are_refused_by_the_name_of_their_file(directory, header, num_bytes):
    text = b"\xff" if header is None else json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(num_bytes))
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged, or no safetensors file: "):
        from_hugging_face(directory)


@pytest.mark.parametrize("content", [b"", b"short", struct.pack("<Q", 2**63), b"version https://git-lfs.github.com"])
def test_files_without_a_header_are_refused(directory, content):
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged, or no safetensors file: "):
        from_hugging_face(directory)


def test_types_that_are_not_read_are_named(directory):
    rewrite(directory, tensors() | {EMBEDDING: np.zeros((11, 16), np.int8)})
    with pytest.raises(ValueError, match=r"types that are not read: model\.embed_tokens\.weight \(I8\)"):
        from_hugging_face(directory)


def test_weights_are_taken_for_another_vocabulary_and_another_head(directory):
    """Rows that both have; what is taken whole stays a view of the mapped file."""
    wider = dataclasses.replace(CONFIG, vocab_size=14)
    own = init_params(wider, seed=5)
    config, params = from_hugging_face(directory, own, fresh="head.*", resized="embed.*")
    assert config == from_hugging_face(directory)[0]
    given, embedding = initial_params(), params["embed"]["embedding"].get_value()
    np.testing.assert_array_equal(embedding[:11], given["embed"]["embedding"].get_value())
    np.testing.assert_array_equal(embedding[11:], own["embed"]["embedding"].get_value()[11:])
    np.testing.assert_array_equal(params["head"]["kernel"].get_value(), own["head"]["kernel"].get_value())
    query = params["layers"][1]["attention"]["q"]["kernel"].get_value()
    assert type(query) is np.ndarray
    assert not query.flags.writeable
    np.testing.assert_array_equal(query, given["layers"][1]["attention"]["q"]["kernel"].get_value())
    kernel = from_hugging_face(directory, own, resized=["embed.*", "head.*"])[1]["head"]["kernel"].get_value()
    np.testing.assert_array_equal(kernel[:, :11], given["head"]["kernel"].get_value())
    np.testing.assert_array_equal(kernel[:, 11:], own["head"]["kernel"].get_value()[:, 11:])

    rewrite(
        directory,
        {name: array for name, array in tensors().items() if name != HEAD} | {"score": np.ones(3, np.float32)},
    )
    with pytest.raises(ValueError, match=r"model: the given parameters are others than these: ") as refused:
        from_hugging_face(directory, own)
    for listed in (
        "embed.embedding float32[11,16], here float32[14,16]",
        "head.kernel absent, here float32[16,14]",
        "score float32[3], here absent",
    ):
        assert listed in str(refused.value)
    params = from_hugging_face(directory, own, fresh=["head.*", "score"], resized="embed.*")[1]
    np.testing.assert_array_equal(params["head"]["kernel"].get_value(), own["head"]["kernel"].get_value())


def test_missing_and_damaged_shards_are_all_named(sharded):
    shards = sorted(sharded.glob("*.safetensors"))
    assert len(shards) > 3
    assert_same_bytes(hugging_face_tensors(from_hugging_face(sharded)[1], CONFIG), tensors())
    shards[0].unlink()
    shards[1].write_bytes(shards[1].read_bytes()[:-1])
    shards[2].write_bytes(shards[3].read_bytes())
    with pytest.raises(
        ValueError,
        match=rf"there is no .*{shards[0].name}; .*{shards[1].name} is damaged.*; "
        rf".*{shards[2].name} does not hold what model\.safetensors\.index\.json says: model\.",
    ):
        from_hugging_face(sharded)


@pytest.mark.parametrize("file", ["../model-00001.safetensors", "/etc/passwd", 3, None])
def test_an_index_that_leads_elsewhere_is_refused(sharded, file):
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    assert content["metadata"]["total_size"] == sum(array.nbytes for array in tensors().values())
    index.write_text(json.dumps({"weight_map": None if file is None else content["weight_map"] | {HEAD: file}}))
    with pytest.raises(ValueError, match=r"index\.json is damaged: its weight_map must give the file of each tensor"):
        from_hugging_face(sharded)


def test_a_directory_without_weights_or_none_at_all(directory):
    (directory / "model.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"model holds no weights \(model\.safetensors, or .*\); its config\.json alone"
    ):
        from_hugging_face(directory)
    with pytest.raises(FileNotFoundError, match=r"there is no directory .*nowhere"):
        from_hugging_face(directory / "nowhere")


def test_the_demo_begins_samples_and_transformers_opens_it(tmp_path):
    torch = pytest.importorskip("torch")
    config = DecoderConfig(num_layers=1, width=16)
    to_hugging_face(tmp_path / "model", initial_params(config), config, end_token=10)
    assert read_config(tmp_path / "model").begin_token == 256
    theirs = opened(tmp_path / "model", torch.float32).config
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (256, 10, None)


def test_tokenizer_files_and_what_config_json_says_beside_the_decoder_come_along(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    copied = {name: name.encode() for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json")}
    for name, content in (copied | {"README.md": b"", "model.safetensors": b""}).items():
        (source / name).write_bytes(content)
    fields = {"eos_token_id": [3, 4], "bos_token_id": 2, "max_position_embeddings": 77, "hidden_size": 5}
    (source / "config.json").write_text(json.dumps(fields))
    for name, tokenizer in (("one", source), ("other", source / "tokenizer.json")):
        to_hugging_face(tmp_path / name, initial_params(), CONFIG, tokenizer=tokenizer)
        assert {path.name for path in (tmp_path / name).iterdir()} == {*copied, "config.json", "model.safetensors"}
        assert all((tmp_path / name / file).read_bytes() == content for file, content in copied.items())
        written = json.loads((tmp_path / name / "config.json").read_text())
        assert {field: written[field] for field in fields} == fields | {"hidden_size": 16}
    (tmp_path / "wiki.json").write_text("{}")
    to_hugging_face(tmp_path / "third", initial_params(), CONFIG, tokenizer=tmp_path / "wiki.json")
    assert (tmp_path / "third" / "tokenizer.json").read_text() == "{}"
    with pytest.raises(FileNotFoundError, match=r"there is no tokenizer .*nowhere"):
        to_hugging_face(tmp_path / "fourth", initial_params(), CONFIG, tokenizer=tmp_path / "nowhere")


def test_a_directory_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    target = tmp_path / "model"
    save_file = safetensors_numpy.save_file

    def fill_the_disk(given, path, metadata):
        assert not target.exists()
        save_file(given, path, metadata)
        if "00002" in path.name:
            raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(safetensors_numpy, "save_file", fill_the_disk)
        with pytest.raises(OSError, match="no space left"):
            to_hugging_face(target, initial_params(), CONFIG, max_shard_bytes=4000)
    assert not [*tmp_path.iterdir()]
    target.mkdir()
    to_hugging_face(target, initial_params(), CONFIG)
    before = (target / "model.safetensors").stat()
    with pytest.raises(FileExistsError, match=r"model is there already"):
        to_hugging_face(target, initial_params(), CONFIG)
    assert (target / "model.safetensors").stat() == before
    with pytest.raises(FileNotFoundError, match=r"there is no directory .*nowhere to write model to"):
        to_hugging_face(tmp_path / "nowhere" / "model", initial_params(), CONFIG)


def test_what_is_not_written(tmp_path, monkeypatch):
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), initial_params())
    with pytest.raises(
        ValueError, match=r"must be float32, bfloat16 or float16: model\.embed_tokens\.weight float64\["
    ):
        to_hugging_face(tmp_path / "model", wide, CONFIG)
    with monkeypatch.context() as patched:
        patched.setattr(jax, "process_index", lambda: 1)  # another process writes
        to_hugging_face(tmp_path / "model", initial_params(), CONFIG)
    for module in ("safetensors", "safetensors.numpy"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=r"weights need safetensors: pip install 'jvarlen\[hugging-face\]'"):
        to_hugging_face(tmp_path / "model", initial_params(), CONFIG)
    assert not [*tmp_path.iterdir()]


def test_parameters_of_several_types_are_written_as_they_are(tmp_path):
    mixed = {
        name: array if "norm" in name else array.astype(jnp.bfloat16 if "mlp" in name else np.float16)
        for name, array in tensors().items()
    }
    to_hugging_face(tmp_path / "model", params_from_tensors(mixed, CONFIG), CONFIG)
    assert_same_bytes(hugging_face_tensors(from_hugging_face(tmp_path / "model")[1], CONFIG), mixed)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["torch_dtype"] == "float32"
