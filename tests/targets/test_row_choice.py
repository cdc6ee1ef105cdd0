"""The most rows that fit: of the bytes of compiled programs, here, elsewhere, and of made-up ones."""

import dataclasses
import functools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jvarlen
from jvarlen import Budget, UserError, compile_for, make_plan, models
from jvarlen.cli import main
from jvarlen.compiling.lowering import CompileClock
from jvarlen.models import DecoderConfig
from jvarlen.planning.buckets import Bucket
from jvarlen.targets import row_choice
from jvarlen.targets.compiled_bytes import CompiledBytes
from jvarlen.targets.report import TargetRow
from jvarlen.targets.row_choice import choose_rows
from jvarlen.targets.target import Target
from tests.targets.test_compile_for import OF_GPUS, target_of

LENGTHS = np.minimum(np.exp(np.random.default_rng(0).normal(3, 0.8, 3000)).astype(int) + 1, 200)
NO_LIMIT = 2**40  # of tokens
HERE = Target("some", (), None, is_here=True)


def loss_fn(params, batch):
    x = params[batch.tokens]
    attention = jax.nn.softmax(jnp.einsum("btd,bsd->bts", x, x))
    return jnp.sum(jnp.sin(jnp.einsum("bts,bsd->btd", attention, x) @ params.T)), jnp.sum(batch.weights)


@pytest.mark.parametrize(
    ("packing", "multiple", "max_bytes"), [("padded", 1, 3e6), ("best_fit", 2, 4e6)], ids=["padded", "packed"]
)
def test_every_bucket_fits_and_one_step_more_would_not(packing, multiple, max_bytes):
    make = functools.partial(make_plan, LENGTHS, packing=packing)
    budget = Budget(
        max_tokens=NO_LIMIT, max_shapes=3, num_microbatches=2, row_multiple=multiple, length_multiple=8,
        cost=lambda rows, length: 1.0 * rows * length,
    )  # fmt: skip
    target = dataclasses.replace(target_of(2), memory_bytes=int(max_bytes))
    how = {"params": jnp.zeros((64, 16)), "progress": False}
    chosen = choose_rows(loss_fn, optax.sgd(0.1), make, budget=budget, target=target, **how)
    of_run = {row.bucket: row for row in compile_for(loss_fn, optax.sgd(0.1), chosen.plan, target=target, **how)}
    assert of_run.keys() == {row.bucket for row in chosen.report} == {each.bucket for each in chosen.rows}
    for each in chosen.rows:
        assert each.num_bytes == of_run[each.bucket].total_bytes <= max_bytes
        assert each.num_programs <= 3
        assert each.bucket.rows <= each.most_rows
    of_memory = [each for each in chosen.rows if each.limit == "memory"]
    assert of_memory
    assert all(each.limit == "samples" for each in chosen.rows if each not in of_memory)
    more = [Bucket(each.most_rows + multiple, each.bucket.length) for each in of_memory]
    as_large = [next((large for large in more if large.length == b.length), b) for b in chosen.plan.buckets.shapes]
    larger = dataclasses.replace(chosen.plan, buckets=as_large)
    assert [
        row.fits for row in compile_for(loss_fn, optax.sgd(0.1), larger, target=target, **how) if row.bucket in more
    ] == [False] * len(more)
    assert make(chosen.plan.buckets).digest == chosen.plan.digest
    assert all(row.fits for row in compile_for(loss_fn, optax.sgd(0.1), chosen.token_plan, target=target, **how))
    assert chosen.token_plan.digest == make(chosen.token_budget).digest
    lines = str(chosen).splitlines()
    assert lines[1].split() == ["bucket", "most", "rows", "limit", "GB", "of", "the", "limit", "programs"]
    assert lines[2].split()[0] == str(chosen.rows[0].bucket)
    assert f"{chosen.token_budget.max_tokens:,}" in lines[-1]


