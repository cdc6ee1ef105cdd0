"""The decoder's parameters in the files of Hugging Face: safetensors in and out, by the names of its model types.

References: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import math
import mmap
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.files import check_new_directory, move_into_place, read_object, regular_file
from jvarlen._common.pytree import describe
from jvarlen.models.config import DecoderConfig
from jvarlen.models.decoder import param_shapes
from jvarlen.models.hugging_face_config import KEPT_FIELDS, hugging_face_fields, read_config
from jvarlen.training.trainable import names_of, take_params

__all__ = ["files_beside", "from_hugging_face", "hugging_face_tensors", "params_from_tensors", "to_hugging_face"]

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
# Beside the weights: the tokenizer, and how it and the model are used.
_COPIED = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "added_tokens.json",
    "tokenizer.model", "vocab.json", "merges.txt", "generation_config.json",
)  # fmt: skip
_DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(jnp.bfloat16), "F16": np.dtype(np.float16)}
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_PARTS = {
    "embed": "embed_tokens", "attention_norm": "input_layernorm", "attention": "self_attn", "out": "o_proj",
    "mlp_norm": "post_attention_layernorm", **{name: f"{name}_proj" for name in ("q", "k", "v", "gate", "up", "down")},
    "head": "lm_head", "kernel": "weight", "scale": "weight", "embedding": "weight",
}  # fmt: skip


def from_hugging_face(
    directory: str | os.PathLike[str],
    params: nnx.State | None = None,
    *,
    fresh: str | Sequence[str] = (),
    resized: str | Sequence[str] = (),
    progress: bool = True,
) -> tuple[DecoderConfig, nnx.State]:
    """A decoder and its parameters from a directory of Hugging Face.

    Args:
      directory: holds config.json, and model.safetensors or several shards with model.safetensors.index.json.
      params: the first parameters of a decoder that differs from this one, as in its vocabulary or its head, for
        `take_params`; None takes all parameters of this decoder.
      fresh: as for `take_params`, by names of `init_params`; other tensors keep their names.
      resized: as for `take_params`.
      progress: as for `take_params`.

    Returns:
      The decoder of config.json, and parameters in the form of `init_params`: NumPy views of the mapped files, in their
      types, which are float32, bfloat16 or float16. Nothing of them is read before it is used; `TrainStep.init` reads
      the parts that it places.

    Raises:
      FileNotFoundError: there is no such directory, or no config.json in it.
      ValueError: a model that is not implemented (see `read_config`); weights or shards that are missing or damaged;
        tensors that are missing, unexpected, or of another shape or type; what `take_params` refuses. They are listed.

    Example:
      >>> import tempfile
      >>> from jvarlen.models import init_params
      >>> config = DecoderConfig(width=16)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     to_hugging_face(f"{folder}/model", init_params(config, 0), config)
      ...     config, params = from_hugging_face(f"{folder}/model")
      >>> config.width, params["layers"][0]["mlp"]["up"]["kernel"].shape
      (16, (16, 48))
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise FileNotFoundError(f"there is no directory {directory}")
    config = read_config(directory)
    tensors = _mapped_tensors(directory)
    try:
        if params is None:
            return config, params_from_tensors(tensors, config)
        given = _rename_tensors(_without_leftovers(tensors, config), params)
        return config, take_params(given, params, fresh=fresh, resized=resized, progress=progress)
    except UserError as error:
        error.args = (f"{directory}: {error}",)  # so that what can be done about it stays with it
        raise


def hugging_face_tensors(params: nnx.State, config: DecoderConfig) -> dict[str, np.ndarray]:
    """The parameters by their names at Hugging Face, to carry them into other libraries.

    Args:
      params: the result of `init_params`, trained or not, or of the same form, such as gradients.
      config: the decoder that they belong to.

    Returns:
      A dict from names such as `model.layers.0.self_attn.q_proj.weight` to host arrays; weights are [outputs, inputs].

    Raises:
      ValueError: these are not the parameters of the decoder.
    """
    tensors = {}
    for name, leaf in zip(names_of(params), jax.tree.leaves(params), strict=True):
        array = np.asarray(leaf)
        tensors[_tensor_name(name)] = array.T if name.endswith(".kernel") else array
    _check_tensors(tensors, config)
    return tensors


