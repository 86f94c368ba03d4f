"""Operators on the rows of a tensor: norms, softmax, cross-entropy, rotary positions, gated activations."""

from evoengine.workloads.rowwise.workload import Rowwise

WORKLOAD = Rowwise()
