"""Fused attention backward: the gradients of Q, K and V of O = softmax(Q·Kᵀ/√head_dim + mask)·V."""

from evoengine.workloads.attention_backward.workload import AttentionBackward

WORKLOAD = AttentionBackward()
