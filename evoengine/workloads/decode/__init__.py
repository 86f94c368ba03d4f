"""Decode attention: a few queries of each sequence over a long cache of keys and values, contiguous or in pages."""

from evoengine.workloads.decode.workload import Decode

WORKLOAD = Decode()
