"""Recipes: settings of known experiments, as TOML files."""

import json
import os
import tomllib
from pathlib import Path
from typing import Any

from common.config.schema import Config, Setting, settings, what_to_give
from common.errors import UserError, file_errors
from common.utils.atomic_files import read_regular
from common.utils.grouping import grouped
from common.utils.paths import RECIPES
from common.utils.registry import choices_text, closest
from common.utils.typed_json import shown

_MOST_BYTES = 2**20


def find_recipe(name: str) -> Path:
    """Return the file of a recipe, given by name or path.

    Raises UserError with the choices if there is no such file.
    """
    is_path = name.endswith(".toml") or os.sep in name
    path = Path(name) if is_path else RECIPES / f"{name}.toml"
    if not os.path.exists(path):
        known = sorted(recipe.stem for recipe in RECIPES.glob("*.toml"))
        what = f"file {path}" if is_path else f"recipe {name!r}"
        raise UserError(
            f"--recipe: there is no {what}: {choices_text(name, known)}; or give a .toml file"
        )
    return path


def read_recipe(path: Path) -> dict[str, Any]:
    """Return a recipe's settings by field name.

    Raises UserError on a key that is unknown, not for recipes or there twice, and on a value of the
    wrong type. ``Config`` checks the rest.
    """
    with file_errors(f"recipe {path} cannot be read"):
        content = tomllib.loads(read_regular(path, most_bytes=_MOST_BYTES).decode())
    known = _recipe_settings()
    found: dict[str, Any] = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name not in known:
            close = closest(name, known)
            hint = f"did you mean {close}?" if close else "--print-config shows the keys"
            raise UserError(f"recipe {path}: unknown key {key!r}; {hint}")
        if name in found:
            raise UserError(
                f"recipe {path}: {name} and {name.replace('_', '-')} are the same setting: give one"
            )
        if wanted := what_to_give(value, known[name]):
            raise UserError(f"recipe {path}: {key}: got {shown(value)}, {wanted}")
        kind = known[name].kind
        found[name] = kind(value) if kind in (Path, float) else value
    return found


def print_recipe(config: Config) -> str:
    """Return a run's settings as the text of a recipe; comments name those that are unset."""
    groups = grouped((known.group, name) for name, known in _recipe_settings().items())
    lines = [f"# {config.part}" + (f", recipe {config.recipe}" if config.recipe else "")]
    for group, names in groups.items():
        lines += ["", f"# {group}"]
        for name in names:
            # TOML writes a string or a number as JSON does.
            text = json.dumps(getattr(config, name), default=str, ensure_ascii=False)
            lines.append(f"# {name} is not set" if text == "null" else f"{name} = {text}")
    return "\n".join(lines)


def _recipe_settings() -> dict[str, Setting]:
    return {name: known for name, known in settings().items() if known.in_recipe}
