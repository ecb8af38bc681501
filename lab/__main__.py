"""``python -m lab`` is the ``lab`` command, also from a checkout that is not installed."""

import sys

from common.utils.dependencies import check_dependencies

# Without torch, lab doctor says what to install.
check_dependencies(("-m", "lab", *sys.argv[1:]), optional=("torch", "torchvision"))

from lab.cli import main  # noqa: E402 - only after the check

sys.exit(main())
