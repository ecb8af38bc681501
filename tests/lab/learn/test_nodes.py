"""What a student's program gets on emulated nodes."""

from lab.learn.lessons.nodes import run_on_nodes

PRINTS = "import sys; print(sys.argv[2:])"


def test_a_program_in_a_folder_with_a_blank_gets_its_place(tmp_path):
    program = tmp_path / "my lab" / "04_root_link.py"
    program.parent.mkdir()
    program.write_text(PRINTS)
    printed = run_on_nodes(program, 2, ["20"], loopback=True)
    assert printed == ["['2', '0', '20']", "['2', '1', '20']"]
