"""2-D convolution in float32, "valid": every output sees a whole window of the image."""

from evoengine.workloads.convolution.workload import Convolution

WORKLOAD = Convolution()
