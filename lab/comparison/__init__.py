"""The record of a comparison: what ``lab compare`` makes, and what the report and others read.

record.py has the types of ``results.json``, and cell.py what a cell is and how its numbers follow
from its repeats.
"""