def made_up_compiler(num_bytes):
    """In place of `compile_programs`, programs of bytes by a function; what does not fit is refused, as for TPUs."""

    def compile_bucket(bucket, target):
        total = math.ceil(num_bytes(*bucket))
        told = {} if total > target.memory_bytes else {"argument_bytes": min(total, 1000), "output_bytes": 0}
        sizes = {"total_bytes": total, "limit_bytes": target.memory_bytes}
        return TargetRow(bucket=bucket, lower_s=0.0, compile_s=0.0, flops=None, **sizes, **told)

    return lambda compiler, keys, target: [compile_bucket(key, target) for key in keys]


def by_tokens(rows, length):
    return 1e7 + rows * length * 4e3


@pytest.fixture
def made_up(monkeypatch):
    """The choice by bytes that a function tells, without a compiler."""

    def choose(num_bytes, make, budget, max_bytes, target=HERE):
        @dataclasses.dataclass
        class Compiler:
            shapes: object
            clock = CompileClock()
            state_spec = jax.ShapeDtypeStruct((1000,), "int8")
            halves, once_a_step = None, ()

            def passes(self, bucket):
                return (bucket,)

        monkeypatch.setattr(row_choice, "compile_programs", made_up_compiler(num_bytes))
        monkeypatch.setattr(row_choice.TargetStep, "compiler", lambda *_: Compiler(SimpleNamespace(layout=None)))
        monkeypatch.setattr(row_choice, "layout_of", lambda compiler: "data")
        how = {"params": None, "max_bytes": max_bytes, "progress": False}
        return choose_rows(loss_fn, optax.sgd(0.1), make, budget=budget, target=target, **how)

    return choose


