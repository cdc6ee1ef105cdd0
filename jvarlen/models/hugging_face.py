"""The decoder's parameters in the files of Hugging Face: safetensors in and out, by the names of its model types.

References: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.files import check_new_directory, read_object
from jvarlen.models.adapter_config import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    adapter_fields,
    base_of,
    is_adapter,
)
from jvarlen.models.config import DecoderConfig
from jvarlen.models.decoder import param_shapes
from jvarlen.models.hugging_face_config import KEPT_FIELDS, hugging_face_fields, read_config
from jvarlen.models.tensor_files import check_types, map_file, map_tensors, write_directory
from jvarlen.models.tensor_names import EMBEDDING, HEAD, tensor_name
from jvarlen.training.trainable import names_of, take_params

__all__ = ["files_beside", "from_hugging_face", "hugging_face_tensors", "params_from_tensors", "to_hugging_face"]

# Beside the weights: the tokenizer, and how it and the model are used.
_COPIED = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "added_tokens.json",
    "tokenizer.model", "vocab.json", "merges.txt", "generation_config.json",
)  # fmt: skip
_OF_MODEL = ("config.json", "generation_config.json")
_ADAPTERS = (".lora_a", ".lora_b")
_TRANSPOSED = (".kernel", *_ADAPTERS)  # [inputs, outputs] here


def from_hugging_face(
    directory: str | os.PathLike[str],
    params: nnx.State | None = None,
    *,
    base_model: str | os.PathLike[str] | None = None,
    fresh: str | Sequence[str] = (),
    resized: str | Sequence[str] = (),
    progress: bool = True,
) -> tuple[DecoderConfig, nnx.State]:
    """A decoder and its parameters from a directory of Hugging Face.

    Args:
      directory: holds config.json, and model.safetensors or several shards with model.safetensors.index.json. Or LoRA
        adapters, as PEFT writes them: adapter_config.json and adapter_model.safetensors.
      params: the first parameters of a decoder that differs from this one, as in its vocabulary or its head, for
        `take_params`; None takes all parameters of this decoder.
      base_model: the directory of the model that adapters are for; None for the one that adapter_config.json names.
      fresh: as for `take_params`, by names of `init_params`; other tensors keep their names.
      resized: as for `take_params`.
      progress: as for `take_params`.

    Returns:
      The decoder of config.json, and parameters in the form of `init_params`: NumPy views of the mapped files, in their
      types, which are float32, bfloat16 or float16. Nothing of them is read before it is used; `TrainStep.init` reads
      the parts that it places. With adapters, the decoder has `lora`, and adapters are float32, as PEFT loads them.

    Raises:
      FileNotFoundError: there is no such directory, or no config.json in it; or adapters name a model that is not here.
      ValueError: a model or adapters that are not implemented (see `read_config`); weights or shards that are missing
        or damaged; tensors that are missing, unexpected, or of another shape or type; what `take_params` refuses. They
        are listed.

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
    config = read_config(directory, base_model=base_model)
    tensors = map_tensors(base_of(directory, base_model) if config.lora is not None else directory)
    if config.lora is not None:
        adapters = map_file(directory / ADAPTER_WEIGHTS)
        tensors |= {name: array.astype(np.float32) for name, array in adapters.items()}
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
      Those of adapters have the names of PEFT.

    Raises:
      ValueError: these are not the parameters of the decoder.
    """
    return _host_tensors(params, config)


def _host_tensors(
    params: nnx.State, config: DecoderConfig, endings: str | tuple[str, ...] = ""
) -> dict[str, np.ndarray]:
    """Those of parameters whose names end so, once all have the shapes of the decoder."""
    leaves = dict(zip(names_of(params), jax.tree.leaves(params), strict=True))
    _check_tensors({tensor_name(name): np.shape(leaf) for name, leaf in leaves.items()}, config, transposed=False)
    arrays = {name: np.asarray(leaf) for name, leaf in leaves.items() if name.endswith(endings)}
    return {tensor_name(name): array.T if name.endswith(_TRANSPOSED) else array for name, array in arrays.items()}


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
    _check_tensors({name: np.shape(array) for name, array in tensors.items()}, config, transposed=True)
    expected = param_shapes(config)
    arrays = _rename_tensors(tensors, expected)
    return jax.tree.unflatten(jax.tree.structure(expected), [arrays[name] for name in names_of(expected)])


def _without_leftovers(tensors: Mapping[str, np.ndarray], config: DecoderConfig) -> dict[str, np.ndarray]:
    tensors = {name: array for name, array in tensors.items() if not name.endswith(".rotary_emb.inv_freq")}
    if config.tied and HEAD in tensors:
        head = tensors.pop(HEAD)
        if not np.array_equal(head, tensors.setdefault(EMBEDDING, head)):
            raise UserError(
                f"{HEAD} and {EMBEDDING} differ, but tie_word_embeddings is true: with false, both are used"
            )
    return tensors


def _rename_tensors(tensors: Mapping[str, np.ndarray], params: nnx.State) -> dict[str, np.ndarray]:
    """Tensors by the names of their parameters, in the order of dimensions of these; others keep their names."""
    names = {tensor_name(name): name for name in names_of(params)}
    renamed = {names.get(name, name): array for name, array in tensors.items()}
    return {name: array.T if name.endswith(_TRANSPOSED) else array for name, array in renamed.items()}


def to_hugging_face(
    directory: str | os.PathLike[str],
    params: nnx.State,
    config: DecoderConfig,
    *,
    base_model: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    end_token: int | Sequence[int] | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a decoder as a directory that `transformers` opens. It appears when it is complete, or not at all.

    A decoder with `lora` is written as a directory of adapters that `peft` opens on top of their model.

    Args:
      directory: its parent must exist, and it must not, or be empty.
      params: the result of `init_params`, trained or not, or `gather_params` of a state. If several processes
        call it, the first writes.
      config: the decoder that they belong to.
      base_model: the directory of the model that adapters are for, or its name on the hub, for adapter_config.json; for
        adapters alone.
      tokenizer: a directory whose tokenizer, chat template and settings of generation are copied; its config.json, if
        it has one, gives fields besides the decoder's, such as `eos_token_id`, and the model type where several have
        such a decoder. Or a tokenizer file: the files beside it are copied as well.
      end_token: `eos_token_id` of config.json, which ends texts, or several; that of adapters is their model's.
      max_shard_bytes: weights above it are written in several files, with an index; adapters never.

    Raises:
      FileExistsError: something is there already.
      FileNotFoundError: there is no such parent or tokenizer.
      ValueError: these are not the parameters of the decoder, or no model type has such a decoder; adapters without
        `base_model`, or it without them.
    """
    if jax.process_index() > 0:
        return
    directory = Path(directory)
    check_new_directory(directory)
    if config.lora is not None and base_model is None:
        raise UserError(
            "this decoder has adapters, which are written alone: give base_model=, the directory of their model; or "
            "write a whole model, merge_lora(params, config)"
        )
    if config.lora is None and base_model is not None:
        raise UserError(f"base_model ({base_model}) is for adapters, and this decoder has none")
    tensors = _host_tensors(params, config, "" if base_model is None else _ADAPTERS)
    check_types(tensors)
    copied = files_beside(None if tokenizer is None else Path(tokenizer))
    if base_model is not None:
        copied.pop("config.json", None)
        texts = {ADAPTER_CONFIG: adapter_fields(config, base_model)}
        write_directory(directory, tensors, texts, copied, weights=ADAPTER_WEIGHTS)
        return
    dtype = jnp.result_type(*(array.dtype for array in tensors.values()))
    given = read_object(copied.pop("config.json")) if "config.json" in copied else {}
    fields = hugging_face_fields(config, dtype.name, given.get("model_type"))
    fields |= {name: given[name] for name in KEPT_FIELDS if name in given}
    if config.begins_samples:
        fields["bos_token_id"] = config.begin_token
    if end_token is not None:
        fields["eos_token_id"] = end_token if isinstance(end_token, int) else [*end_token]
    write_directory(directory, tensors, {"config.json": fields}, copied, max_shard_bytes=max_shard_bytes)


