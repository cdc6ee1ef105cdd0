"""A step compiled for devices, here or elsewhere, without running anything, and its report."""

import dataclasses
import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas as pl
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from jvarlen import (
    Bucket,
    CompileOptions,
    Layout,
    UserError,
    compile_buckets,
    load,
    make_eval_step,
    make_plan,
    make_train_step,
    models,
)
from jvarlen.batches import BatchShapes
from jvarlen.batches.batches import token_batch_spec
from jvarlen.cli import main
from jvarlen.compiling.lowering import make_step_compiler
from jvarlen.distributed.placement import place
from jvarlen.estimates import estimate_communication
from jvarlen.estimates.cluster import PRESETS
from jvarlen.models import DecoderConfig
from jvarlen.targets.compile_for import compile_for, seconds_of_runs
from jvarlen.targets.report import TargetReport, TargetRow
from jvarlen.targets.target import Target

MODEL = DecoderConfig(num_layers=2, width=64, num_heads=4, vocab_size=300)
DEEP = dataclasses.replace(MODEL, num_layers=4)
OPTIMIZER = optax.adamw(1e-3)
BUCKETS = [(2, 32), (1, 64)]
OF_GPUS = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None, reason="XLA's compiler for GPUs is not installed"
)
HAS_CUDNN = importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.cudnn") is not None
OF_CUDNN = pytest.mark.skipif(not HAS_CUDNN, reason="cuDNN is not installed")
OF_TPUS = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="XLA's compiler for TPUs is not installed"
)


def report_of(target, layout, model=None, buckets=BUCKETS, config=MODEL, **how):
    layout = Layout.parse(layout)
    shapes = BatchShapes(buckets, num_microbatches=4 * layout.data, has_many_groups=False)
    how = {"params": jax.eval_shape(lambda: models.init_params(config, 0)), "progress": False} | how
    return compile_for(model or models.layered(config), OPTIMIZER, shapes, target=target, layout=layout, **how)


@pytest.mark.parametrize(("layout", "buckets"), [("data4.zero3", BUCKETS), ("data2.stage2.tensor2.zero1", BUCKETS[:1])])
def test_devices_that_are_here_get_the_programs_of_a_run(layout, buckets):
    report = report_of("here" if Layout.parse(layout).num_devices == 8 else target_of(4), layout, buckets=buckets)
    step = make_train_step(models.layered(MODEL), OPTIMIZER, layout=layout)
    state = step.init(models.init_params(MODEL, 0))
    shapes = BatchShapes(buckets, num_microbatches=4 * Layout.parse(layout).data, has_many_groups=False)
    compiled = compile_buckets(step, state, shapes, progress=False, options=CompileOptions(cache_dir=None))
    of_run = {row.bucket: row for row in compiled.report}
    assert [row.bucket for row in report] == list(of_run)
    for row in report:
        same = of_run[row.bucket]
        assert (row.argument_bytes, row.temp_bytes) == (same.argument_bytes, same.temp_bytes)
        assert row.output_bytes == same.output_bytes - same.alias_bytes
        assert row.total_bytes == same.total_bytes > 0
        assert row.communication == estimate_communication(compiled, row.bucket)
        assert row.fits is row.limit_bytes is None, "the memory of a CPU is unknown"
        assert row.seconds is row.exposed_s is None, "nor its rates"
    assert report.fits is None


def target_of(num_devices):
    """The first devices here."""
    return Target("some", tuple(jax.devices()[:num_devices]), None, is_here=True)


def test_steps_of_several_groups_are_accumulations_and_an_update():
    lengths = np.random.default_rng(0).integers(1, 65, 60)
    plan = make_plan(lengths, BUCKETS, num_microbatches=2, sequences_per_step=12)
    params = jax.eval_shape(lambda: models.init_params(MODEL, 0))
    how = {"params": params, "target": target_of(2), "layout": "data2", "progress": False}
    report = compile_for(models.layered(MODEL), OPTIMIZER, plan, **how)
    assert [(row.program, row.bucket) for row in report] == [
        ("accumulation", plan.buckets.shapes[0]),
        ("accumulation", plan.buckets.shapes[1]),
        ("update", None),
    ]
    *groups, update = report
    num_bytes = 4 * sum(leaf.size for leaf in jax.tree.leaves(params))
    for row in groups:
        assert row.argument_bytes > 4 * num_bytes, "parameters, two moments, and the sums of a device by itself"
        assert not row.communication, "sums are not reduced between groups"
        assert row.flops > 0
    assert update.argument_bytes > 4 * num_bytes
    assert update.output_bytes < num_bytes, "the state is donated"
    assert [row.kind for row in update.communication if row.num_bytes >= num_bytes] == ["all-reduce"]
    fullest = report.fullest
    assert fullest.total_bytes == max(row.total_bytes for row in report)
    assert fullest.program == "update" or f"a group of {fullest.bucket.rows}×{fullest.bucket.length}" in fullest.of_what
    one_each = dataclasses.replace(plan, step_groups=None)
    assert {row.program for row in compile_for(models.layered(MODEL), OPTIMIZER, one_each, **how)} == {"step"}


