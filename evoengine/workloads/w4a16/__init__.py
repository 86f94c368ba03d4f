"""A matrix product of 16-bit activations by weights of 4 bits, as GPTQ stores them."""

from evoengine.workloads.w4a16.workload import W4A16

WORKLOAD = W4A16()
