"""Fused attention forward, O = softmax(Q·Kᵀ/√head_dim + mask)·V."""

from evoengine.workloads.attention.workload import Attention

WORKLOAD = Attention()
