"""``python -m lab.ssh`` serves one request on a host; ``lab`` starts it there over ssh."""

from common.utils.dependencies import check_dependencies

check_dependencies(("-m", "lab.ssh"))

from lab.ssh.node import main  # noqa: E402 - only after the check

main()
