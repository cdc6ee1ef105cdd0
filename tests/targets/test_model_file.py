"""Models as JSON files."""

import json

import jax
import pytest

from jvarlen.targets.model_file import ModelFile

SMALL = {"layers": 2, "width": 64, "heads": 4, "vocabulary": 256}


def saved(tmp_path, fields):
    path = tmp_path / "model.json"
    path.write_text(json.dumps(fields))
    return path


def test_a_file_is_a_model_with_its_state(tmp_path):
    model = ModelFile.load(saved(tmp_path, SMALL | {"params_dtype": "bfloat16", "optimizer": "lion"}))
    assert model.num_params == sum(leaf.size for leaf in jax.tree.leaves(model.params))
    state = jax.eval_shape(model.make_optimizer().init, model.params)
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert model.num_params * 6 <= num_bytes <= model.num_params * 8 + 100  # a master, and a momentum
    assert model.model.by_positions


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": 3}, "unknown keys: depth"),
        ({"layers": 0}, "layers"),
        ({"width": -8}, "width"),
        ({"heads": 3}, "multiple of 2 "),
        ({"optimizer": "adagrad"}, "optimizer"),
        ({"width": "64"}, "width"),
    ],
)
def test_what_is_no_model_is_refused(change, message, tmp_path):
    path = saved(tmp_path, SMALL | change)
    with pytest.raises(ValueError, match=message) as error:
        ModelFile.load(path)
    assert str(path) in str(error.value)
    with pytest.raises(FileNotFoundError, match="there is no model"):
        ModelFile.load(tmp_path / "none.json")
