"""Gather a dataset that arrives in several folders, one a call, and check it."""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from gpu_book.summaries import show


def gather(data: Path, source: Path) -> None:
    """Copy every file of ``source`` into ``data``."""
    shutil.copytree(source, data, dirs_exist_ok=True)
    files = [path for path in data.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    show({"files": len(files), "bytes": size}, f"{len(files)} files, {size / 1e6:.1f} MB in {data}")


def unpack(data: Path, script: str) -> None:
    """Run the script among the gathered files that makes the files that torchvision reads."""
    subprocess.run([sys.executable, str(data / script), "--root", str(data)], check=True)
    show({"script": script}, f"{script} has run")


def check(data: Path) -> None:
    """Show which datasets are whole: torchvision's loader compares the MD5 of each file."""
    from torchvision.datasets import CIFAR10, CIFAR100

    found = {}
    for kind in (CIFAR10, CIFAR100):
        try:
            found[kind.__name__] = f"{len(kind(str(data), train=True)):,} training images"
        except RuntimeError as error:
            found[kind.__name__] = f"not whole ({str(error).splitlines()[0]})"
    show(found, ", ".join(f"{name}: {what}" for name, what in found.items()))
    raise SystemExit(all("not whole" in what for what in found.values()))


def main() -> None:
    """Do one action and print the result."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("action", choices=("gather", "unpack", "check"))
    flags.add_argument("--data", type=Path, required=True, help="folder of the datasets")
    flags.add_argument("--from", dest="source", type=Path, help="folder of this part")
    flags.add_argument("--script", help="name of the unpacking script")
    arguments = flags.parse_args()
    if arguments.action == "gather":
        gather(arguments.data, arguments.source)
    elif arguments.action == "unpack":
        unpack(arguments.data, arguments.script)
    else:
        check(arguments.data)


if __name__ == "__main__":
    main()
