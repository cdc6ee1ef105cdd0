"""The settings of a run in its directory, as asked for and resolved."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import dacite

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.files import RUN_FORMAT, check_run_format, read_object, save_json
from jvarlen._common.types import JsonObject
from jvarlen.data.find_files import is_remote, without_credentials
from jvarlen.runs.config import DirectoryConfig, FitConfig, Scope, is_run_dir

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = [
    "Change", "Setting", "changed_contents", "changes_between", "default_settings", "kept_settings", "load_config",
    "save_config", "settings_of",
]  # fmt: skip


class Setting(NamedTuple):
    """A setting that a run keeps."""

    path: tuple[str, ...]  # names of fields
    name: str  # dotted, such as `optimizer.b1`
    scope: Scope
    value: object  # without the credentials of URLs


def settings_of(
    config: DataclassInstance, path: tuple[str, ...] = (), prefix: str = "", scope: Scope = "run"
) -> Iterator[Setting]:
    """The settings that a run keeps: all but those of a single call."""
    for field in dataclasses.fields(config):
        here, field_scope = (*path, field.name), field.metadata.get("scope", scope)
        if field_scope == "call":
            continue
        value, group = getattr(config, field.name), field.default_factory
        name = prefix + field.metadata.get("name", field.name)
        if isinstance(group, type) and dataclasses.is_dataclass(group):
            yield from settings_of(value, here, field.metadata.get("prefix", f"{name}."), field_scope)
        else:
            yield Setting(here, name, field_scope, _without_credentials(value))


def kept_settings(config: FitConfig) -> JsonObject:
    """These settings as JSON values, in groups."""
    kept: JsonObject = {}
    for setting in settings_of(config):
        group = kept
        for name in setting.path[:-1]:
            group = group.setdefault(name, {})
        group[setting.path[-1]] = setting.value
    return json.loads(json.dumps(kept, default=_plain))


def save_config(config: FitConfig, path: Path) -> None:
    """Writes what `load_config` reads."""
    save_json({"format": RUN_FORMAT} | kept_settings(config), path)


def load_config(path: Path) -> FitConfig:
    """The saved settings as if all had been asked for; what belongs to a single call is that of this one."""
    try:
        settings = read_object(path, "holds no settings of a run")
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"there is no run to resume: {path} is missing") from None
    if "model_type" in settings:
        raise UserError(f"{path} is the config.json of a model, which is trained as model=")
    check_run_format(settings, path)
    del settings["format"]
    try:
        checks = dacite.Config(cast=[Path, tuple], strict=True, check_types=True)
        return dacite.from_dict(FitConfig, settings, checks)
    except (dacite.DaciteError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path} holds no settings of a run: {error}") from error


def changed_contents(run_dir: Path, content_keys: Mapping[str, str]) -> list[str]:
    """The files of the run's data and tokenizer that had other content keys when it began."""
    path = run_dir / "data.json"
    try:
        saved = read_object(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing: it names the data of the run") from None
    if unknown := sorted(content_keys.keys() - saved.keys()):
        raise UserError(f"{path} is damaged: it has no content key of {list_first(unknown)}")
    return [name for name, key in content_keys.items() if saved[name] != key]


def default_settings(args: Sequence[str]) -> FitConfig:
    """The defaults of `jvarlen train`: the settings of the run that these arguments continue, if they name one."""
    for name, following in itertools.pairwise([*args, ""]):
        name, _, value = name.partition("=")
        run_dir = Path(value or following)
        if (value or following) and (name == "--resume" or (name == "--run-dir" and is_run_dir(run_dir))):
            found = DirectoryConfig(resume=run_dir) if name == "--resume" else DirectoryConfig(run_dir=run_dir)
            return dataclasses.replace(load_config(run_dir / "config.json"), directory=found)
    return FitConfig()


class Change(NamedTuple):
    """A setting in which two runs differ, with its values."""

    name: str
    scope: Scope
    before: object
    after: object

    def __str__(self) -> str:
        return f"{self.name}: {_show(self.before)}, {_show(self.after)}"


def changes_between(before: FitConfig, after: FitConfig) -> list[Change]:
    """The settings in which two runs differ."""
    both = zip(settings_of(before), settings_of(after), strict=True)
    return [Change(old.name, old.scope, old.value, new.value) for old, new in both if old.value != new.value]


def _plain(value: Any) -> object:
    return str(value) if isinstance(value, Path) else dataclasses.asdict(value)


def _without_credentials(value: object) -> object:
    """The value of a setting without the credentials of its URLs."""
    is_urls = isinstance(value, tuple) and any(isinstance(each, str) and is_remote(each) for each in value)
    return tuple(map(without_credentials, value)) if is_urls and isinstance(value, tuple) else value


def _show(value: object) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)