@pytest.mark.parametrize(("platform", "share"), [("gpu", 0.9), ("tpu", 1)])
def test_programs_have_nine_tenths_of_a_gpu_and_all_of_a_tpu(made_up, platform, share):
    target = Target("some", (SimpleNamespace(platform=platform),), 10_000, is_here=False)
    budget = Budget(max_tokens=NO_LIMIT, max_shapes=1)
    chosen = made_up(lambda rows, length: 1000 + 100 * rows, lambda of: make_plan([8] * 500, of), budget, None, target)
    assert [each.most_rows for each in chosen.rows] == [(share * 10_000 - 1000) // 100]
    assert chosen.budget.max_bytes == share * 10_000


@pytest.mark.parametrize("packing", ["padded", "best_fit", "wrapped"])
@pytest.mark.parametrize("multiple", [1, 8])
def test_rows_are_found_where_bytes_have_a_floor_and_fall_once(made_up, packing, multiple):
    def num_bytes(rows, length):
        tokens = rows * length
        return max(2e7, 1e7 + tokens * (900 + length) * (0.85 if tokens > 2**14 else 1))

    many = np.tile(LENGTHS, 8)
    cost = (lambda rows, length: 1.0 * rows * length) if packing == "best_fit" else None
    shape = {"max_shapes": 3, "row_multiple": multiple, "length_multiple": 8, "max_length": 200}
    budget = Budget(max_tokens=NO_LIMIT, num_microbatches=2, cost=cost, **shape)
    chosen = made_up(num_bytes, functools.partial(make_plan, many, packing=packing), budget, 3.2e7)
    limits = {each.limit for each in chosen.rows}
    assert "memory" in limits
    for each in chosen.rows:
        assert num_bytes(*each.bucket) <= 3.2e7
        assert each.num_programs <= 3
        if each.limit == "memory":
            assert num_bytes(each.most_rows, each.bucket.length) <= 3.2e7
            assert num_bytes(each.most_rows + multiple, each.bucket.length) > 3.2e7
    assert all(num_bytes(*bucket) <= 3.2e7 for bucket in chosen.token_plan.buckets.shapes)


def test_the_limit_that_set_the_rows_is_named(made_up):
    make = functools.partial(make_plan, LENGTHS)
    limits = {"max_tokens": 2400, "max_sequences": 60, "strategy": (24, 48, 96, 200)}
    chosen = made_up(lambda rows, length: 1000 + rows * length**1.5, make, Budget(**limits), 20_000)
    assert [each.limit for each in chosen.rows] == ["sequences", "tokens", "memory", "memory"]
    lines = chosen.plan.report(budget=chosen.budget).splitlines()
    assert [line.split()[-1] for line in lines[:5]] == ["limit", *(each.limit for each in chosen.rows)]
    few = made_up(
        lambda rows, length: 1000 + rows * length, functools.partial(make_plan, [3, 9]), Budget(max_tokens=99), 2000
    )
    assert [each.limit for each in few.rows] == ["samples", "samples"]


def test_lengths_that_do_not_fit_are_listed(made_up):
    make, budget = functools.partial(make_plan, [3, 64, 4, 64]), Budget(max_tokens=NO_LIMIT)
    with pytest.raises(UserError, match=r"max_bytes 1000 \(one row needs 6400\).*bucket of 64 .*id 1: 64, id 3: 64$"):
        made_up(lambda rows, length: 100 * rows * length, make, budget, 1000)
    with pytest.raises(UserError, match=r"memory of target 'here' is unknown: max_bytes"):
        choose_rows(loss_fn, optax.sgd(0.1), make, budget=budget, target="here", params=jnp.zeros((64, 16)))
    with pytest.raises(UserError, match="memory= of the budget"):
        made_up(None, make, dataclasses.replace(budget, memory=lambda rows, length: rows), 1000)
    with pytest.raises(UserError, match="these have two"):
        made_up(None, functools.partial(make_plan, [[3, 4]]), budget, 1000)


def limit_memory(monkeypatch, num_bytes):
    """Devices of the target "here", whose memory is unknown, that hold so many bytes."""
    parse = Target.parse
    monkeypatch.setattr(Target, "parse", lambda text: dataclasses.replace(parse(text), memory_bytes=num_bytes))


CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("packing", ["padded", "best_fit"])
def test_the_plan_command_chooses_rows_and_draws_them(monkeypatch, tmp_path, capsys, packing):
    limit_memory(monkeypatch, 14_000_000)
    monkeypatch.setattr(
        row_choice, "compile_programs", made_up_compiler(lambda rows, length: 1e7 + 4e3 * rows * length)
    )
    np.save(tmp_path / "lengths.npy", LENGTHS)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    data, model = str(tmp_path / "lengths.npy"), ["--model", str(tmp_path / "config.json")]
    plan, page = str(tmp_path / "plan.npz"), tmp_path / "page.html"
    how = ["--target", "here", "--parallel", "tensor2", "--max-shapes", "2"]
    assert main(["plan", data, *model, *how, "--packing", packing, "--out", plan, "--html", str(page)]) == 0
    told, progress = capsys.readouterr()
    saved = jvarlen.Plan.load(plan)
    assert f"rows that fit on here, by at most {3 * len(saved.buckets.shapes)} programs: " in progress
    assert {4} == {saved.num_microbatches}
    tokens = [bucket.padded_tokens for bucket in saved.buckets.shapes]
    assert 800 <= max(tokens) <= 1000
    assert "data4.tensor2 on here, 0.014 GB a device. All figures come from compilers, not from devices." in told
    lines = told.splitlines()
    num_shapes = len(saved.buckets.shapes)
    assert [line.split()[-1] for line in lines[: num_shapes + 1]] == ["limit", *["memory"] * num_shapes]
    assert all(f"max_tokens {number:,}" not in told for number in (4096, 2**40))
    assert f"digest {saved.digest}" in told
    assert all(text in page.read_text() for text in ("Memory of a step", "Rows by memory", "budget of tokens"))


@pytest.mark.parametrize(
    "given",
    [
        ["--packing", "best_fit", "--overlong", "split", "--max-length", "64"],
        ["--packing", "wrapped", "--max-length", "128", "--num-microbatches", "16", "--seed", "5"],
        ["--new-shape-every", "7", "--max-length", "8192", "--length-multiple", "16"],
        ["--order", "length", "--pacing", "linear", "--pacing-steps", "9", "--overlong", "drop", "--max-length", "40"],
    ],
    ids=["split", "wrapped", "padded", "paced"],
)
def test_the_printed_options_make_the_same_plan(monkeypatch, tmp_path, capsys, given):
    limit_memory(monkeypatch, 12_000_000)
    monkeypatch.setattr(
        row_choice, "compile_programs", made_up_compiler(lambda rows, length: 1e7 + 4e3 * rows * length)
    )
    monkeypatch.chdir(tmp_path)
    np.save("lengths.npy", LENGTHS[:600])
    Path("config.json").write_text(json.dumps(CONFIG))
    how = ["--model", "config.json", "--target", "here", "--max-shapes", "2"]
    assert main(["plan", "lengths.npy", *how, *given, "--no-progress"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    flags = last.removeprefix("to train in these buckets: ").split()
    assert main(["plan", "lengths.npy", *given, *flags, "--no-progress"]) == 0
    [digest] = [line for line in lines if line.startswith("digest")]
    assert digest in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "here"], "needs --model:"),
        (["--target", "here", "--model", "config.json", "--buckets", "2", "200"], "leave out --buckets"),
        (["--target", "here", "--model", "config.json", "--tokens-per-step", "9"], "leave out --tokens-per-step"),
        (["--target", "here", "--model", "config.json"], "one row needs"),
        (
            ["--target", "here", "--model", "config.json", "--parallel", "tensor8"],
            "does not divide the model's --decoder.num-heads (4), of a config.json num_attention_heads",
        ),
    ],
)
def test_wrong_options_of_rows_by_memory_are_refused(monkeypatch, tmp_path, capsys, arguments, message):
    limit_memory(monkeypatch, 5_000_000)
    monkeypatch.setattr(
        row_choice, "compile_programs", made_up_compiler(lambda rows, length: 1e7 + 4e3 * rows * length)
    )
    monkeypatch.chdir(tmp_path)
    np.save("lengths.npy", LENGTHS)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert main(["plan", "lengths.npy", *arguments, "--no-progress"]) == (1 if message == "one row needs" else 2)
    assert message in capsys.readouterr().err


