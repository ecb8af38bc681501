"""The record of a comparison: what ``lab compare`` makes, and what the report and others read.

record.py has the types of ``results.json``, cell.py what a cell is and how its numbers follow from
its repeats, and run_files.py what a run's folder holds.
"""
