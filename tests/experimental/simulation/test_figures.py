"""Pictures of simulated runs: a bar for each cause, throughput over time, and a mark for each failure."""

import re

import numpy as np
import pytest

import jvarlen
from jvarlen.estimates.cluster import Cluster
from jvarlen.estimates.step_seconds import StepSeconds
from jvarlen.experimental.simulation import Failures, draw_simulation, simulate
from jvarlen.parallel import Layout

PLAN = jvarlen.make_plan(np.full(64, 8), [(4, 8)], order="length", num_microbatches=2)
PARTS = StepSeconds(*np.array([[5.0], [1], [0], [0], [0], [2], [0]]))


def run(num_steps, **options):
    return simulate(PLAN, Layout(data=2), Cluster.named("dgx-h100"), seconds=PARTS, num_steps=num_steps, **options)


def words(svg):
    return re.findall(r"<text[^>]*>([^<]+)<", svg)


def test_causes_are_named_with_their_shares_and_failures_are_marked():
    done = run(3000, noise=0.1, failures=Failures(mean_seconds_between=4000, restart_s=50), checkpoint_every_steps=20)
    svg = draw_simulation(done)
    shown = words(svg)
    for cause in ("compute", "bubble", "jitter", "data", "lost work", "restarts"):
        assert f"{cause} {done.share(cause):.1%}" in shown
    assert not [word for word in shown if re.match("tensor|spares|stragglers|start ", word)]
    assert f"{done.tokens_per_second:,.0f} tokens/s in the mean, {done.num_failures} failures" in shown
    assert "hours" in shown
    (mark,) = set(re.findall(r'<use xlink:href="#(\w+)"[^>]*stroke: var\(--fifth\)', svg))
    assert svg.count(f'href="#{mark}"') == done.num_failures > 3


@pytest.mark.parametrize(("num_steps", "unit"), [(1, "seconds"), (40, "minutes"), (50_000, "days")])
def test_runs_of_any_length_are_drawn(num_steps, unit):
    assert unit in words(draw_simulation(run(num_steps)))
