"""The packages of the wheel; all else is in pyproject.toml.

Recipes lie beside the code in a checkout, and within it in a wheel.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["common*", "lab*"]), "common.recipes"],
    package_dir={"common.recipes": "recipes"},
)
