"""Dynamic shared memory begins behind the static variables, at the alignment that its declarations state."""

import pytest

from evoengine.devices.base import KernelCrashed

PLACE = """
__device__ float helper(int i) { HELPER return 0; }
extern "C" __global__ void f(float* o) {
    STATIC
    extern __shared__ DYNAMIC shared[];
    o[threadIdx.x] = (unsigned)__cvta_generic_to_shared(shared);
    *(volatile char*)&shared[0] = 1;
    if ((unsigned long long)&shared[0] % 1024 != (unsigned)o[threadIdx.x] % 1024) __trap();
}
"""


def begins(emulate, floats, static, dynamic, helper="", seed=0):
    text = PLACE.replace("STATIC", static).replace("DYNAMIC", dynamic).replace("HELPER", helper)
    o = emulate(text, floats(32), shared=4096, seed=seed)["o"]
    assert (o == o[0]).all()
    return int(o[0])


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("static", "dynamic", "start"),
    [
        ("", "char", 0),
        ("", "__align__(1024) char", 0),
        ("__shared__ int a;", "char", 16),
        ("__shared__ int a[4];", "unsigned char", 16),
        ("__shared__ int a[5];", "float", 32),
        ("__shared__ int a[4];", "__align__(128) char", 128),
        ("__shared__ int a[4];", "__align__(1024) char", 1024),
        ("__shared__ char a; __shared__ double b;", "char", 16),
        ("__shared__ char a; __shared__ __align__(64) char b;", "char", 80),
        ("__shared__ int a[300];", "alignas(256) float4", 1280),
    ],
)
def test_it_begins_where_the_declarations_put_it(emulate, floats, static, dynamic, start, seed):
    used = "".join(f"*(volatile char*)&{name} = 0; " for name in "ab" if f" {name}" in static)
    assert begins(emulate, floats, static + used, dynamic, seed=seed) == start


def test_the_strictest_of_several_declarations_counts(emulate, floats):
    static = "__shared__ int a; a = 0;"
    helper = "extern __shared__ __align__(512) char other[]; other[i] = 0;"
    assert begins(emulate, floats, static, "char", helper) == 512


def test_bytes_before_and_behind_it_are_guarded(emulate, floats):
    for seed in (0, 1):
        for offset in (-1, 4096):
            static = f"__shared__ int a; a = 0; extern __shared__ char all[]; all[{offset}] = 1;"
            with pytest.raises(KernelCrashed, match=f"out-of-bounds write to shared memory at offset {offset} of 4096"):
                begins(emulate, floats, static, "char", seed=seed)
