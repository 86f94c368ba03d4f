"""What a kernel reads of its launch: sizes of block, grid, cluster and dynamic shared memory, and generic addresses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from evoengine.devices.base import ScalarArgument, TensorArgument
from evoengine.sass.core import run
from evoengine.sass.launch import Geometry, prepare
from tests.support.exhaustive import more
from tests.support.machine_code import ARCHS, compiled

SIZES = r"""
extern "C" __global__ void kernel(unsigned* o) {
  unsigned dynamic, x, y, z, clusters_x, clusters_y, blocks;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(dynamic));
  unsigned found[] = {blockDim.x, blockDim.y, blockDim.z, gridDim.x, gridDim.y, gridDim.z, dynamic};
#ifdef CLUSTERS
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(x));
  asm("mov.u32 %0, %%cluster_nctaid.y;" : "=r"(y));
  asm("mov.u32 %0, %%cluster_nctaid.z;" : "=r"(z));
  asm("mov.u32 %0, %%nclusterid.x;" : "=r"(clusters_x));
  asm("mov.u32 %0, %%nclusterid.y;" : "=r"(clusters_y));
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  unsigned more[] = {x, y, z, clusters_x, clusters_y, blocks};
  for (int i = 0; i < 6; i++) o[7 + i] = more[i];
#endif
  for (int i = 0; i < 7; i++) o[i] = found[i];
}
"""
ADDRESSES = r"""
extern "C" __global__ void kernel(const int* in, int* out, int n) {
  extern __shared__ int dynamic[];
  __shared__ int fixed[32];
  int local[32];
  for (int i = 0; i < 32; i++) local[i] = in[i + n], fixed[i] = 100 + i, dynamic[i] = 200 + i;
  int* places[] = {local, fixed, dynamic, out + 64};
  for (int i = 0; i < 3; i++) {
    volatile int* at = places[(in[0] + i) % 3] + n + i;
    *at += 1000;
    out[i] = *at;
  }
  out[3] = __isLocal(places[in[0] % 3]) + 2 * __isShared(places[(in[0] + 1) % 3]) + 4 * __isGlobal(places[3]);
}
"""


def ran(text, arch, geometry, arguments, cluster=(1, 1, 1)):
    kernel, program = compiled(text, arch)
    launch = prepare(replace(kernel, cluster=cluster), geometry, arguments, 0)
    run(program, launch)
    return launch.results()


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120", *more(["sm_75", "sm_80", "sm_89"])])
def test_a_kernel_reads_the_sizes_of_its_launch(arch):
    o = TensorArgument("o", np.zeros(13, np.uint32), output=True)
    has_clusters = arch not in ("sm_75", "sm_80", "sm_89")
    text = "#define CLUSTERS\n" * has_clusters + SIZES
    cluster = (2, 1, 1) if has_clusters else (1, 1, 1)
    found = ran(text, arch, Geometry((4, 3, 2), (8, 4, 1), 1040), [o], cluster)["o"]
    assert found[:7].tolist() == [8, 4, 1, 4, 3, 2, 1040]
    if has_clusters:
        assert found[7:].tolist() == [2, 1, 1, 2, 3, 2]


@pytest.mark.parametrize("arch", ["sm_120", *more([a for a in ARCHS if a != "sm_120"])])
def test_generic_addresses_lead_to_local_shared_and_global_memory(arch):
    given = [
        TensorArgument("in", np.arange(40, dtype=np.int32)),
        TensorArgument("out", np.zeros(96, np.int32), output=True),
    ]
    out = ran(ADDRESSES, arch, Geometry((1, 1, 1), (1, 1, 1), 128), [*given, ScalarArgument("n", np.int32(5))])["out"]
    assert out[:4].tolist() == [1000 + 10, 1000 + 106, 1000 + 207, 7]
