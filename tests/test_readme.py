"""The code of the README and of the guides runs, and prints what the pages show."""

import contextlib
import dataclasses
import inspect
import io
import itertools
import operator
import platform
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import jax
import numpy as np
import pytest

import jvarlen
import torch_ref.parallel
from jvarlen import batches, parallel
from jvarlen.cli import COMMANDS, main
from jvarlen.data import open as data_files
from jvarlen.data import stdlib_corpus
from jvarlen.data.tokens import TokenDataset
from jvarlen.planning.budget import Budget
from jvarlen.planning.order import Order
from tests.support.run_fit import leave_pictures_empty

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
FLAGS_OF_OTHERS = """
fairseq: --batch-size --curriculum --max-sentences --required-batch-size-multiple --required-seq-len-multiple
    --sentence-avg --skip-invalid-size-inputs-valid-test --update-freq
mpirun: --allow-run-as-root --bind-to --hostfile --mca --oversubscribe
pip: --index-url --no-deps --wheel-dir
slurm: --gpus-per-node --gpus-per-task --kill-on-bad-exit --nodes --ntasks --ntasks-per-node --open-mode --overlap
    --requeue --signal --time --wait
torchrun: --nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint
"""


@pytest.fixture(autouse=True)
def without_pictures(monkeypatch):
    """Runs draw no pictures here; tests/test_examples.py looks at one."""
    leave_pictures_empty(monkeypatch.setattr)


class Guide(NamedTuple):
    """A page whose lines run: what must hold of what they leave behind, and what they print beside its blocks of text.

    Where not all that the page shows is the same in each run, `shows` is false.
    """

    holds: Callable[[SimpleNamespace], bool] = lambda left: True
    prints: tuple[str, ...] = ()
    shows: bool = True
    slow: bool = False