@settings(deadline=None)
@given(
    st.dictionaries(
        st.builds(Bucket, st.integers(1, 300), st.sampled_from([8, 64, 72])), st.integers(1000, 10**9), min_size=1
    )
)
def test_bytes_are_those_of_programs_and_never_fall_as_rows_grow(compiled):
    memory = CompiledBytes(10**8)
    for bucket, num_bytes in compiled.items():
        memory.add(bucket, num_bytes, 1000)
    rows, length = np.arange(1, 400)[:, None], np.array([5, 8, 40, 64, 70, 72, 100])
    values = memory(rows, length)
    assert values.shape == (399, 7)
    assert (np.diff(values, axis=0) >= -1e-6 * values[:-1]).all()
    for bucket, num_bytes in compiled.items():
        of_more = [each for b, each in compiled.items() if b.length == bucket.length and b.rows > bucket.rows]
        assert memory(*bucket) == pytest.approx(min([num_bytes, *of_more]))


@OF_GPUS
@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("layout", ["data8.zero3", "data2.tensor4"])
def test_rows_for_gpus_fit_and_one_more_does_not(layout):
    config = DecoderConfig(num_layers=2, width=256, num_heads=4, vocab_size=2048, compute_dtype="bfloat16")
    how = {"layout": layout, "params": jax.eval_shape(lambda: models.init_params(config, 0)), "progress": False}
    optimizer, max_bytes, M = optax.adamw(1e-3), 2e9, 8 if layout.startswith("data8") else 2
    budget = Budget(max_tokens=NO_LIMIT, max_shapes=2, num_microbatches=M, length_multiple=64)
    make = functools.partial(make_plan, np.tile([200, 250, 500, 512], 2000))
    chosen = choose_rows(
        models.layered(config), optimizer, make, budget=budget, target="8xh100", max_bytes=max_bytes, **how
    )
    assert [each.limit for each in chosen.rows] == ["memory", "memory"]
    as_large = [Bucket(each.most_rows + 1, each.bucket.length) for each in chosen.rows]
    for plan, fits in ((chosen.plan, True), (dataclasses.replace(chosen.plan, buckets=as_large), False)):
        for row in compile_for(models.layered(config), optimizer, plan, target="8xh100", **how):
            assert (row.total_bytes <= max_bytes) == fits
