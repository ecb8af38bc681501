"""Recipes: settings of known experiments, as TOML files."""

import json
import tomllib
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from common.config.schema import EXPECTED, Config, has_type, or_word
from common.errors import UserError
from common.utils.atomic_files import read_regular
from common.utils.grouping import grouped
from common.utils.paths import RECIPES
from common.utils.registry import choices_text, closest

_MOST_BYTES = 2**20


def find_recipe(name: str) -> Path:
    """Return the file of a recipe, given by name or path.

    Raises UserError with the choices if there is no such file.
    """
    path = Path(name) if name.endswith(".toml") else RECIPES / f"{name}.toml"
    if not path.is_file():
        known = sorted(recipe.stem for recipe in RECIPES.glob("*.toml"))
        what = f"file {path}" if name.endswith(".toml") else f"recipe {name!r}"
        raise UserError(
            f"--recipe: there is no {what}: {choices_text(name, known)}; or give a .toml file"
        )
    return path


def read_recipe(path: Path) -> dict[str, Any]:
    """Return a recipe's settings by field name.

    Raises UserError on a key that is unknown or not for recipes, and on a value of the wrong type.
    ``Config`` checks the rest.
    """
    try:
        content = tomllib.loads(read_regular(path, most_bytes=_MOST_BYTES).decode())
    # ValueError: not TOML, not UTF-8, or a number of 5000 digits
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"recipe {path} cannot be read: {error}") from error
    specs = {spec.name: spec.metadata for spec in _recipe_fields()}
    settings = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name not in specs:
            close = closest(name, specs)
            hint = f"did you mean {close}?" if close else "--print-config shows the keys"
            raise UserError(f"recipe {path}: unknown key {key!r}; {hint}")
        kind, is_word = specs[name]["type"], value == specs[name]["word"]
        if not has_type(value, kind) and not is_word:
            expected = "a text in quotes" if kind in (str, Path) else EXPECTED[kind]
            raise UserError(
                f"recipe {path}: {key} = {value!r}, give {expected}{or_word(specs[name])}"
            )
        # By way of str: float("1" + 400 * "0") is inf, but float(10**400) raises OverflowError.
        converted = kind in (Path, float) and not is_word
        settings[name] = kind(str(value)) if converted else value
    return settings


def print_recipe(config: Config) -> str:
    """Return a run's settings as the text of a recipe; comments name those that are unset."""
    groups = grouped((spec.metadata["group"], spec.name) for spec in _recipe_fields())
    lines = [f"# {config.part}" + (f", recipe {config.recipe}" if config.recipe else "")]
    for group, names in groups.items():
        lines += ["", f"# {group}", *(_recipe_line(name, getattr(config, name)) for name in names)]
    return "\n".join(lines)


def _recipe_line(name: str, value: Any) -> str:
    # TOML writes a string or a number as JSON does.
    text = json.dumps(value, default=str, ensure_ascii=False)
    return f"# {name} is not set" if value is None else f"{name} = {text}"


def _recipe_fields() -> "list[Field[Any]]":
    return [spec for spec in fields(Config) if spec.metadata and spec.metadata["in_recipe"]]
