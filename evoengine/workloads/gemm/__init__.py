"""Matrix product of halves, FP8 or int8 with an epilogue, C = f(A·B + bias) + residual."""

from evoengine.workloads.gemm.workload import Gemm

WORKLOAD = Gemm()
