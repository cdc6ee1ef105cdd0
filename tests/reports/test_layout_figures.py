"""Pictures of layouts: a bar for each action of a schedule where it is in time; the memory of each layout."""

import re
from collections import Counter

import numpy as np

from jvarlen.estimates.memory import MemoryEstimate
from jvarlen.parallel import make_schedule
from jvarlen.reports.figures import draw_memory, draw_timelines

NUMBER = r"[\d.]+"


def bars(svg, colour):
    """Left, right and middle height of every bar of a colour, in points."""
    found = []
    for path in re.findall(rf'<path d="([^"]*)"[^>]*fill: var\(--{colour}\)', svg):
        for corners in path.split("z")[:-1]:
            x, y = np.array(re.findall(rf"[ML] ({NUMBER}) ({NUMBER})", corners), float).T
            found.append((x.min(), x.max(), y.mean()))
    return np.array(found)


def words(svg):
    return re.findall(r"<text[^>]*>([^<]+)<", svg)


def test_every_action_is_a_bar_where_it_is_in_time():
    timeline = make_schedule("zero_bubble", 3, 4).simulate({"F": 1, "B": 2, "W": [1, 3, 1]}, "mpmd")
    svg = draw_timelines(timeline)
    kind = timeline.schedule.actions[..., 0]
    drawn = [bars(svg, colour) for colour in ("first", "second", "third")]
    assert [len(each) for each in drawn] == [12, 12, 12]
    left, right, height = np.concatenate(drawn).T
    starts, ends = (
        np.concatenate([times[kind == code] for code in range(3)]) for times in (timeline.starts, timeline.ends)
    )
    scale = (right - left).sum() / (ends - starts).sum()
    np.testing.assert_allclose(left - left.min(), scale * starts, atol=1e-3)
    np.testing.assert_allclose(right - left.min(), scale * ends, atol=1e-3)
    stage = np.concatenate([np.nonzero(kind == code)[0] for code in range(3)])
    levels = np.unique(height.round(3))
    assert len(levels) == 3
    assert np.array_equal(np.searchsorted(levels, height.round(3)), stage)  # the first stage on top
    labels = Counter(words(svg))
    assert all(labels[str(m)] >= 3 * 3 for m in range(4))


def test_titles_tell_schedule_mode_time_and_bubble():
    timelines = [make_schedule("gpipe", 2, 3).simulate({"F": 1, "B": 2}, mode) for mode in ("synchronous", "mpmd")]
    shown = words(draw_timelines(*timelines))
    assert [word for word in shown if "gpipe" in word] == [
        "gpipe, synchronous: 12, bubble 25.0%",
        "gpipe, mpmd: 12, bubble 25.0%",
    ]


def test_chunks_differ_in_darkness():
    svg = draw_timelines(make_schedule("interleaved", 2, 2, 2).simulate({"F": 1, "B": 1}))
    assert len(set(re.findall(r"fill: var\(--first\); fill-opacity: ([\d.]+)", svg))) == 2


def test_every_layout_is_a_row_with_its_total():
    estimates = {
        "data4": MemoryEstimate(2**20, 2**20, 0, 2**21, 0, None),
        "zero1": MemoryEstimate(2**20, 0, 0, 2**19, 0, 2**22),
    }
    found = words(draw_memory(estimates))
    assert {"data4: 4", "zero1: 5.5"} <= {*found}
    assert [word for word in found if word in MemoryEstimate._fields] == ["params", "grads", "opt_state", "activations"]
