"""Exported parameters: all tensors and what they are of, in one file that is there whole or not at all."""

import functools
import json
import sys

import numpy as np
import pytest

from jvarlen.models import DecoderConfig, flat_params, init_params, save_params

CONFIG = DecoderConfig(num_layers=1, width=16, compute_dtype="bfloat16", vocab_size=7)


@functools.cache
def initial_params():
    return init_params(CONFIG, seed=0)


def test_the_file_holds_all_parameters_and_the_settings_of_the_model(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    path = tmp_path / "model.safetensors"
    save_params(path, initial_params(), CONFIG, metadata={"tokenizer": "{}"})
    with safetensors.safe_open(path, "numpy") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    flat = flat_params(initial_params())
    assert tensors.keys() == flat.keys()
    for name, array in flat.items():
        np.testing.assert_array_equal(tensors[name], array, strict=True)
    assert metadata.keys() == {"format", "config", "tokenizer"}
    sizes = {"num_layers": 1, "width": 16, "vocab_size": 7, "num_heads": 2}
    assert json.loads(metadata["config"]) == sizes | {"compute_dtype": "bfloat16"}


def test_nothing_is_written_where_it_cannot_be(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    with pytest.raises(FileNotFoundError, match=r"there is no directory .*nowhere"):
        save_params(tmp_path / "nowhere" / "model.safetensors", initial_params(), CONFIG)
    for module in ("safetensors", "safetensors.numpy"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=r"only be written with safetensors: pip install 'jvarlen\[export\]'"):
        save_params(path, initial_params(), CONFIG)
    assert not list(tmp_path.iterdir())