def test_seconds_of_steps_are_those_of_their_groups_and_updates():
    short, long, update = (
        TargetRow(
            bucket=bucket, program=program, lower_s=0, compile_s=0, flops=None, total_bytes=1, limit_bytes=1, seconds=s
        )
        for bucket, program, s in (
            (Bucket(2, 32), "accumulation", 3.0),
            (Bucket(1, 64), "accumulation", 5.0),
            (None, "update", 0.5),
        )
    )
    groups = {short.bucket: 7, long.bucket: 2}
    assert seconds_of_runs([short, long, update], groups, 4) == 7 * 3 + 2 * 5 + 4 * 0.5
    unknown = dataclasses.replace(long, seconds=None)
    assert seconds_of_runs([short, unknown, update], groups, 4) is None
    assert seconds_of_runs([short, unknown, update], groups | {long.bucket: 0}, 4) == 7 * 3 + 4 * 0.5
    report = TargetReport([short, long, update], "some", "data2", step_s=1.5)
    assert "a step of the plan: 1.5 s on average, an estimate" in str(report)
    assert json.loads(report.to_json())["step_s"] == 1.5


def test_memory_is_held_against_the_limit():
    report = report_of(dataclasses.replace(target_of(2), memory_bytes=10**9), "data2")
    assert [row.limit_bytes for row in report] == [10**9] * 2
    most = max(row.total_bytes for row in report)
    for limit in (most - 1, most):
        limited = TargetReport([dataclasses.replace(row, limit_bytes=limit) for row in report], "", "")
        assert [row.fits for row in limited] == [row.total_bytes <= limit for row in report]
        assert limited.fits == (limit == most)


def test_operations_are_those_of_all_turns_of_loops_on_one_device():
    def loss_fn(params, batch):
        def body(x, _):
            return x @ params, None

        x, _ = jax.lax.scan(body, jnp.ones((8, 16)), length=5)
        return jnp.sum(x) * jnp.sum(batch.weights), jnp.float32(1)

    [row] = report_of(target_of(2), "data2", loss_fn, [(1, 8)], params=jnp.zeros((16, 16)))
    forward = 4 * 5 * 2 * 8 * 16 * 16  # four microbatches on a device
    assert row.flops == 3 * forward

    def turns_by_values(params, batch):
        def turn(carried):
            return carried[0] + 1, carried[1] @ jax.lax.stop_gradient(params)

        _, x = jax.lax.while_loop(lambda carried: carried[0] < jnp.sum(batch.weights), turn, (0, jnp.ones((8, 16))))
        return jnp.sum(x) + jnp.sum(params), jnp.float32(1)

    [row] = report_of(target_of(2), "data2", turns_by_values, [(1, 8)], params=jnp.zeros((16, 16)))
    assert row.flops is None

    def by_kernel(params, batch):
        multiply = pl.pallas_call(
            lambda x, y, z: z.__setitem__(..., x[...] @ y[...]),
            out_shape=jax.ShapeDtypeStruct((64, 16), jnp.float32),
            grid=(8,),
            in_specs=[pl.BlockSpec((8, 16), lambda i: (i, 0)), pl.BlockSpec((16, 16), lambda i: (0, 0))],
            out_specs=pl.BlockSpec((8, 16), lambda i: (i, 0)),
            interpret=True,
        )
        return jnp.sum(multiply(jnp.ones((64, 16)), jax.lax.stop_gradient(params))) + jnp.sum(params), jnp.float32(1)

    [row] = report_of(target_of(2), "data2", by_kernel, [(1, 8)], params=jnp.zeros((16, 16)))
    assert row.flops == 4 * 2 * 64 * 16 * 16


