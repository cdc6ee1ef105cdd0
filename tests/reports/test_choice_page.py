"""The page of a chosen layout: true, and readable in a browser at two widths."""

import dataclasses
import json

import numpy as np
import optax
import pytest

import jvarlen
from jvarlen import Bucket, choose_layout
from jvarlen.cli import main
from jvarlen.models import DecoderConfig, layered
from jvarlen.models.decoder import param_shapes
from jvarlen.models.hugging_face_config import hugging_face_fields
from jvarlen.reports.choice_page import write_choice_page
from jvarlen.targets import Cluster
from tests.browser import measured, num_pixels_of, render
from tests.html_pages import Page

MODEL = DecoderConfig(num_layers=4, width=64, num_heads=2, vocab_size=256)
LENGTHS = np.random.default_rng(0).integers(1, 65, 300)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    path = tmp_path_factory.mktemp("choice") / "choice.html"
    plan = jvarlen.make_plan(LENGTHS, [Bucket(8, 32), Bucket(4, 64)], order="length", microbatches_per_step=8)
    cluster = dataclasses.replace(Cluster.preset("dgx-h100"), devices_per_host=4)
    fixed = {"stage": 1, "context": 1}
    options = {"params": param_shapes(MODEL), "memory_bytes": 8 * 10**6, "fixed": fixed}
    choice = choose_layout(plan, layered(MODEL), optax.adamw(1e-3), cluster, **options)
    write_choice_page(path, plan, choice, cluster)
    return path, choice


def test_the_page_holds_the_choice_and_why_others_were_rejected(drawn):
    path, choice = drawn
    page = Page(path.read_text(encoding="utf-8"))
    assert {attrs["id"] for attrs in page.named("figure")} == {"seconds", "bytes"}
    cells = {row[0]: row[1:] for row in page.cells}
    for layout in choice.candidates.layouts(40):
        assert str(layout) in cells
    assert [cells[reason] for reason, _ in choice.candidates.rejections()] == [
        [f"{number:,}"] for _, number in choice.candidates.rejections()
    ]
    assert choice.why() in page.text


@pytest.mark.slow
def test_a_reader_sees_the_page_in_a_browser(drawn):
    path, _ = drawn
    seen = render(path)
    assert seen.complaints == []
    assert num_pixels_of(seen.pixels, "#c8590a") > 100  # the line of what a device has
    for width in (1280, 390):
        layout = measured(path, width=width)
        assert {box["figure"] for box in layout["pictures"]} == {"seconds", "bytes"}
        assert all(box["width"] > 250 and box["height"] > 120 for box in layout["pictures"])
        assert layout["clipped"] == []
        assert layout["page_width"] <= width


def test_the_command_prints_the_table_and_writes_the_page(tmp_path, capsys):
    np.save(tmp_path / "lengths.npy", LENGTHS)
    few = dataclasses.replace(MODEL, num_layers=3, num_heads=1)  # that few layouts take
    (tmp_path / "model.json").write_text(json.dumps(hugging_face_fields(few, "bfloat16")))
    page = tmp_path / "page.html"
    args = ["plan", str(tmp_path / "lengths.npy"), "--max-tokens", "256", "--max-shapes", "2"]
    args += ["--microbatches-per-step", "8"]
    dataclasses.replace(Cluster.preset("dgx-h100"), devices_per_host=2).save(tmp_path / "cluster.json")
    args += ["--cluster", str(tmp_path / "cluster.json"), "--model", str(tmp_path / "model.json"), "--html", str(page)]
    assert main(args) == 0
    said = capsys.readouterr().out
    assert "times the best" in said
    assert "on 2 devices" in page.read_text()