def files_beside(tokenizer: Path | None) -> dict[str, Path]:
    """The files that come with a tokenizer, by the names that they are copied to, and config.json."""
    if tokenizer is None:
        return {}
    if not tokenizer.exists():
        raise FileNotFoundError(f"there is no tokenizer {tokenizer}")
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    files = {name: folder / name for name in (*_COPIED, "config.json") if (folder / name).is_file()}
    if is_adapter(folder):
        with contextlib.suppress(FileNotFoundError):  # a model that is not here
            of_model = files_beside(base_of(folder))
            kept = _OF_MODEL if "tokenizer.json" in files else of_model  # parts of two tokenizers are none
            files = {name: path for name, path in of_model.items() if name in kept} | files
    return files if tokenizer.is_dir() else files | {"tokenizer.json": tokenizer}


def _check_tensors(shapes: Mapping[str, tuple[int, ...]], config: DecoderConfig, *, transposed: bool) -> None:
    """Raises ValueError unless tensors have the shapes of the decoder, whose products may be transposed."""
    expected, leaves = {}, param_shapes(config)
    for name, leaf in zip(names_of(leaves), jax.tree.leaves(leaves), strict=True):
        expected[tensor_name(name)] = leaf.shape[::-1] if transposed and name.endswith(_TRANSPOSED) else leaf.shape
    kinds = {
        "missing": [name for name in expected if name not in shapes],
        "unexpected": [name for name in shapes if name not in expected],
        "of another shape": [
            f"{name} {shapes[name]}, expected {shape}"
            for name, shape in expected.items()
            if name in shapes and shapes[name] != shape
        ],
    }
    if problems := [f"{kind}: {list_first(names)}" for kind, names in kinds.items() if names]:
        raise UserError(f"these are not the tensors of the decoder: {'; '.join(problems)}")
