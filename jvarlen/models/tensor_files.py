"""Tensors in the files of Hugging Face, safetensors, read as mapped files and written as whole directories.

References: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import math
import mmap
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.files import move_into_place, read_object, regular_file
from jvarlen._common.pytree import describe
from jvarlen._common.types import JsonObject

__all__ = ["check_types", "map_file", "map_tensors", "write_directory"]

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(jnp.bfloat16), "F16": np.dtype(np.float16)}


def map_tensors(directory: Path) -> dict[str, np.ndarray]:
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
            mapped = map_file(directory / file)
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


def map_file(path: Path) -> dict[str, np.ndarray]:
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


def check_types(tensors: Mapping[str, np.ndarray]) -> None:
    """Raises ValueError for tensors of types that are not written."""
    if wrong := [f"{name} {describe(array)}" for name, array in tensors.items() if array.dtype not in _DTYPES.values()]:
        raise UserError(f"parameters must be float32, bfloat16 or float16: {list_first(wrong)}")


def write_directory(
    directory: Path,
    tensors: Mapping[str, np.ndarray],
    texts: Mapping[str, JsonObject],
    copied: Mapping[str, Path],
    *,
    weights: str = _WEIGHTS,
    max_shard_bytes: float = math.inf,
) -> None:
    """Writes tensors, JSON files and copies into a directory, which appears when it is complete, or not at all."""
    save_file = _safetensors().numpy.save_file
    shards = _shards(tensors, weights, max_shard_bytes)
    if len(shards) > 1:
        weight_map = {name: file for file, names in shards.items() for name in names}
        num_bytes = sum(array.nbytes for array in tensors.values())
        texts = {**texts, _INDEX: {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}}
    part = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}.part")
    part.mkdir()
    try:
        for file, names in shards.items():
            # transformers 4 reads files of this format alone.
            save_file({name: np.ascontiguousarray(tensors[name]) for name in names}, part / file, {"format": "pt"})
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


def _shards(tensors: Mapping[str, np.ndarray], file: str, max_bytes: float) -> dict[str, list[str]]:
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
        return {file: shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": names for i, names in enumerate(shards, 1)}
