"""Arguments of a kernel given as a string, read from its signature."""

from __future__ import annotations

import re
from dataclasses import replace

from evoengine.devices.base import ScalarArgument, ScratchArgument, TensorArgument, TensorMapArgument

SIGNATURE = re.compile(r"__global__\s+void\s+(?:__(?:launch_bounds|cluster_dims)__\([^)]*\)\s*)*(\w+)\(([^)]*)\)")


def argument(parameter, value):
    name = re.search(r"(\w+)\s*$", parameter)[1]
    if isinstance(value, TensorArgument | TensorMapArgument | ScratchArgument):
        return replace(value, name=name)
    if "*" not in parameter:
        return ScalarArgument(name, value)
    return TensorArgument(name, value, output="const" not in parameter)
