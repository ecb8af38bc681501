"""List the packages of the wheel; everything else is in pyproject.toml.

Recipes and courses are next to the code in a checkout, and inside it in a wheel.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["common*", "lab*"]), "common.recipes", "lab.courses"],
    package_dir={"common.recipes": "recipes", "lab.courses": "courses"},
)
