"""Write the fitted values into priors.toml: ``python -m lab.predict.fit_priors``.

Run it after a change to the formulas, to a prior or to published.csv.
"""

from collections.abc import Mapping
from pathlib import Path

from lab.predict.priors import Prior, priors_path
from lab.predict.validation import fitted_to, shipped_rows


def main() -> None:
    """Fit the priors to all measurements that come with the project, and write them."""
    write_fitted(priors_path(), {prior.name: prior for prior in fitted_to(shipped_rows()).priors})


def write_fitted(path: Path, fitted: Mapping[str, Prior]) -> None:
    """Write ``fitted = [low, typical, high]`` below each prior, in place of an earlier one."""
    lines = []
    name = ""
    for line in path.read_text().splitlines():
        if line.startswith("fitted = "):
            continue
        lines.append(line)
        if line.startswith("["):
            name = line.strip("[]")
        elif line.startswith("prior = "):
            lines.append(_line(fitted[name]))
    path.write_text("\n".join(lines) + "\n")


def _line(prior: Prior) -> str:
    rounded = [float(f"{value:.3g}") for value in (prior.low, prior.typical, prior.high)]
    return f"fitted = [{', '.join(f'{value:g}' for value in rounded)}]"


if __name__ == "__main__":
    main()