def test_parameters_and_fields_may_be_shapes():
    table = jax.ShapeDtypeStruct((1024, 512), jnp.float32)

    def loss_fn(params, batch):
        return jnp.sum(params) * jnp.sum(batch["image"]), jnp.float32(1)

    def batch_spec(bucket, num):
        return {"image": jax.ShapeDtypeStruct((num, bucket.rows, bucket.length), jnp.float32)}

    report = report_of(target_of(2), "data2", loss_fn, [(1, 8)], params=table, batch_spec=batch_spec)
    assert report[0].argument_bytes >= table.size * 4


def test_a_loader_gives_the_batches_of_its_fields():
    samples = [{"tokens": np.zeros(length, np.int32), "score": np.float32(0)} for length in (3, 5, 8, 8)]
    plan = make_plan([3, 5, 8, 8], max_tokens=16, max_shapes=1, num_microbatches=2)

    def loss_fn(params, batch):
        return params * jnp.sum(batch["score"]), jnp.float32(len(batch["tokens"]))

    [row] = compile_for(
        loss_fn, OPTIMIZER, load(plan, samples), target=target_of(2), params=jnp.float32(1), progress=False
    )
    assert row.bucket == plan.buckets.shapes[0]


@pytest.mark.parametrize(
    "text", ["h100", "8xb100", "0xh100", "v5e", "v5e:2", "v9:2x2", "v6e:0x2", "v6e:2x2x2", "v5p:2x4", "there"]
)
def test_an_unknown_target_is_refused(text):
    with pytest.raises(UserError, match=f"'{text}' names no devices"):
        Target.parse(text)


@pytest.mark.parametrize(("text", "extra"), [("8xh100", "target-gpu"), ("v5e:2x4", "target-tpu")])
def test_a_compiler_that_is_not_installed_is_named(monkeypatch, text, extra):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=rf"target '{text}' .* pip install 'jvarlen\[{extra}\]'"):
        Target.parse(text)


@pytest.mark.parametrize(
    "command", [["compile"], ["plan", "--model", "config.json"], ["train", "--dry-run"]], ids=lambda words: words[0]
)
def test_commands_name_a_missing_compiler_in_one_line(monkeypatch, tmp_path, capsys, command):
    def is_missing(*_):
        raise ModuleNotFoundError("no compiler: pip install 'jvarlen[target-gpu]'", name="jax_cuda12_plugin")

    monkeypatch.setattr("jvarlen.targets.target._check_installed", is_missing)
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 300, **sizes}))
    assert main([*command, "--target", "8xh100"]) == 2
    assert capsys.readouterr().err == "jvarlen: no compiler: pip install 'jvarlen[target-gpu]'\n"


@pytest.mark.parametrize(
    ("text", "settings", "gib"),
    [
        ("8xh100", {}, 0.75 * 79.1),
        ("8xh200", {}, 0.75 * 139.7),
        ("2x8xa100", {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}, 0.9 * 79.1),
        ("1xh100", {"XLA_CLIENT_MEM_FRACTION": ".5"}, 0.5 * 79.1),
        ("v5e:2x4", {"XLA_CLIENT_MEM_FRACTION": ".5"}, 15.75),
    ],
)
def test_the_limit_is_what_jax_gives_a_process(monkeypatch, text, settings, gib):
    monkeypatch.setattr("jvarlen.targets.target._check_installed", lambda *_: None)
    monkeypatch.setattr("jvarlen.targets.target._topology", lambda *_, **__: tuple(jax.devices()))
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, settings.get(name, ""))
    assert Target.parse(text).memory_bytes == int(gib * 2**30)
    for share in ("most", "1.5", "0", "nan") if "h100" in text else ():
        monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", share)
        with pytest.raises(UserError, match=f"XLA_CLIENT_MEM_FRACTION='{share}' is not a number above 0 and at most 1"):
            Target.parse(text)


