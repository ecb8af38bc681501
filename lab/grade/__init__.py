"""Grade submissions: unpack, run each part under the audit in a sandbox, mark by a rubric, report.

``cli`` has the flags and ``grade`` the whole walk. ``rubric`` reads what is asked for and what a
finding costs, ``submissions`` what was handed in, which ``unpack`` copies. ``sandbox`` holds a
stranger's processes, and ``part`` is the program that audits one part in it and writes its
``facts``. ``marks`` turns these into a mark, and ``pages`` and ``gradescope`` write what people
read.
"""
