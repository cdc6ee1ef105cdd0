"""Settings of runs, changed by name."""

import dataclasses


def changed(config, **settings):
    """A `FitConfig` with other settings, each by its own name, whichever group holds it."""
    groups = {}
    for group in ("data", "hardware", "checkpoints", "directory"):
        own = getattr(config, group)
        names = {field.name for field in dataclasses.fields(own)} & settings.keys()
        groups[group] = dataclasses.replace(own, **{name: settings.pop(name) for name in names})
    return dataclasses.replace(config, **groups | settings)
