"""Matrix product in half precision with an epilogue, C = f(A·B + bias)."""

from evoengine.workloads.gemm.workload import Gemm

WORKLOAD = Gemm()
