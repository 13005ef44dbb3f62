"""What is printed on a disk that is full."""

from __future__ import annotations

import io
import subprocess
import sys

from flight.output import LastingOutput


def test_output_that_works_gets_everything():
    """Nothing is lost, and all else is the stream's own."""
    text = io.StringIO()
    output = LastingOutput(text)
    assert output.write("a line\n") == 7
    output.flush()
    assert (output.getvalue(), output.num_lost) == ("a line\n", 0)


def test_program_that_keeps_printing_outlives_its_log():
    """It prints to a full disk, goes on, and counts what was lost."""
    code = "import sys; from flight.output import keep_printing; keep_printing(); keep_printing()\n"
    code += "print('lost', flush=True); print('too', file=sys.stderr, flush=True); "
    code += "sys.exit(sys.stdout.num_lost + sys.stderr.num_lost)"
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=full, timeout=60, check=False)
    assert done.returncode >= 2
