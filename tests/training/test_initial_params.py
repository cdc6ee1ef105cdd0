"""Parameters of another training are taken whole, all but some, or in part; every other difference is listed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvarlen
from jvarlen.training.checkpoint import Place, open_checkpoints, read_params
from jvarlen.training.train_state import new_state
from jvarlen.training.trainable import take_params
from tests.parallel.test_own_leaves import MODEL, NUM_VALUES, WIDTH, own_params

PLACE = Place(num_steps_done=1, epoch=0, step=1, plan_digest="")


def params_of(rows, width=3, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "embed": rng.normal(size=(rows, width)).astype(np.float32),
        "layers": [{"k": rng.normal(size=(width, width)).astype(np.float32)} for _ in range(2)],
        "head": {"kernel": rng.normal(size=(width, rows)).astype(np.float32)},
    }


def test_all_are_taken_in_the_types_of_the_parameters():
    given, own = params_of(5), jax.tree.map(jnp.bfloat16, params_of(5, seed=1))
    taken = take_params(given, own)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y.astype(jnp.bfloat16), strict=True), taken, given)
    by_name = {"embed": given["embed"], "head.kernel": given["head"]["kernel"]}
    by_name |= {f"layers.{i}.k": given["layers"][i]["k"] for i in range(2)}
    shapes = jax.eval_shape(lambda: jax.tree.map(jnp.bfloat16, given))
    for leaf, other in zip(jax.tree.leaves(take_params(by_name, shapes)), jax.tree.leaves(given), strict=True):
        assert leaf is other, "of shapes in their own types, without a copy"


@pytest.mark.parametrize(("there", "here"), [(5, 8), (8, 5)])
def test_rows_that_both_have_are_taken_and_a_head_is_not(there, here):
    given, own = params_of(there), params_of(here, seed=1)
    before = jax.tree.map(np.copy, own)
    taken = take_params(given, own, fresh="head.*", resized=["embed", "layers.0.k"])
    np.testing.assert_array_equal(taken["embed"], np.concatenate([given["embed"][:here], own["embed"][there:]]))
    np.testing.assert_array_equal(taken["layers"][0]["k"], given["layers"][0]["k"])
    np.testing.assert_array_equal(taken["head"]["kernel"], own["head"]["kernel"])
    also = take_params(given, own, resized="*")["head"]["kernel"]
    np.testing.assert_array_equal(
        also, np.concatenate([given["head"]["kernel"][:, :here], own["head"]["kernel"][:, there:]], axis=1)
    )
    jax.tree.map(np.testing.assert_array_equal, own, before)


def test_what_is_fresh_may_be_on_one_side_alone():
    given, own = params_of(5), params_of(5, seed=1)
    given["score"], own["value"] = given.pop("head"), own.pop("head")
    taken = take_params(given, own, fresh=["score.*", "value.kernel"])
    np.testing.assert_array_equal(taken["value"]["kernel"], own["value"]["kernel"])
    np.testing.assert_array_equal(taken["embed"], given["embed"])


def test_what_is_taken_kept_fresh_and_left_unused_is_told(capsys):
    given, own = params_of(5), params_of(8, seed=1)
    given["score"] = np.ones(3, np.float32)
    options = {"fresh": ["head.*", "score"], "resized": "embed"}
    take_params(given, own, **options)
    told = "parameters: 2 of 4 arrays are taken; in part: embed; fresh: head.kernel; unused: head.kernel, score\n"
    assert capsys.readouterr().err == told
    take_params(given, own, **options, progress=False)
    assert capsys.readouterr().err == ""
    take_params(own, own)
    assert capsys.readouterr().err == "parameters: 4 of 4 arrays are taken\n"


@pytest.mark.parametrize(
    ("given", "own"), [("float32", "int32"), ("int8", "float32"), ("float32", "bool"), ("complex64", "float32")]
)
def test_no_array_is_cast_to_another_kind_of_numbers(given, own):
    """Floats such as 0.7 would be 0 as integers, and floats do not stand for integers."""
    arrays, params = {"scale": np.full(3, 0.7).astype(given)}, {"scale": np.full(3, 5).astype(own)}
    longer, shapes = {"scale": np.full(4, 5).astype(own)}, {"scale": jax.ShapeDtypeStruct((3,), own)}
    for here, options in ((params, {}), (longer, {"resized": "scale"}), (shapes, {})):
        with pytest.raises(ValueError, match=rf"scale {given}\[3\], here {own}\[\d\]"):
            take_params(arrays, here, **options)
    assert take_params(arrays, params, fresh="scale")["scale"].dtype == own


@pytest.mark.parametrize("resized", [(), "a"])
@pytest.mark.parametrize(
    ("values", "own", "wrong"), [([2**40], "int32", 2**40), ([300, 1], "int8", 300), ([-1], "uint8", -1)]
)
def test_integers_that_do_not_fit_are_refused(values, own, wrong, resized):
    given, params = {"a": np.array(values)}, {"a": np.zeros(4 if resized else len(values), own)}
    with pytest.raises(ValueError, match=rf"a int64\[\d\] holds {wrong}, which does not fit {own}"):
        take_params(given, params, resized=resized)
    fitting = take_params({"a": np.full(len(values), 100)}, params, resized=resized)["a"]
    assert fitting[: len(values)].tolist() == [100] * len(values)


def test_a_shape_has_nothing_that_stays_of_a_resized_array():
    with pytest.raises(ValueError, match=r"embed float32\[5\], here float32\[8\]"):
        take_params({"embed": np.ones(5, np.float32)}, {"embed": jax.ShapeDtypeStruct((8,), np.float32)}, resized="*")


def test_all_differences_are_listed_with_their_shapes():
    given, own = params_of(5), params_of(8)
    given["norm"], own["layers"][1]["bias"] = np.ones(3, np.float32), np.ones(2, np.float32)
    with pytest.raises(ValueError, match="others than these") as refused:
        take_params(given, own, resized="head.*")
    for listed in (
        "embed float32[5,3], here float32[8,3]",
        "norm float32[3], here absent",
        "layers.1.bias absent, here float32[2]",
    ):
        assert listed in str(refused.value)
    assert "head" not in str(refused.value)
    with pytest.raises(ValueError, match=r"embed float32\[5,3\], here float32\[8,4\]"):  # of two dimensions
        take_params({"embed": given["embed"]}, {"embed": np.ones((8, 4), np.float32)}, resized="embed")
    with pytest.raises(ValueError, match=r"'heads\.\*' of fresh matches no parameter: they are named embed, head"):
        take_params(given, own, fresh=["norm", "heads.*"])


@pytest.mark.parametrize("text", ["data2.zero3", "data2.stage2.tensor2.zero1", None])
def test_a_checkpoint_of_one_layout_is_taken_in_part_on_another(tmp_path, text):
    """All but a scale, and a table with more rows; the optimizer begins anew."""
    layout = "data1.stage2.tensor2" if text != "data2.stage2.tensor2.zero1" else "data4.zero2"
    whole = jax.tree.map(lambda leaf: leaf.astype(np.float32) if leaf.dtype == np.float64 else leaf, own_params())
    train_step = jvarlen.make_train_step(MODEL, optax.adam(0.1), layout=layout)
    state = train_step.init(whole)
    form = train_step.portable_form(state, whole)
    with open_checkpoints(tmp_path, form=form) as checkpoints:
        checkpoints.save(state, PLACE)

    own = jax.tree.map(lambda leaf: np.full_like(leaf, 7), whole)
    own["table"] = np.full((NUM_VALUES + 4, WIDTH), 7, np.float32)
    optimizer = jvarlen.with_float32_master(optax.lion(0.1))
    step = jvarlen.make_train_step(MODEL, optimizer, layout=text)
    given, place = read_params(tmp_path)
    assert place == PLACE
    found = step.init(take_params(given, own, fresh="blocks.2.scale", resized="table"))
    expected = jax.tree.map(np.copy, whole)
    expected["blocks"][2]["scale"][:] = 7
    expected["table"] = np.concatenate([whole["table"], own["table"][NUM_VALUES:]])
    jax.tree.map(np.testing.assert_array_equal, step.gather_params(found), expected)
    assert jax.tree.structure(found.opt_state) == jax.tree.structure(step.init(own).opt_state)
    if text is None:
        alone = new_state(jax.tree.map(jnp.asarray, expected), optimizer)
        jax.tree.map(np.testing.assert_array_equal, found.opt_state, alone.opt_state)
