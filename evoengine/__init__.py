"""evoengine finds the fastest correct CUDA kernel for a GPU and a problem."""

__version__ = "0.1.0"