@pytest.mark.parametrize(
    ("text", "preset", "devices"),
    [("8xh100", "dgx-h100", (1, 8)), ("2x4xa100", "dgx-a100", (2, 4)), ("v6e:2x4", "tpu-v6e-256", (1, 256))],
)
def test_the_rates_of_a_target_are_those_of_a_cluster(monkeypatch, text, preset, devices):
    monkeypatch.setattr("jvarlen.targets.target._check_installed", lambda *_: None)
    monkeypatch.setattr("jvarlen.targets.target._topology", lambda *_, **__: tuple(jax.devices()))
    cluster = Target.parse(text).cluster
    assert cluster == dataclasses.replace(PRESETS[preset], num_hosts=devices[0], devices_per_host=devices[1])


@pytest.mark.parametrize("words", ["gpipe.remat_none", "zero_bubble.remat_none", "interleaved.virtual2.tensor2"])
def test_operations_with_stages_are_those_without_over_the_stages(words, monkeypatch):
    monkeypatch.setattr("jvarlen.targets.compile_for.compile_with_dump", no_room)
    of_tensor, remat = ".tensor2" if "tensor" in words else "", "none" if "none" in words else "full"
    whole = Layout.parse(f"data1.remat_{remat}{of_tensor}")
    [row] = report_of(target_of(2 * whole.num_devices), f"data1.stage2.{words}", buckets=[(1, 32)], config=DEEP)
    [expected] = report_of(target_of(whole.num_devices), str(whole), buckets=[(1, 32)], config=DEEP)
    assert row.flops == expected.flops / 2 > 0


def no_room(*_):
    raise jax.errors.JaxRuntimeError("Used 2.0G of 1.0G hbm")


def test_a_layout_of_other_devices_is_refused():
    with pytest.raises(UserError, match="2"):
        report_of(target_of(2), "data4")


@pytest.mark.parametrize(
    "make",
    [lambda devices: place(Layout(data=2), devices), lambda devices: jax.make_mesh((2,), ("rows",), devices=devices)],
)
def test_a_placement_and_a_mesh_are_layouts_of_devices_of_the_target(make):
    target = target_of(2)
    of_text = report_of(target, "data2", buckets=BUCKETS[:1])
    shapes = BatchShapes(BUCKETS[:1], num_microbatches=8, has_many_groups=False)
    how = {"params": jax.eval_shape(lambda: models.init_params(MODEL, 0)), "progress": False}
    report = compile_for(models.layered(MODEL), OPTIMIZER, shapes, target=target, layout=make(jax.devices()[:2]), **how)
    assert report.layout == "data2"
    assert [row.total_bytes for row in report] == [row.total_bytes for row in of_text]
    with pytest.raises(UserError, match=r"layout has devices that are not of the target some.*: .*3"):
        compile_for(models.layered(MODEL), OPTIMIZER, shapes, target=target, layout=make(jax.devices()[2:4]), **how)


@pytest.mark.parametrize("layout", ["data2", "data1.stage2", "data2.tensor2.zero1"])
def test_nothing_is_placed_and_nothing_is_cached(layout, tmp_path, monkeypatch):
    table = jnp.ones((1024, 512))  # large enough to become an argument
    model = models.layered(MODEL)
    loss = model._replace(loss=lambda *given: (model.loss(*given)[0] * jnp.sum(table), model.loss(*given)[1]))
    params = models.init_params(MODEL, 0)
    for name in ("device_put", "make_array_from_callback", "make_array_from_single_device_arrays"):
        monkeypatch.setattr(jax, name, lambda *_, **__: pytest.fail("something is placed"))
    monkeypatch.setattr("jvarlen.targets.compile_for.compile_with_dump", no_room)
    target = target_of(Layout.parse(layout).num_devices)
    settings = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_enable_compilation_cache": True,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    reset_cache()  # JAX remembers whether it uses one
    try:
        options = CompileOptions(cache_dir=None, xla_options=("xla_cpu_enable_fast_math=false",))
        report_of(target, layout, loss, params=params, options=options)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        reset_cache()
    # How layers are stacked is found out on the CPU, by numbers in place of parameters.
    assert not [path.name for path in tmp_path.iterdir() if not path.name.startswith("jit__stack")]


