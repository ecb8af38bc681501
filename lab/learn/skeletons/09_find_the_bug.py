"""Lesson 9: twelve training scripts with one fault each. Which one?

Run it: python learn/09_find_the_bug.py
It writes the scripts into learn/blind/. Read each, decide, and only then let the audit look.
"""

from pathlib import Path

from lab.learn.lessons.find_the_bug import write_scripts

# The faults, each once:
# averaged too little: own-gradient, some-parameters, ddp-bypassed, stale-gradient
# averaged wrongly: sum-not-mean, literal-divisor, scaled-in-loss, clipped-before-averaging
# something else: weights-averaged, different-start, same-samples, same-order
ANSWERS = {
    "01": ...,
    "02": ...,
    "03": ...,
    "04": ...,
    "05": ...,
    "06": ...,
    "07": ...,
    "08": ...,
    "09": ...,
    "10": ...,
    "11": ...,
    "12": ...,
    # On which number of ranks can nobody see the fault of 02, however he looks?
    "a": ...,
    # At the end of a step, in how many of the twelve do the ranks hold different weights?
    "b": ...,
    # Of the gallery's numbers 2 to 10: how many do neither loss nor accuracy show?
    "c": ...,
}

if __name__ == "__main__":
    write_scripts(Path(__file__).with_name("blind"))