def params_from_tensors(tensors: Mapping[str, np.ndarray], config: DecoderConfig) -> nnx.State:
    """The parameters of a decoder from arrays by their names at Hugging Face; the inverse of `hugging_face_tensors`.

    Args:
      tensors: arrays by name; weights are [outputs, inputs]. Leftovers of older files (`rotary_emb.inv_freq`) are
        ignored, and so is the head of a tied decoder if it equals the embedding.
      config: the decoder that they belong to.

    Returns:
      A pytree as `init_params` returns it, of views of these arrays.

    Raises:
      ValueError: tensors are missing, unexpected, or of another shape or type. All kinds are listed.
    """
    tensors = _without_leftovers(tensors, config)
    _check_tensors(tensors, config)
    expected = param_shapes(config)
    arrays = _rename_tensors(tensors, expected)
    return jax.tree.unflatten(jax.tree.structure(expected), [arrays[name] for name in names_of(expected)])


def _without_leftovers(tensors: Mapping[str, np.ndarray], config: DecoderConfig) -> dict[str, np.ndarray]:
    tensors = {name: array for name, array in tensors.items() if not name.endswith(".rotary_emb.inv_freq")}
    if config.tied and _HEAD in tensors:
        head = tensors.pop(_HEAD)
        if not np.array_equal(head, tensors.setdefault(_EMBEDDING, head)):
            raise UserError(
                f"{_HEAD} and {_EMBEDDING} differ, but tie_word_embeddings is true: with false, both are used"
            )
    return tensors


def _rename_tensors(tensors: Mapping[str, np.ndarray], params: nnx.State) -> dict[str, np.ndarray]:
    """Tensors by the names of their parameters, in the order of dimensions of these; others keep their names."""
    names = {_tensor_name(name): name for name in names_of(params)}
    renamed = {names.get(name, name): array for name, array in tensors.items()}
    return {name: array.T if name.endswith(".kernel") else array for name, array in renamed.items()}


