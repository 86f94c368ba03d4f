"""Attention forward over a batch of sequences of unlike lengths, packed without padding; K and V packed or paged."""

from evoengine.workloads.varlen.workload import Varlen

WORKLOAD = Varlen()
