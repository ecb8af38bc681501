"""A program that is forked ends as a new interpreter would, and leaves its supervisor alone."""

import os
import tempfile
from pathlib import Path

from lab.cluster.program import PythonProgram, reset_forked_state
from lab.proofs import ranks

ENDS = """
import pathlib, weakref
class Held: pass
held = Held()
weakref.finalize(held, pathlib.Path(__file__).with_name("own").touch)
"""


def supervise(script):
    """Fork the program with a temporary folder open, and note whether the folder stays."""
    with tempfile.TemporaryDirectory() as folder:
        program = os.fork()
        if program == 0:
            reset_forked_state({"OMP_NUM_THREADS": "1"}, script)
            PythonProgram(str(script), (), module=False).run()
        os.waitpid(program, 0)
        if os.path.isdir(folder):
            script.with_name("kept").touch()


def test_a_program_runs_its_own_exit_handlers_and_not_those_of_its_supervisor(tmp_path):
    script = Path(tmp_path / "main.py")
    script.write_text(ENDS)
    supervisor = ranks.context().Process(target=supervise, args=[script])
    supervisor.start()
    supervisor.join(60)
    assert {path.name for path in tmp_path.iterdir()} == {"main.py", "own", "kept"}
