"""The output of processes on emulated nodes and hosts."""