def to_hugging_face(
    directory: str | os.PathLike[str],
    params: nnx.State,
    config: DecoderConfig,
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    end_token: int | Sequence[int] | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a decoder as a directory that `transformers` opens. It appears when it is complete, or not at all.

    Args:
      directory: its parent must exist, and it must not, or be empty.
      params: the result of `init_params`, trained or not, or `gather_params` of a state. If several processes
        call it, the first writes.
      config: the decoder that they belong to.
      tokenizer: a directory whose tokenizer, chat template and settings of generation are copied; its config.json, if
        it has one, gives fields besides the decoder's, such as `eos_token_id`, and the model type where several have
        such a decoder. Or a tokenizer file: the files beside it are copied as well.
      end_token: `eos_token_id` of config.json, which ends texts, or several.
      max_shard_bytes: weights above it are written in several files, with an index.

    Raises:
      FileExistsError: something is there already.
      FileNotFoundError: there is no such parent or tokenizer.
      ValueError: these are not the parameters of the decoder, or no model type has such a decoder.
    """
    if jax.process_index() > 0:
        return
    directory = Path(directory)
    check_new_directory(directory)
    save_file = _safetensors().numpy.save_file
    tensors = hugging_face_tensors(params, config)
    if wrong := [f"{name} {describe(array)}" for name, array in tensors.items() if array.dtype not in _DTYPES.values()]:
        raise UserError(f"parameters must be float32, bfloat16 or float16: {list_first(wrong)}")
    dtype = jnp.result_type(*(array.dtype for array in tensors.values()))
    copied = files_beside(None if tokenizer is None else Path(tokenizer))
    given = read_object(copied.pop("config.json")) if "config.json" in copied else {}
    fields = hugging_face_fields(config, dtype.name, given.get("model_type"))
    fields |= {name: given[name] for name in KEPT_FIELDS if name in given}
    if config.begins_samples:
        fields["bos_token_id"] = config.begin_token
    if end_token is not None:
        fields["eos_token_id"] = end_token if isinstance(end_token, int) else [*end_token]
    shards = _shards(tensors, max_shard_bytes)
    part = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}.part")
    part.mkdir()
    try:
        for file, names in shards.items():
            # transformers 4 reads files of this format alone.
            save_file({name: np.ascontiguousarray(tensors[name]) for name in names}, part / file, {"format": "pt"})
        texts = {"config.json": fields}
        if len(shards) > 1:
            weight_map = {name: file for file, names in shards.items() for name in names}
            num_bytes = sum(array.nbytes for array in tensors.values())
            texts[_INDEX] = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        for file, content in texts.items():
            (part / file).write_text(json.dumps(content, indent=2) + "\n")
        for file, source in copied.items():
            shutil.copyfile(source, part / file)
        for path in part.iterdir():
            with path.open("rb") as written:
                os.fsync(written.fileno())
        move_into_place(part, directory)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _shards(tensors: Mapping[str, np.ndarray], max_bytes: int) -> dict[str, list[str]]:
    """The names of the tensors of each file, in order."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, array in tensors.items():
        if shards[-1] and size + array.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += array.nbytes
    if len(shards) == 1:
        return {_WEIGHTS: shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": names for i, names in enumerate(shards, 1)}


def files_beside(tokenizer: Path | None) -> dict[str, Path]:
    """The files that come with a tokenizer, by the names that they are copied to, and config.json."""
    if tokenizer is None:
        return {}
    if not tokenizer.exists():
        raise FileNotFoundError(f"there is no tokenizer {tokenizer}")
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    files = {name: folder / name for name in (*_COPIED, "config.json") if (folder / name).is_file()}
    return files if tokenizer.is_dir() else files | {"tokenizer.json": tokenizer}


def _mapped_tensors(directory: Path) -> dict[str, np.ndarray]:
    """All tensors of a directory, as views of its mapped files."""
    shards: Mapping[str, set[str] | None] = {_WEIGHTS: None}
    if not (directory / _WEIGHTS).exists():
        if not (directory / _INDEX).exists():
            raise UserError(
                f"{directory} holds no weights ({_WEIGHTS}, or {_INDEX} and its shards); its config.json alone gives "
                "the model with random ones"
            )
        shards = _read_index(directory / _INDEX)
    tensors: dict[str, np.ndarray] = {}
    problems = []
    for file, names in shards.items():
        try:
            mapped = _map_file(directory / file)
        except UserError as error:
            problems.append(str(error))
        else:
            if differing := set() if names is None else names ^ {*mapped}:
                problems.append(f"{directory / file} does not hold what {_INDEX} says: {list_first(sorted(differing))}")
            tensors |= mapped
    if problems:
        raise UserError(list_first(problems, "; "))
    return tensors


def _read_index(path: Path) -> dict[str, set[str]]:
    """The names of the tensors of each shard."""
    weight_map = read_object(path).get("weight_map")
    shards: dict[str, set[str]] = {}
    for name, file in weight_map.items() if isinstance(weight_map, dict) else [("", None)]:
        if not isinstance(file, str) or Path(file).name != file:
            raise UserError(f"{path} is damaged: its weight_map must give the file of each tensor, not {file!r}")
        shards.setdefault(file, set()).add(name)
    return shards


def _map_file(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file, as views of the mapped file; ValueError by its path if it is damaged."""
    safetensors = _safetensors()
    if not regular_file(path).is_file():
        raise UserError(f"there is no {path}")
    try:
        # Checks that tensors lie one after the other and fill the file, in the sizes of their shapes.
        with safetensors.safe_open(path, "numpy") as file:
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            parts = {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}
    except safetensors.SafetensorError as error:
        raise UserError(f"{path} is damaged, or no safetensors file: {error}") from None
    if wrong := [f"{name} ({dtype})" for name, (dtype, _) in parts.items() if dtype not in _DTYPES]:
        raise UserError(f"{path} holds tensors of types that are not read: {list_first(wrong)}")
    with path.open("rb") as opened:
        content = np.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    tensors, start = {}, 8 + int.from_bytes(content[:8].tobytes(), "little")
    for name, (dtype, shape) in parts.items():
        stop = start + math.prod(shape) * _DTYPES[dtype].itemsize
        tensors[name], start = content[start:stop].view(_DTYPES[dtype]).reshape(shape), stop
    return tensors


def _safetensors() -> Any:
    try:
        import safetensors.numpy  # here: an extra
    except ModuleNotFoundError:
        raise UserError("weights need safetensors: pip install 'jvarlen[hugging-face]'") from None
    return safetensors


def _tensor_name(parameter: str) -> str:
    """The name at Hugging Face of a parameter such as `layers.0.attention.q.kernel`."""
    name = ".".join(_PARTS.get(part, part) for part in parameter.split("."))
    return name if name == _HEAD else f"model.{name}"


def _check_tensors(tensors: Mapping[str, Any], config: DecoderConfig) -> None:
    expected = {}
    shapes = param_shapes(config)
    for name, leaf in zip(names_of(shapes), jax.tree.leaves(shapes), strict=True):
        expected[_tensor_name(name)] = leaf.shape[::-1] if name.endswith(".kernel") else leaf.shape
    kinds = {
        "missing": [name for name in expected if name not in tensors],
        "unexpected": [name for name in tensors if name not in expected],
        "of another shape": [
            f"{name} {np.shape(tensors[name])}, expected {shape}"
            for name, shape in expected.items()
            if name in tensors and np.shape(tensors[name]) != shape
        ],
    }
    if problems := [f"{kind}: {list_first(names)}" for kind, names in kinds.items() if names]:
        raise UserError(f"these are not the tensors of the decoder: {'; '.join(problems)}")
