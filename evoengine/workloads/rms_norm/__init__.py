"""RMS normalisation fused with a residual add: residual_out = x + residual, y = rms_norm(residual_out)·weight."""

from evoengine.workloads.rms_norm.workload import RmsNorm

WORKLOAD = RmsNorm()
