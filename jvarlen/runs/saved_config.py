"""The settings of a run in its directory, as asked for and resolved."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import dacite

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.files import RUN_FORMAT, check_run_format, read_object, save_json
from jvarlen._common.types import JsonObject
from jvarlen.data.find_files import is_remote, without_credentials
from jvarlen.runs.config import DirectoryConfig, FitConfig, Scope, is_run_dir

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = [
    "Change", "changed_contents", "changes_between", "default_settings", "kept_settings", "load_config",
    "load_settings", "save_settings", "shared_settings",
]  # fmt: skip


def kept_settings(config: FitConfig) -> JsonObject:
    """The settings as JSON values, without what belongs to a single call."""
    return json.loads(json.dumps(_kept(config), default=str))


def _kept(config: DataclassInstance) -> JsonObject:
    kept: JsonObject = {}
    for field in dataclasses.fields(config):
        if field.metadata.get("scope") != "call":
            value = getattr(config, field.name)
            is_group = dataclasses.is_dataclass(value) and not isinstance(value, type)
            kept[field.name] = _kept(value) if is_group else _without_credentials(value)
    return kept


def save_settings(settings: JsonObject, path: Path) -> None:
    """Writes what `load_settings` reads."""
    save_json({"format": RUN_FORMAT} | settings, path)


def load_settings(path: Path) -> JsonObject:
    """Reads what `save_settings` wrote."""
    try:
        settings = read_object(path, "holds no settings of a run")
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"there is no run to resume: {path} is missing") from None
    if "model_type" in settings:
        raise UserError(f"{path} is the config.json of a model, which is trained as model=")
    check_run_format(settings, path)
    del settings["format"]
    return settings


def load_config(path: Path) -> FitConfig:
    """The saved settings as if all had been asked for; what belongs to a single call is that of this one."""
    try:
        checks = dacite.Config(cast=[Path, tuple], strict=True, check_types=True)
        return dacite.from_dict(FitConfig, load_settings(path), checks)
    except (dacite.DaciteError, ValueError, TypeError, AttributeError) as error:
        if isinstance(error, UserError) and str(path) in str(error):
            raise
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


def changes_between(before: JsonObject, after: JsonObject) -> list[Change]:
    """The settings in which two runs differ."""
    both = zip(_settings(FitConfig, before), _settings(FitConfig, after), strict=True)
    return [Change(name, scope, old, new) for (name, scope, old), (_, _, new) in both if old != new]


def shared_settings(config: FitConfig) -> JsonObject:
    """The settings that all processes have in common, by their dotted names, such as `optimizer.b1`."""
    return {name: value for name, scope, value in _settings(FitConfig, kept_settings(config)) if scope != "process"}


def _settings(
    group: type[DataclassInstance], values: JsonObject, prefix: str = "", scope: Scope = "run"
) -> Iterator[tuple[str, Scope, object]]:
    """Name, scope and value of each setting that a run keeps."""
    for field in dataclasses.fields(group):
        name, field_scope = prefix + field.metadata.get("name", field.name), field.metadata.get("scope", scope)
        if field_scope == "call":
            continue
        made_by: object = field.default_factory
        if isinstance(made_by, type) and dataclasses.is_dataclass(made_by):
            yield from _settings(made_by, values[field.name], field.metadata.get("prefix", f"{name}."), field_scope)
        else:
            yield name, field_scope, values.get(field.name)


def _without_credentials(value: object) -> object:
    """The value of a setting without the credentials of its URLs."""
    is_urls = isinstance(value, tuple) and any(isinstance(each, str) and is_remote(each) for each in value)
    return tuple(map(without_credentials, value)) if is_urls and isinstance(value, tuple) else value


def _show(value: object) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