def test_the_compile_command_prints_saves_and_draws_a_report(tmp_path, capsys):
    np.save(tmp_path / "lengths.npy", np.random.default_rng(0).integers(1, 100, 200))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"model_type": "llama", "vocab_size": 300, "num_key_value_heads": 2, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    files = [str(tmp_path / "lengths.npy"), "--model", str(tmp_path / "config.json")]
    how = ["--max-tokens", "256", "--max-shapes", "2", "--packing", "padded"]
    out, page = tmp_path / "report.json", tmp_path / "page.html"
    written = ["--out", str(out), "--html", str(page)]
    assert main(["compile", *files, *how, "--target", "here", *written, "--no-progress"]) == 0
    told = capsys.readouterr().out
    assert told.endswith(f"\n{out}\n{page}\n")
    assert [tuple(row["bucket"]) for row in json.loads(out.read_text())["rows"]]
    assert "data8 on here" in told
    assert "2 buckets on here" in page.read_text()
    assert main(["compile", *files, *how, "--target", "here", "--parallel", "tensor2", "--no-progress"]) == 0
    assert "data4.tensor2 on here" in capsys.readouterr().out
    assert main(["compile", *files, *how, "--target", "here", "--parallel", "data4"]) == 2
    assert "data4 takes 4" in capsys.readouterr().err
    assert main(["compile", *files, "--target", "here", "--parallel", "auto"]) == 2
    told, problem = capsys.readouterr()
    assert (told, "needs --cluster" in problem) == ("", True)
    assert main(["compile", *files, "--target", "8xb100"]) == 2
    assert "'8xb100' names no devices" in capsys.readouterr().err


WIDE = DecoderConfig(num_layers=2, width=512, num_heads=4, vocab_size=300, compute_dtype="bfloat16")
LAYOUTS = ["data8", "data8.zero3", "data2.tensor4", "data4.stage2.zero1"]


@OF_GPUS
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using ``pl.pallas_call`` for Mosaic GPU:DeprecationWarning")
def test_kernels_of_a_user_are_named():
    def loss_fn(params, batch):
        blocks = pl.BlockSpec((64, 128), lambda i: (i, 0))
        double = pl.pallas_call(
            lambda x, y: y.__setitem__(..., 2 * x[...]),
            out_shape=jax.ShapeDtypeStruct((256, 128), jnp.float32),
            grid=(4,),
            in_specs=[blocks],
            out_specs=blocks,
            name="double",
        )
        return jnp.sum(double(jnp.ones((256, 128)))) * jnp.sum(batch.weights) + jnp.sum(params), jnp.float32(1)

    [row] = report_of("2xh100", "data2", loss_fn, [(1, 8)], params=jnp.zeros(3))
    # JAX 0.10 takes Mosaic, which tells no name of a kernel, and JAX 0.12 Triton.
    assert [name.rstrip("_v0123456789") for name in row.kernels] in (["mosaic_gpu"], ["double"])


@OF_TPUS
@pytest.mark.parametrize("layout", ["data8.tensor2", "data4.stage2.tensor2.zero1", "data2.context4.tensor2"])
def test_axes_can_be_shorter_than_those_of_a_slice(layout):
    placement = place(layout, Target.parse("v6e:4x4").devices)
    assert len({*placement.mesh.devices.flat}) == 16


@OF_GPUS
@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_programs_for_gpus_communicate_beside_kernels_of_attention(layout):
    [row] = report_of("8xh100", layout, buckets=[(1, 512)], config=WIDE)
    assert row.fits
    assert row.kernels.keys() == {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}
    assert row.communication
    # Some have nothing to run beside: the one all-reduce after the last product, and what stages send each other.
    others = [each for each in row.communication if layout != "data8" and each.kind != "collective-permute"]
    assert sum(each.asynchronous for each in others) >= sum(each.times for each in others) / 2
    assert 0 < row.exposed_s < row.seconds / 2
    assert row.flops / 989e12 < row.seconds < 0.01
    if layout == "data8.zero3":
        assert any(each.overlapped for each in row.communication)
    check_buffers(row)
    if "stage" in layout:
        assert row.launches is None, "stages take branches"
    else:
        assert row.launches.collectives == sum(each.times for each in row.communication)
        assert row.launches.kernels + row.launches.graphs > 0


def check_buffers(row):
    """Ten buffers, no more than there are bytes of each kind."""
    assert len(row.buffers) == 10
    for kind, most in (("temporary", row.temp_bytes), ("argument", row.argument_bytes), ("output", row.output_bytes)):
        assert sum(buffer.num_bytes for buffer in row.buffers if buffer.kind == kind) <= most
    assert all(buffer.operation.startswith(("state.", "batch.")) for buffer in row.buffers if buffer.kind == "argument")


