"""Settings are checked by the types of their fields, whatever made them."""

import dataclasses

import pytest

from jvarlen import Budget, CompileOptions, CostModel, FitConfig, Order
from jvarlen.distributed.launch import DeviceConfig
from jvarlen.distributed.layout import Layout
from jvarlen.estimates.cluster import Cluster, Link
from jvarlen.models import DecoderConfig
from jvarlen.models.config import RotaryScaling
from jvarlen.runs.commands.measure import MeasureCommand
from jvarlen.runs.commands.plan import PlanCommand
from jvarlen.runs.commands.sample import SampleCommand
from jvarlen.runs.config import CheckpointConfig, DataConfig, DirectoryConfig, HardwareConfig, OptimizerConfig
from jvarlen.runs.plan_config import PlanConfig

SETTINGS = [
    Budget(max_tokens=8), Order(), PlanConfig(), FitConfig(), DataConfig(), OptimizerConfig(), CheckpointConfig(),
    DirectoryConfig(), HardwareConfig(), DeviceConfig(), CompileOptions(), DecoderConfig(), Layout(),
    RotaryScaling(factor=2.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=8),
    CostModel(0.0, 1.0, 0.0), Link(1e9), Cluster.named("dgx-h100"), PlanCommand(), MeasureCommand(),
    SampleCommand(directory="run"),
]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda each: type(each).__name__)
def test_a_value_of_no_type_of_its_field_is_refused_by_name(settings):
    for field in dataclasses.fields(settings):
        if field.name != "by":  # anything that NumPy takes for an array
            with pytest.raises(ValueError, match=rf"\b{field.name} \(Ellipsis\) must be "):
                dataclasses.replace(settings, **{field.name: ...})
