"""The code of the README and of the guides runs, and prints what the pages show."""

import contextlib
import dataclasses
import inspect
import io
import itertools
import json
import operator
import re
import types
from pathlib import Path

import jax
import numpy as np
import pytest

import jvarlen
import torch_ref
from jvarlen import parallel
from jvarlen.cli import main
from jvarlen.data import open as data_files
from jvarlen.data import stdlib_corpus
from jvarlen.data.tokens import TokenDataset
from jvarlen.planning.budget import Budget
from jvarlen.planning.order import Order
from jvarlen.reports.layout_figures import draw_memory
from jvarlen.targets import ModelFile

README = Path(jvarlen.__file__).parents[1] / "README.md"
DOCS = README.parent / "docs"
EXPERIMENTAL = README.parent / "jvarlen" / "experimental"
READMES = sorted(EXPERIMENTAL.glob("**/README.md"))
# What a line may import from.
PACKAGES = [
    jvarlen,
    *(getattr(jvarlen, name) for name in ("attention", "data", "distributed", "loading", "planning", "runs")),
]
PAGES = [README, *sorted([*DOCS.glob("*.md"), *DOCS.glob("api/*.md")]), *READMES]
# What the pages name of other programs.
FLAGS_OF_OTHERS = {
    "dask": {"--host", "--nthreads", "--scheduler-file"},
    "fairseq": {
        "--batch-size",
        "--curriculum",
        "--max-sentences",
        "--required-batch-size-multiple",
        "--required-seq-len-multiple",
        "--sentence-avg",
        "--skip-invalid-size-inputs-valid-test",
        "--update-freq",
    },
    "mpirun": {"--allow-run-as-root", "--bind-to", "--hostfile", "--mca", "--oversubscribe"},
    "pip": {"--no-deps", "--wheel-dir"},
    "slurm": {
        "--gpus-per-node",
        "--gpus-per-task",
        "--kill-on-bad-exit",
        "--nodes",
        "--ntasks",
        "--ntasks-per-node",
        "--open-mode",
        "--overlap",
        "--requeue",
        "--signal",
        "--time",
        "--wait",
    },
    "torchrun": {"--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint"},
}


@pytest.mark.slow
def test_the_script_trains_on_every_sample(monkeypatch):
    rng = np.random.default_rng(0)
    samples = [rng.integers(32, 127, length, np.uint8).tobytes() for length in (9, 17) * 40]
    monkeypatch.setattr(stdlib_corpus, "stdlib_functions", lambda: TokenDataset.from_bytes(samples))
    (script,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict = {}
    exec(script, names)
    assert names["plan"].num_samples == 80
    assert 0 < float(names["metrics"].loss) < 8


def blocks(name, language):
    """The blocks of a guide in a language: of a page of `docs/`, or of a README by its full path."""
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)


def run_guide(name):
    """What the lines of a guide leave behind."""
    names: dict = {}
    for script in blocks(name, "python"):
        exec(script, names)
    return names


@pytest.mark.slow
def test_the_lines_of_the_parallel_guide_run(capsys):
    names: dict = {}
    for script in blocks("parallel.md", "python"):
        if "torch_ref" not in script:  # for torchrun
            exec(script, names)
    assert names["estimate"].wire_bytes > 0
    assert "all-gather" in capsys.readouterr().out


def assert_prints_what_it_shows(name, capsys):
    """Runs a guide, whose blocks of text must be what it prints, in order; what it leaves behind."""
    names = run_guide(name)
    printed = iter(capsys.readouterr().out.splitlines())
    for shown in itertools.chain.from_iterable(block.splitlines() for block in blocks(name, "text")):
        assert shown in printed, f"{name} shows what it does not print there: {shown}"
    return names


