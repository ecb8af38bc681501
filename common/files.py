"""Files that are there whole or not at all."""

import os
import tempfile
from pathlib import Path

from common.errors import UserError


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Write a file that is there whole or not at all, also after a crash or a full disk; UserError where it fails."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = file.name
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())  # a temporary file is for its owner alone
        os.replace(temporary, path)
        temporary = None
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise UserError(f"{path} could not be written ({error.strerror or error}): make room or permit writing there, or "
                        "give another --output-dir; earlier files are untouched") from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
