"""What the host of a GPU launches in a step, from the texts of XLA."""

import pytest

from jvarlen.targets.dump import Dump, Launches, count_launches

PROGRAM = """
  %while.1 = (s32[]) while(%t), condition=%c, body=%b, backend_config={"known_trip_count":{"n":"4"},"x":[]}
  ROOT %while.2 = (s32[]) while(%u), condition=%d, body=%e, backend_config={"known_trip_count":{"n":"3"}}
"""
NAMES = "".join(
    f'thunk_metadata {{\n  thunk_info {{\n    profile_annotation: "{name}"\n    thunk_id: {number}\n  }}\n}}\n'
    for name, number in [("copy.9", 1), ("while.1", 2), ("while.2", 8)]
)
LAUNCHES = """001: kCopy         [source | sink] kCopy
002: kWhile        [prev=001 (1) | sink]
condition:
    003: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1] threads: [1, 1, 1]
  body:
    005: kAsyncStart   [source | sink] stream=communication_stream[0], async_id=5
        004: kReduceScatter [source | sink] kReduceScatter
    006: kDynamicSliceFusion [source | sink] params=1, results=1
        007: kCopy [source | sink] kCopy
    008: kWhile        [source | sink]
condition:
        009: kCustomKernel [source | sink] loop_compare_fusion_1
      body:
        000: kCommandBuffer [source | sink]
            010: kCustomKernel [source | sink] loop_add_fusion
            011: kCopy [source | sink] kCopy
        012: kCuDnn [source | sink] kCuDnn
    013: kAsyncDone [source | sink] async_id=5
014: kCustomKernel [source | sink] loop_add_fusion_2
015: kMemset32BitValue [source | sink]
000: kCommandBuffer [source | sink]
    016: kWhile [source | sink]
condition:
        017: kCustomKernel [source | sink] loop_compare_fusion_2
      body:
        018: kCustomKernel [source | sink] loop_add_fusion_3
"""


def launches_of(launches=LAUNCHES, program=PROGRAM):
    return count_launches(Dump(program, launches=launches, launch_names=NAMES))


def test_launches_are_multiplied_by_the_turns_of_loops_and_graphs_take_along_what_they_hold():
    assert launches_of() == Launches(kernels=12 + 1, copies=1 + 4 + 1, collectives=4, graphs=12 + 1)


@pytest.mark.parametrize(
    "change",
    [
        (LAUNCHES, PROGRAM.replace("known_trip_count", "other")),
        (LAUNCHES + "019: kConditional [source | sink]\n", PROGRAM),
        ("", PROGRAM),
    ],
)
def test_launches_that_depend_on_values_or_of_other_devices_are_not_known(change):
    assert launches_of(*change) is None
