"""What benchmarks/gpu.py runs: the runner, the plan of the stages, and the measuring programs.

gpu.py starts the programs and sets their PYTHONPATH; by hand, from the repository's folder:

    PYTHONPATH=.:benchmarks python benchmarks/gpu_book/steps.py waits
"""
