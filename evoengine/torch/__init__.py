"""Call tuned kernels from torch: custom operators that choose the best kernel of a ledger, an export or a server.

    import evoengine.torch

    evoengine.torch.use("evoengine.db", "out", "https://tuner.example")
    out = evoengine.torch.attention(q, k, v, causal=True)

Each operator looks once for a kernel of the tensors' GPU, dtypes and shapes, in the order of the places, and calls
torch where there is none, which it says once. All of them can be compiled with `fullgraph=True`, captured in CUDA
graphs once they were called, and differentiated: attention by a tuned backward pass where there is one, the others by
torch's own kernels.
"""

from evoengine.torch.kernels import NoKernel, use
from evoengine.torch.operators import attention, linear, op, rms_norm
from evoengine.torch.patching import Patched, patch, unpatch

__all__ = ["NoKernel", "Patched", "attention", "linear", "op", "patch", "rms_norm", "unpatch", "use"]