@pytest.mark.slow
def test_the_quick_start_trains_and_prints_what_it_shows(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = assert_prints_what_it_shows("quick_start.md", capsys)
    assert names["step"].report.times_used == names["plan"].num_steps == len(names["losses"])


def test_the_first_page_prints_the_report_that_it_shows(capsys):
    names = assert_prints_what_it_shows("index.md", capsys)
    assert len(blocks("index.md", "text")) == 1
    assert names["plan"].num_samples == 10


def test_the_guide_to_the_order_prints_what_it_shows(capsys):
    names = assert_prints_what_it_shows("curriculum.md", capsys)
    assert names["plan"].num_samples == 1000


def test_the_guide_to_balance_prints_what_it_shows(capsys):
    names = assert_prints_what_it_shows("balance.md", capsys)
    assert len({each.digest for each in (names["plan"], names["within_steps"], names["over_epoch"])}) == 3


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_guide_to_asynchronous_training_prints_what_it_shows(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = assert_prints_what_it_shows(EXPERIMENTAL / "asynchronous" / "README.md", capsys)
    assert names["run"].state.params.keys() == names["stale_state"].params.keys()
    assert int(names["stale_state"].opt_state.version) == names["plan"].num_steps


def test_the_guide_to_the_learning_rate_prints_what_it_shows(capsys):
    names = assert_prints_what_it_shows("learning_rate.md", capsys)
    assert names["opt_state"].inner_states.keys() == names["groups"].keys()


@pytest.mark.slow
def test_the_guide_to_mixed_steps_prints_what_it_shows(capsys):
    names = assert_prints_what_it_shows(EXPERIMENTAL / "mixed" / "README.md", capsys)
    assert len(names["compiled"].specs) == 1


def test_the_guide_to_collectives_prints_what_it_shows(capsys):
    names = assert_prints_what_it_shows(EXPERIMENTAL / "collectives" / "README.md", capsys)
    assert names["chunks"].sum() == names["total"][:6].sum()


@pytest.mark.slow
def test_the_guide_to_layouts_prints_what_it_shows(capsys):
    names = assert_prints_what_it_shows("layouts.md", capsys)
    assert len(names["expected"]) == names["plan"].num_steps
    for name, svg in (("layouts-memory", draw_memory(names["estimates"])), ("layouts-stages", names["svg"])):
        drawn, saved = (  # but for the bytes of activations, which depend on the version of JAX
            [word for word in re.findall(r"<text[^>]*>([^<]+)<", text) if not re.fullmatch(r"[ \d.,]+", word)]
            for text in (svg, (DOCS / "pictures" / f"{name}.svg").read_text())
        )
        assert drawn == saved != [], f"{name} is out of date: run `python docs/pictures.py`"


def test_the_guide_to_context_parallelism_prints_what_it_shows(capsys):
    names = assert_prints_what_it_shows("context_parallel.md", capsys)
    assert names["expected"] > 25


def test_the_guide_to_schedules_prints_what_it_shows(capsys):
    names = assert_prints_what_it_shows("schedules.md", capsys)
    assert names["svg"].startswith("<svg")


def test_the_guide_to_token_slices_prints_what_it_shows(capsys):
    names = assert_prints_what_it_shows(EXPERIMENTAL / "token_slices" / "README.md", capsys)
    assert names["chosen"].sum() == 2048


@pytest.mark.slow
def test_the_guide_to_large_plans_prints_what_it_shows(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = assert_prints_what_it_shows(EXPERIMENTAL / "large_plans" / "README.md", capsys)
    assert names["counts"].sum() > 0.9e11


@pytest.mark.slow
def test_the_guide_to_simulation_prints_what_it_shows(capsys):
    names = assert_prints_what_it_shows(EXPERIMENTAL / "simulation" / "README.md", capsys)
    picture = (DOCS / "pictures" / "simulation.svg").read_text()
    drawn, saved = (re.findall(r"<text[^>]*>([^<]+)<", svg) for svg in (names["svg"], picture))
    assert drawn == saved != [], "the picture is out of date: run `python docs/pictures.py`"


@pytest.mark.slow
def test_the_lines_of_the_guide_to_choosing_run(capsys):
    choice = run_guide("choosing.md")["choice"]
    assert choice.layout.num_devices == 16
    assert str(choice.layout) in capsys.readouterr().out
    assert f"{len(choice.candidates.reasons)} layouts" in (DOCS / "choosing.md").read_text()
    assert ModelFile(**json.loads(blocks("choosing.md", "json")[0])).num_params > 6 * 10**9


@pytest.mark.slow
def test_the_guide_to_tensor_parallelism_prints_what_it_shows(capsys):
    names = assert_prints_what_it_shows("tensor_parallel.md", capsys)
    assert names["keep"].shape == (4, 32, 16)


@pytest.mark.slow
def test_the_guide_to_resuming_prints_what_it_shows(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = assert_prints_what_it_shows("resuming.md", capsys)
    assert int(names["resumed"].opt_state[0].count) == 30


@pytest.mark.slow
def test_the_guide_to_exactness_prints_what_it_shows(capsys):
    names = assert_prints_what_it_shows("exactness.md", capsys)
    assert names["batch"].tokens.shape[0] == 4


def test_the_lines_for_those_who_come_from_elsewhere_run(capsys):
    names = run_guide("coming_from.md")
    padded = (names["packs"].num_sequences * names["longest"]).max()
    assert f"up to {padded:,} under a sum of 4,096" in capsys.readouterr().out
    assert padded > 4_096


def arguments_of(function):
    """Names of its arguments, with those that a function passes on to `Budget`, or takes in an `Order`."""
    parameters = inspect.signature(function).parameters
    is_passed_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    classes = [Budget] * is_passed_on + [Order] * ("order" in parameters)
    return {*parameters, *(field.name for each in classes for field in dataclasses.fields(each))}


def test_what_it_names_as_ours_exists():
    """Functions and arguments of the second column; arguments that stand alone are those of any public function."""
    text = (README.parent / "docs" / "coming_from.md").read_text()
    cells = re.findall(r"^\|[^|]+\|([^|]+)\|[^|]*\|$", text, re.MULTILINE)
    ours = types.SimpleNamespace(
        **vars(data_files)
        | {name: getattr(package, name) for package in PACKAGES for name in package.__all__}
        | {"torch_ref": torch_ref, "parallel": parallel}
    )
    values = [getattr(package, name) for package in PACKAGES for name in package.__all__]
    functions = [value for value in values if inspect.isroutine(value)]
    arguments = set().union(*map(arguments_of, functions))

    num_calls = 0
    for span in itertools.chain.from_iterable(re.findall(r"`([^`]+)`", cell) for cell in cells):
        given = set(re.findall(r"(\w+)=", span))
        if call := re.fullmatch(r"([\w.]+)\(.*\)", span):
            num_calls += 1
            assert given <= arguments_of(operator.attrgetter(call[1])(ours)), span
        elif re.fullmatch(r"[a-z]\w*", span):
            assert span in arguments or hasattr(ours, span), span
        else:
            assert given <= arguments, span
    assert num_calls > 25


def test_the_lines_of_the_planning_guide_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_guide("planning.md")
    assert names["plan"].num_samples == len(names["lengths"])
    printed = capsys.readouterr().out
    assert "predicted" in printed
    assert "1 of 16 buckets to compile" in printed
    assert "of the rows" in printed


def test_the_lines_of_the_sorting_guide_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_guide("sorting.md")
    assert names["lengths"].tolist() == [1, 3, 2]


def test_the_lines_of_the_guide_to_the_ordered_file_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_guide(EXPERIMENTAL / "ordered_file" / "README.md")
    assert np.array_equal(np.sort(np.load("order.npy")), np.arange(20_000))
    printed = capsys.readouterr().out
    assert f"{20_000 // jax.device_count():,} to" in printed
    assert "ExchangeVolume" in printed


@pytest.mark.slow
def test_the_lines_of_the_compilation_guide_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_guide("compilation.md")
    printed = capsys.readouterr().out
    assert "no bucket was compiled for this batch. Nearest is" in printed
    assert "int32[1,3,1000], planned was" in printed
    assert f"{len(names['plan'].buckets)} programs read" in printed
    assert "0 executables left" in printed
    assert names["step"].report.times_used == names["plan"].num_steps


def test_the_lines_of_the_guide_to_mixtures_run(capsys):
    names = run_guide("mixtures.md")
    printed = capsys.readouterr().out.splitlines()
    assert printed[:3] == ["[500 400 100]", "[200 160  40]", "[500 400 100]"]
    assert printed[3:] == ["[24  6  0]", "[24  6  0]", "[24  6  0]", "[24  5  1]", "[0.25 0.25]"]
    assert len(names["mixture"]) == names["plan"].num_samples == 1000


@pytest.mark.slow
def test_the_lines_of_the_training_guide_run(capsys):
    names = run_guide("training.md")
    printed = capsys.readouterr().out
    assert "{'float32'}" in printed
    assert names["metrics"].loss < 6
    assert names["step"].collectives(names["plan"].buckets[0])["all-reduce"].in_loops == 0


@pytest.mark.slow
def test_the_lines_of_the_testing_guide_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_guide("testing.md")
    printed = capsys.readouterr().out
    assert "likely: loss_fn returns means" in printed
    assert "1 is missing: id 3" in printed
    assert "step 0 differs: " in printed
    assert names["step"].report.times_used == 2 * len(names["plan"].buckets) + 2 * names["plan"].num_steps


@pytest.mark.slow
def test_the_lines_of_the_data_guide_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_guide("data.md")
    assert names["tokens"].lengths.sum() < names["saved"].lengths.sum()
    assert names["tokens"].num_values <= 400
    printed = capsys.readouterr().out
    assert "500 b'line 499: " in printed
    assert printed.count("corpus.jsonl.lengths-") == 2


@pytest.fixture(scope="module")
def settings():
    """The flags of each command, as its help has them."""
    flags = {}
    for command in ("plan", "sort", "train", "report", "measure", "sample", "export"):
        with contextlib.redirect_stdout(io.StringIO()) as shown, pytest.raises(SystemExit):
            main([command, "--help"])
        flags[command] = flags_in(shown.getvalue())
    return flags


def flags_in(text):
    return set(re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", text))


def code_lines(text):
    """The lines of the blocks that are no Python, each with what it is continued by, and the spans of code."""
    for language, block in re.findall(r"^```([^\n]*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if language != "python":
            yield from block.replace("\\\n", " ").splitlines()
    for span in re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)):
        yield span.replace("\n", " ")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(README.parent)))
def test_the_settings_that_the_pages_name_exist(page, settings):
    of_any_command = set().union(*settings.values(), {"--version", "--traceback"}, *FLAGS_OF_OTHERS.values())
    for line in code_lines(page.read_text()):
        before, command, after = re.fullmatch(r"(.*?)(?:\bjvarlen ([a-z]+)\b(.*))?", line).groups(default="")
        assert flags_in(before) <= of_any_command, line
        assert flags_in(after) <= settings.get(command, set()), line


def test_the_commands_it_names_exist():
    text = README.read_text()
    makefile = (README.parent / "Makefile").read_text()
    assert len(text.split()) <= 600, "what a reader wants in two minutes"
    for target in re.findall(r"^make (\w+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