@OF_GPUS
@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_one_gpu_takes_cuda_graphs():
    [row] = report_of("1xh100", "data1", buckets=[(1, 512)], config=WIDE)
    assert row.launches.graphs > 0
    assert row.launches.collectives == 0


def packed_spec(bucket, num):
    return token_batch_spec(bucket, num, samples_per_row=4)


@OF_GPUS
@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_packed_rows_for_gpus_take_the_kernel_that_skips():
    [row] = report_of("8xh100", "data8", buckets=[(1, 512)], config=WIDE, batch_spec=packed_spec)
    assert row.kernels == {"_forward_kernel": 1, "_dq_kernel": 1, "_dkv_kernel": 1}


@pytest.mark.parametrize("target", [pytest.param("2x8xh100", marks=OF_GPUS), pytest.param("v5e:2x4", marks=OF_TPUS)])
def test_programs_that_are_not_tuned_cannot_be_had(target):
    placement = place(Layout(), Target.parse(target).devices)
    step = make_train_step(models.layered(MODEL), OPTIMIZER, layout=placement)
    state = step.init(jax.eval_shape(lambda: models.init_params(MODEL, 0)))
    shapes = BatchShapes(BUCKETS, num_microbatches=placement.layout.data, has_many_groups=False)
    with pytest.raises(UserError, match=r"neither tuned.*nor run"):
        compile_buckets(step, state, shapes)


@OF_GPUS
@OF_CUDNN
@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(
    ("layout", "sizes", "make"),
    [("data8.zero1", None, make_train_step), ("data8.zero1", None, make_eval_step), ("data8", (8, 1), make_train_step)],
)
def test_a_loss_that_calls_cudnn_itself_compiles_beside_axes_of_one_device(layout, sizes, make):
    def loss_fn(params, batch):
        x = params["table"][batch.tokens]
        out = jax.nn.dot_product_attention(*(x * params[name] for name in "qkv"), implementation="cudnn")
        return jnp.sum(out.astype(jnp.float32) * batch.weights[..., None, None]), jnp.sum(batch.weights)

    shapes = {"table": (300, 2, 64), "q": (2, 64), "k": (2, 64), "v": (2, 64)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    devices = Target.parse("8xh100").devices[: Layout.parse(layout).num_devices]
    where = devices if sizes is None else jax.sharding.Mesh(np.array(devices).reshape(sizes), ("data", "tensor"))
    placement = place(layout, where)
    step = make_train_step(loss_fn, OPTIMIZER, layout=placement)
    batches = BatchShapes([(1, 512)], num_microbatches=8, layout=placement, has_many_groups=False)
    options = CompileOptions(cache_dir=None, xla_options=("xla_gpu_autotune_level=0",))
    of_step = step if make is make_train_step else make_eval_step(loss_fn, layout=placement)
    compiler = make_step_compiler(of_step, step.init(params), batches, options)
    assert "__cudnn$fmhaSoftmax" in compiler.compile(compiler.lower(batches.buckets[0])).executable.as_text()


@OF_GPUS
@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_a_program_for_two_hosts_of_gpus_fits():
    [row] = report_of("2x8xh100", "data16", buckets=[(1, 512)], config=WIDE)
    assert row.fits


@OF_TPUS
@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_programs_for_tpus_communicate_beside_kernels_of_attention(layout):
    [row] = report_of("v5e:2x4", layout, buckets=[(1, 512)], config=WIDE)
    assert row.fits
    assert {name.split("_")[2] for name in row.kernels} == {"fwd", "dq", "dkv"}
    assert row.communication
    assert 0 < row.exposed_s < row.seconds
    assert row.flops / 197e12 < row.seconds < 0.02
    if layout == "data8.zero3":
        assert any(each.overlapped == each.asynchronous > 0 for each in row.communication)
    check_buffers(row)
    assert row.launches is None


@OF_TPUS
@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_a_program_that_a_tpu_has_no_room_for():
    report = report_of("v5e:2x4", "data8", buckets=[(2**16, 1024)], config=WIDE)
    [row] = report
    assert row.fits is False
    assert row.communication is None
    assert row.flops > 1e12
    assert row.temp_bytes is row.kernels is None
    assert row.total_bytes > row.limit_bytes == Target.parse("v5e:2x4").memory_bytes
