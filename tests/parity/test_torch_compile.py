"""torch_ref's static compilation: all shapes at the start, nothing afterwards, and the same numbers as without it."""

import copy
import types

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

import torch_ref
from torch_ref.training import graphs

BUCKETS = [(4, 8), (2, 16), (2, 24)]
LENGTHS = [3, 8, 5, 8, 2, 7, 12, 16, 9, 11, 24, 17, 20, 22, 19, 1]
SAMPLES = [np.random.default_rng(0).integers(0, 256, length).astype(np.uint8) for length in LENGTHS]


class Tiny(nn.Module):
    """Next to nothing to compile, but dropout, running statistics and an attribute that torch guards on."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(256, 6)
        self.drop = nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 256)
        self.unused = nn.Linear(2, 2)
        self.scale = 1.0
        self.begin_token = 0

    def forward(self, inputs_BxT):
        hidden_BxTxD = self.drop(self.embed(inputs_BxT)) * self.scale
        return self.head(self.norm(hidden_BxTxD.transpose(1, 2)).transpose(1, 2))


def make_plan(order="shuffle", **options):
    return torch_ref.make_plan(LENGTHS, BUCKETS, order=order, num_microbatches=2, **options)


def packed_plan():
    return torch_ref.make_plan(LENGTHS, [(2, 16), (1, 24)], packing="best_fit", num_microbatches=2)


def compile_eagerly(model, plan, **options):
    return torch_ref.compile_buckets(model, plan, **({"backend": "eager", "progress": False} | options))


def first_batch(plan, bucket):
    step = plan.step_bucket.tolist().index(bucket)
    return next(iter(torch_ref.load(plan, SAMPLES, start_step=step)))


def num_graphs():
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def assert_same_training(plain, model, compiled, plan, device="cpu", **tolerance):
    """Go through the plan with both; losses of every step and weights at the end agree."""
    optimizers = [Adam(one.parameters(), lr=1e-2, weight_decay=0.1) for one in (plain, model)]
    for batch in torch_ref.load(plan, SAMPLES):
        batch = batch._replace(**{k: v.to(device) for k, v in batch._asdict().items() if isinstance(v, Tensor)})
        random_state = torch.random.get_rng_state()
        expected = torch_ref.train_step(plain, optimizers[0], batch)
        torch.random.set_rng_state(random_state)
        metrics = compiled(optimizers[1], batch)
        torch.testing.assert_close(metrics["loss"], expected["loss"], **tolerance)
        assert metrics["weight"] == expected["weight"]
        assert metrics["num_sequences"] == expected["num_sequences"]
    for weight, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(weight, other, **tolerance)


FEATURES = {"num_kv_heads": 1, "windows": (4,), "begins_samples": False, "qk_norm": True, "tied": True}


@pytest.mark.parametrize(("plan", "features"), [(make_plan(), {}), (packed_plan(), FEATURES)], ids=["padded", "packed"])
def test_training_is_the_plain_one_and_compiles_nothing(plan, features):
    torch.manual_seed(0)
    plain = torch_ref.Decoder(torch_ref.DecoderConfig(width=8, num_layers=1, **features))
    model = copy.deepcopy(plain)
    compiled = compile_eagerly(model, plan)
    before = num_graphs()
    assert_same_training(plain, model, compiled, plan, rtol=1e-6, atol=1e-7)
    assert num_graphs() == before
    num_steps = np.bincount(plan.step_bucket, minlength=len(plan.buckets.shapes)).tolist()
    assert [tuple(row.bucket) for row in compiled.rows] == [tuple(bucket) for bucket in plan.buckets.shapes]
    assert [row.num_steps for row in compiled.rows] == num_steps
    assert all(row.num_graphs == 1 and row.compile_s > 0 for row in compiled.rows)


def test_random_numbers_running_statistics_and_unused_weights_are_the_plain_ones():
    plain = Tiny()
    model = copy.deepcopy(plain)
    plan = make_plan()
    assert_same_training(plain, model, compile_eagerly(model, plan), plan, rtol=1e-6, atol=1e-7)
    assert model.unused.weight.grad is None
    for buffer, other in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(buffer, other)


def test_the_reached_limit_is_an_error_where_torch_alone_says_nothing():
    def double(x):
        return 2 * x

    def compiled():
        copied = types.FunctionType(double.__code__.replace(), globals())
        return torch.compile(copied, backend="eager", dynamic=False)

    with torch._dynamo.config.patch(recompile_limit=3):
        silent = compiled()
        for size in range(1, 6):
            silent(torch.ones(size))
    with torch_ref.no_recompiles():
        silent(torch.ones(7))  # eager, without a word
    loud = compiled()
    with graphs.room_for(2):
        for size in range(1, 4):
            loud(torch.ones(size))
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            loud(torch.ones(4))


@pytest.fixture(scope="module")
def compiled():
    return compile_eagerly(Tiny(), BUCKETS)


def batch_of(rows, length, **changed):
    tokens, ids = torch.ones(2, rows, length, dtype=torch.int64), torch.zeros(2, rows, dtype=torch.int64)
    batch = torch_ref.Batch(tokens, ids + length, torch.ones(tokens.shape), float(rows), ids=ids, is_real=ids == 0)
    return batch._replace(**changed)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (batch_of(3, 16), r"Nearest is 2 x 16: .*tokens is int64\[2,3,16\].*planned"),
        (batch_of(4, 9), r"Nearest is 4 x 8: .*weights is float32\[2,4,9\].*planned"),
        (batch_of(1, 400), r"Nearest is 2 x 24: .*Buckets: 4 x 8, 2 x 16, 2 x 24"),
        (batch_of(4, 8, weights=torch.ones(2, 4, 8).double()), r"weights is float64\[2,4,8\].*was float32\[2,4,8\]"),
        (batch_of(4, 8, lengths=None), "lengths is absent, planned was int"),
        (batch_of(4, 8, weights=1.0), r"weights is a float, planned was float32\["),
        (batch_of(4, 8)._asdict(), "no bucket was compiled for a dict"),
    ],
    ids=["rows", "length", "far", "dtype", "absent", "number", "container"],
)
def test_what_was_not_planned_is_refused(compiled, batch, said):
    optimizer = SGD(compiled.model.parameters(), lr=1.0)
    compiled(optimizer, batch_of(4, 8))
    gradient, before = compiled.model.head.bias.grad, num_graphs()
    with pytest.raises(torch_ref.UnplannedShapeError, match=said) as raised:
        compiled(optimizer, batch)
    assert isinstance(raised.value, ValueError)
    assert compiled.model.head.bias.grad is gradient
    assert num_graphs() == before


def test_a_changed_condition_is_an_error_and_no_graph():
    """What torch guards on besides the shapes: an attribute of the model here."""
    model = Tiny()
    plan = make_plan()
    compiled = compile_eagerly(model, plan)
    optimizer = SGD(model.parameters(), lr=1.0)
    model.scale = 2.0
    before, weight = num_graphs(), model.head.weight.clone()
    with pytest.raises(RuntimeError, match=r"fail_on_recompile(.|\n)*scale"):
        compiled(optimizer, first_batch(plan, 0))
    model.scale = 1.0
    assert num_graphs() == before
    assert torch.equal(model.head.weight, weight)
    compiled(optimizer, first_batch(plan, 0))


class Counting(Tiny):
    """Needs a graph a call."""

    def forward(self, tokens_BxT):
        self.scale += 1.0
        return super().forward(tokens_BxT)


class Branching(Tiny):
    """Torch would break it into graphs."""

    def forward(self, tokens_BxT):
        logits = super().forward(tokens_BxT)
        return logits if self.head.bias.sum() > 0 else -logits


@pytest.mark.parametrize(("model", "said"), [(Counting, "fail_on_recompile"), (Branching, "branching")])
def test_models_that_are_not_one_graph_a_bucket_are_refused(model, said):
    with pytest.raises(RuntimeError, match=said):
        compile_eagerly(model(), BUCKETS)


def test_a_loss_of_named_fields_is_told_what_to_compile():
    def loss_fn(model, batch):
        return model(batch["features"]).sum(), batch["lengths"].sum()

    with pytest.raises(RuntimeError) as raised:
        compile_eagerly(Tiny(), BUCKETS, loss_fn=loss_fn)
    assert "torch.compile(model, dynamic=False)" in "".join(raised.value.__notes__)


@pytest.mark.parametrize(
    ("buckets", "said"),
    [
        ([(2, 4, 4)], r"several like \(2, 4, 4\)\. .*the model torch\.compile\(model, dynamic=False\)"),
        ([(2, 8), (2, 8)], "ascending"),
    ],
    ids=str,
)
def test_buckets_that_cannot_be_compiled_are_refused(buckets, said):
    with pytest.raises(ValueError, match=said):
        compile_eagerly(Tiny(), buckets)


@pytest.mark.parametrize(
    ("devices", "num_processes", "backend", "mode"),
    [
        (["cuda:0", "cuda:0"], 1, "inductor", "reduce-overhead"),
        (["cuda:0"], 2, "inductor", "default"),
        (["cuda:0", "cuda:1"], 1, "inductor", "default"),
        (["cuda:0"], 1, "eager", "default"),
        (["cpu"], 1, "inductor", "default"),
    ],
)
def test_graphs_are_replayed_on_one_gpu_alone(monkeypatch, devices, num_processes, backend, mode):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: num_processes > 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: num_processes)
    weights = [types.SimpleNamespace(device=torch.device(device)) for device in devices]
    model = types.SimpleNamespace(parameters=lambda: iter(weights))
    assert graphs.choose_mode(model, backend) == mode


@pytest.mark.slow
# Torch imports a deprecated module with Inductor.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU for torch")],
        ),
    ],
)
def test_generated_code_trains_as_eager_code_does(device, tmp_path, monkeypatch):
    """Two shapes; a second compilation finds their code on disk."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    plain = Tiny().eval().to(device)
    plain.norm = nn.Identity()
    model = copy.deepcopy(plain)
    plan = torch_ref.make_plan(LENGTHS, [(4, 8), (2, 24)], order="length", num_microbatches=2)
    # Worker processes and a search for the CPU's vector instructions take longer than what they would save here.
    with torch._inductor.config.patch({"compile_threads": 1, "cpp.vec_isa_ok": False}):
        compiled = torch_ref.compile_buckets(model, plan, progress=False)
        assert compiled.mode == ("default" if device == "cpu" else "reduce-overhead")
        assert_same_training(plain, model, compiled, plan, device, rtol=1e-5, atol=1e-6)
        torch.compiler.reset()
        again = torch_ref.compile_buckets(model, plan, progress=False)
    for rows, from_cache in ((compiled.rows, False), (again.rows, True)):
        assert [(row.num_graphs, row.from_cache) for row in rows] == [(1, from_cache)] * 2
