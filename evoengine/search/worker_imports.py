"""Imports of workers that compile and emulate, made once by the process from which they are forked.

Nothing here may start a thread or CUDA, which a fork does not survive.
"""

import os
from importlib import import_module

from evoengine.sandbox.worker_process import ONE_THREAD

os.environ.update(ONE_THREAD)  # before the libraries read it
for module in ("compile", "gate", "predict"):
    import_module(f"evoengine.stages.{module}")
for module in ("folder", "folder_tensors"):
    import_module(f"evoengine.workloads.{module}")
