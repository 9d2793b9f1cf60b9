"""The tests. Side by side, each process computes in one thread: two that wait for each other take longer."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
