"""``python -m lab`` is the ``lab`` command, also from a checkout that is not installed."""

import sys

from lab.cli import main

sys.exit(main())