GUIDES = {
    "index.md": Guide(lambda left: left.plan.num_samples == 10),
    "start_here.md": Guide(lambda left: left.step.report.times_used == 3, slow=True),
    "quick_start.md": Guide(
        lambda left: left.step.report.times_used == 3 * left.plan.num_steps == 3 * len(left.losses), slow=True
    ),
    "packing.md": Guide(
        lambda left: left.unbalanced.digest != left.for_any.digest and left.plan.num_samples > 0,
        ("1 packed shape: predicted seconds",),
    ),
    "how_a_plan_is_made.md": Guide(
        lambda left: left.plan.num_samples == len(left.long),
        (
            *("5×5 4×9 2×14 1×30\n", "5 23.5%\n"),
            *("[[16  8 13  0 22]\n [ 1  4 19 11 -1]]\n", "predicted"),
        ),
        shows=False,
        slow=True,
    ),
    "curriculum.md": Guide(lambda left: left.plan.num_samples == 1000),
    "install.md": Guide(shows=False),
    "many_shapes.md": Guide(lambda left: left.one_step.num_samples == 20, slow=True),
    "with_trainers.md": Guide(),
    "questions.md": Guide(
        lambda left: left.plan.num_samples == len(left.dataset),
        ("likely: loss_fn returns means",),
        slow=True,
    ),
    "coming_from.md": Guide(lambda left: left.packed.num_samples == len(left.texts)),
    "mixtures.md": Guide(
        lambda left: len(left.mixture) == left.plan.num_samples == 1000,
        ("[500 400 100]\n[500 400 100]\n",),
    ),
    "data.md": Guide(
        lambda left: left.tokens.lengths.sum() < left.dataset.lengths.sum() and left.tokens.num_values <= 400,
        ("500 b'line 0: word ' (1, 17, 55)",),
        shows=False,
        slow=True,
    ),
    "fields.md": Guide(
        lambda left: left.step.report.times_used == left.packed.num_steps,
        ("is_enzyme (1, ", "coordinates (1, "),
        shows=False,
    ),
    "learning_rate.md": Guide(),
    "training.md": Guide(lambda left: left.result.summary.compilations_after_first_step == 0, slow=True),
    "compilation.md": Guide(
        lambda left: left.step.report.times_used == left.plan.num_steps,
        ("no bucket was compiled for this batch. Nearest is", "int32[1,3,1000], planned was"),
        slow=True,
    ),
    "inference.md": Guide(lambda left: [*map(len, left.again)] == [*map(len, left.rows)]),
    "rollouts.md": Guide(lambda left: left.step.report.times_used == 5 and left.accuracy > 0.8, slow=True),
    "own_loops.md": Guide(
        lambda left: left.place == {"epoch": 0, "step": 5} and float(left.metrics["loss"]) < 4.8, shows=False
    ),
    "resuming.md": Guide(lambda left: int(left.resumed.opt_state[0].count) == 30, slow=True),
    "layered.md": Guide(slow=True),
    "targets.md": Guide(lambda left: len(left.report) == 2, shows=False, slow=True),
    "large_plans/README.md": Guide(slow=True),
    "ordered_file/README.md": Guide(
        lambda left: np.array_equal(np.sort(np.load("order.npy")), np.arange(20_000)),
        (f"{20_000 // jax.device_count():,} to", "ExchangeVolume"),
        shows=False,
    ),
    "token_slices/README.md": Guide(),
}


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.slow) if guide.slow else page for page, guide in GUIDES.items()]
)
def test_the_lines_of_a_guide_run_and_print_what_it_shows(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    guide, path = GUIDES[page], EXPERIMENTAL / page if "/" in page else DOCS / page
    names = run_guide(path)
    printed = capsys.readouterr().out
    assert guide.holds(SimpleNamespace(**names))
    assert [text for text in guide.prints if text not in printed] == []
    if guide.shows:
        assert_shows(path, printed)


@pytest.mark.slow
def test_the_script_trains_and_says_so(monkeypatch, capsys):
    rng = np.random.default_rng(0)
    samples = [rng.integers(32, 127, length, np.uint8).tobytes() for length in (9, 17) * 40]
    monkeypatch.setattr(stdlib_corpus, "stdlib_functions", lambda: TokenDataset.from_bytes(samples))
    (script,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict = {}
    exec(script, names)
    assert names["plan"].num_samples == 80
    printed = capsys.readouterr().out
    assert names["plan"].report() in printed
    said = rf"^100 of {names['plan'].num_steps} steps of an epoch: loss \d\.\d\d nats per byte"
    assert re.search(said, printed, re.MULTILINE)


@pytest.mark.slow
def test_the_script_plans_the_shapes_that_stand_beside_it(capsys):
    text = README.read_text()
    script, shown = (re.search(rf"```{name}\n(.*?)```", text, re.DOTALL)[1] for name in ("python", "text"))
    names: dict = {}
    exec(script[: script.index("optimizer =")], names)
    printed = capsys.readouterr().out
    (num_dropped,) = re.findall(r"overlong='drop': 0 samples cut, ([\d,]+) dropped", printed)
    assert int(num_dropped.replace(",", "")) > 0
    if f"Python {platform.python_version()}:" in text:  # other versions have other functions
        assert printed == shown
        assert f"leaves out {num_dropped} of the {len(names['dataset']):,} functions" in " ".join(text.split())


def blocks(name, language):
    """The blocks of a guide in a language: of a page of `docs/`, or of a README by its full path."""
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)


def run_guide(name):
    """What the lines of a guide leave behind."""
    names: dict = {}
    for script in blocks(name, "python"):
        exec(script, names)
    return names


def assert_shows(name, printed):
    """The blocks of text of a guide are what its lines have printed, in order."""
    lines = iter(printed.splitlines())
    for shown in itertools.chain.from_iterable(block.splitlines() for block in blocks(name, "text")):
        assert shown in lines, f"{name} shows what it does not print there: {shown}"


def assert_prints_what_it_shows(name, capsys):
    """What the lines of a guide leave behind, whose blocks of text must be what they print."""
    names = run_guide(name)
    assert_shows(name, capsys.readouterr().out)
    return names


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_guide_to_asynchronous_training_prints_what_it_shows(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = assert_prints_what_it_shows(EXPERIMENTAL / "asynchronous" / "README.md", capsys)
    assert names["run"].state.params.keys() == names["stale_state"].params.keys()
    assert int(names["stale_state"].opt_state.version) == names["plan"].num_steps


@pytest.mark.slow
def test_the_guide_to_layouts_prints_what_it_shows(capsys):
    names = run_guide("layouts.md")
    printed = capsys.readouterr().out
    assert_shows("layouts.md", printed)
    assert len(names["expected"]) == names["plan"].num_steps
    assert names["estimate"].wire_bytes > 0
    assert "all-gather" in printed
    drawn, saved = (  # but for the bytes of activations, which depend on the version of JAX
        [word for word in re.findall(r"<text[^>]*>([^<]+)<", text) if not re.fullmatch(r"[ \d.,]+", word)]
        for text in (names["svg"], (DOCS / "pictures" / "layouts-memory.svg").read_text())
    )
    assert drawn == saved != [], "the picture is out of date: run `python docs/pictures.py`"


@pytest.mark.slow
def test_the_guide_to_simulation_prints_what_it_shows(capsys):
    names = assert_prints_what_it_shows(EXPERIMENTAL / "simulation" / "README.md", capsys)
    picture = (DOCS / "pictures" / "simulation.svg").read_text()
    drawn, saved = (re.findall(r"<text[^>]*>([^<]+)<", svg) for svg in (names["svg"], picture))
    assert drawn == saved != [], "the picture is out of date: run `python docs/pictures.py`"


@pytest.mark.slow
def test_the_lines_and_commands_of_the_guide_to_fine_tuning_run_and_print_what_it_shows(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (first, *others), names = re.findall(r"```(python|bash)\n(.*?)```", (DOCS / "fine_tuning.md").read_text(), re.S), {}
    for language, block in others:
        if language == "python":
            exec(block, names)
        for line in block.replace("\\\n", "").splitlines() if language == "bash" else ():
            assert main(shlex.split(line)[1:]) == 0
    printed = capsys.readouterr().out
    assert_shows("fine_tuning.md", printed)
    assert printed.count("prompt 1\n14\n── prompt 2\n25\n") == 2
    train, sample, export = first[1].replace("\\\n", "").replace("path/to/llama", "tuned").splitlines()
    assert main([*shlex.split(train)[1:], "--max-steps", "1", "--max-shapes", "1", "--no-progress"]) == 0
    for line in (sample, f"{export}-again"):
        assert main(shlex.split(line)[1:]) == 0
    assert "learning rate 5e-06 at 8 sequences a step" in capsys.readouterr().out


def arguments_of(function):
    """Names of its arguments, with those that a function passes on to `Budget`, or takes in an `Order`."""
    parameters = inspect.signature(function).parameters
    is_passed_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    classes = [Budget] * is_passed_on + [Order] * ("order" in parameters)
    return {*parameters, *(field.name for each in classes for field in dataclasses.fields(each))}


def test_functions_and_arguments_that_the_comparison_names_exist():
    """Functions and arguments of the second column; arguments that stand alone are those of any public function."""
    text = (README.parent / "docs" / "coming_from.md").read_text()
    cells = re.findall(r"^\|[^|]+\|([^|]+)\|[^|]*\|$", text, re.MULTILINE)
    ours = SimpleNamespace(
        **vars(data_files)
        | {name: getattr(package, name) for package in PACKAGES for name in package.__all__}
        | {"torch_ref": torch_ref, "parallel": parallel, "batches": batches}
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
        elif re.fullmatch(r"[a-z_]+(\.\w+)+", span):
            assert operator.attrgetter(span)(ours), span
        else:
            assert given <= arguments, span
    assert num_calls > 25


@pytest.fixture(scope="module")
def settings():
    """The flags of each command, as its help has them."""
    flags = {}
    for command in COMMANDS:
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            main([command, "--help-all"])
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
    of_all = {"--version", "--traceback", "--help-all"}
    of_any_command = set().union(*settings.values(), of_all, flags_in(FLAGS_OF_OTHERS))
    for line in code_lines(page.read_text()):
        before, command, after = re.fullmatch(r"(.*?)(?:\bjvarlen ([a-z]+)\b(.*))?", line).groups(default="")
        assert flags_in(before) <= of_any_command, line
        assert flags_in(after) <= settings.get(command, set()), line


def test_the_readme_is_short_and_names_commands_that_exist():
    text = README.read_text()
    makefile = (README.parent / "Makefile").read_text()
    assert len(text.split()) <= 650, "what a reader wants in two minutes"
    for target in re.findall(r"^make (\w+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
