"""A matrix product for each group of rows, as a mixture of experts computes it, with the groups' sizes on the GPU."""

from evoengine.workloads.grouped_gemm.workload import GroupedGemm

WORKLOAD = GroupedGemm()
