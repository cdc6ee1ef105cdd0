"""The best layouts of a search, compiled: their figures take the place of estimates and decide."""

import dataclasses
import json

import jax
import numpy as np
import optax
import pytest

import jvarlen
from jvarlen import Bucket, UserError, models
from jvarlen.cli import main
from jvarlen.estimates.choice import choose_layout
from jvarlen.estimates.cluster import Cluster
from jvarlen.models import DecoderConfig
from jvarlen.targets import Target, compile_finalists
from jvarlen.targets.compile_for import compile_for

MODEL = DecoderConfig(num_layers=2, width=32, num_heads=2, vocab_size=64)
STEP = models.layered(MODEL), optax.adamw(1e-3)
LENGTHS = np.random.default_rng(0).integers(1, 33, 64)
PLAN = jvarlen.make_plan(LENGTHS, [Bucket(2, 32)], order="length", num_microbatches=8)
PARAMS = jax.eval_shape(lambda: models.init_params(MODEL, seed=0))
CLUSTER = Cluster.named("dgx-h100")


def search(fixed):
    return choose_layout(*STEP, PLAN, cluster=CLUSTER, params=PARAMS, fixed={"stage": 1, "context": 1} | fixed)


def compiled(choice, target="here"):
    return compile_finalists(choice, *STEP, PLAN, target=target, params=PARAMS, progress=False)


def test_compiled_figures_decide_and_are_those_of_the_programs():
    before = search({"tensor": 1, "remat": "none"})
    assert before.candidates.num_fitting == 4
    after = compiled(before)
    table = after.candidates
    assert sorted(map(str, table.layouts())) == sorted(map(str, before.candidates.layouts()))
    assert after.layout == table.layouts(1)[0]
    assert (after.seconds, after.num_bytes) == (table.seconds[0], table.num_bytes[0])
    assert np.isfinite(table.exposed_s).tolist() == [True] * 3 + [False]
    assert {*map(str, table.layouts(3))} == {*map(str, before.candidates.layouts(3))}
    assert (np.diff(table.seconds[:3]) >= 0).all()
    assert table.seconds[3] == before.candidates.seconds[3]
    target = dataclasses.replace(Target.parse("here"), cluster=CLUSTER)
    (row,) = compile_for(*STEP, PLAN, layout=after.layout, params=PARAMS, target=target, progress=False)
    assert after.seconds == pytest.approx(PLAN.num_steps * row.seconds)
    assert table.exposed_s[0] == pytest.approx(PLAN.num_steps * row.exposed_s)
    assert after.num_bytes == row.total_bytes
    lines = str(after).splitlines()
    assert [line.split()[-1] for line in lines[:5]] == ["figures", "compiled", "compiled", "compiled", "estimated"]
    assert f"communication {row.exposed_s / row.seconds:.0%}" in lines[1]
    assert f"{after.layout}: {after.seconds:,.4g} s an epoch (compiled" in lines[-1]


def test_compiled_layouts_that_do_not_fit_are_rejected():
    before = search({"tensor": 1, "zero": 0})
    assert [str(layout) for layout in before.candidates.layouts()] == [
        f"data8{word}" for word in ("", ".remat_selective", ".remat_full")
    ]
    least, middle, most = sorted(map(bytes_of, before.candidates.layouts()))
    assert least < middle < most
    after = compiled(before._replace(memory_bytes=most - 1))
    assert after.candidates.reasons == ("", "", "too large")
    assert [*sorted(after.candidates.num_bytes[:2]), after.candidates.num_bytes[2]] == [least, middle, most]
    with pytest.raises(ValueError, match=f"none of the 3 compiled layouts fits into {least - 9:,} bytes .* needs 9 "):
        compiled(before._replace(memory_bytes=least - 9))
    with pytest.raises(UserError, match="target here has 4 devices, and the cluster dgx-h100 8"):
        compiled(before, dataclasses.replace(Target.parse("here"), devices=tuple(jax.devices()[:4])))


def bytes_of(layout):
    (row,) = compile_for(*STEP, PLAN, layout=layout, params=PARAMS, target="here", progress=False)
    return row.total_bytes


def test_the_plan_command_compiles_what_it_chooses_from(tmp_path, capsys):
    np.save(tmp_path / "lengths.npy", LENGTHS)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 64, **sizes}))
    args = ["plan", str(tmp_path / "lengths.npy"), "--model", str(tmp_path / "config.json"), "--max-tokens", "64"]
    args += ["--num-microbatches", "8", "--max-shapes", "1", "--cluster", "dgx-h100", "--parallel", "data8.zero3"]
    assert main([*args, "--target", "here", "--no-progress"]) == 0
    assert "data8.zero3: " in (told := capsys.readouterr().out)
    assert " s an epoch (compiled" in told
