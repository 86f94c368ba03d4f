"""Rounds: kernels one after the other over the same memory, launched again and again with new inputs."""

import numpy as np
import pytest

from evoengine.devices.base import KernelCrashed
from tests.support.exhaustive import more

ADD = """
extern "C" __global__ void add(const float* a, float* sum, float* o) {
    sum[threadIdx.x] += a[threadIdx.x];
    o[threadIdx.x] = sum[threadIdx.x];
}
"""


def arange(n=32, start=0):
    return np.arange(start, start + n, dtype=np.float32)


def test_scratch_memory_keeps_its_contents_from_round_to_round_and_inputs_are_new(emulate_rounds, scratch, floats):
    def call(a):
        return [("add", a, scratch(128), floats(32))]

    done = emulate_rounds(ADD, [call(arange()), call(arange(start=100)), call(arange())])
    firsts = [tensors["o"][0] for tensors in done.tensors]
    assert firsts == [0, 100, 100]
    np.testing.assert_array_equal(done.tensors[1]["a"], arange(start=100))
    assert not done.unwritten


def test_scratch_memory_that_is_not_zeroed_holds_nan(emulate_rounds, scratch, floats):
    done = emulate_rounds(ADD, [[("add", arange(), scratch(128, zeroed=False), floats(32))]])
    assert np.isnan(done.tensors[0]["o"]).all()


def test_outputs_are_poisoned_whatever_the_argument_holds_and_keep_what_an_earlier_round_wrote(emulate_rounds, floats):
    text = 'extern "C" __global__ void f(const int* n, float* o) { if (n[0] > 0) o[threadIdx.x] = n[0]; }'
    skipped, written = np.zeros(1, np.int32), np.full(1, 5, np.int32)
    for order, right in (((skipped, written), (np.nan, 5)), ((written, skipped), (5, 5))):
        done = emulate_rounds(text, [[("f", n, floats(32))] for n in order])
        np.testing.assert_array_equal([tensors["o"][0] for tensors in done.tensors], right)


SPLIT = """
extern "C" __global__ void halves(const float* x, float* partial) {
    partial[blockIdx.x * 32 + threadIdx.x] = x[blockIdx.x * 32 + threadIdx.x];
}
extern "C" __global__ void combine(const float* partial, float* o, float scale) {
    if (blockIdx.x == 0) o[threadIdx.x] = scale * (partial[threadIdx.x] + partial[32 + threadIdx.x]);
}
"""


def test_the_kernels_of_a_round_run_in_order_over_the_same_tensors(emulate_rounds, scratch, floats):
    x = arange(64)
    for partial in (scratch(256, zeroed=False), floats(64)):
        combine = ("combine", partial, floats(32), np.float32(2))
        done = emulate_rounds(SPLIT, [[("halves", x, partial), combine]], grid=(2, 1, 1))
        np.testing.assert_array_equal(done.tensors[0]["o"], 2 * (x[:32] + x[32:]))


def test_a_tensor_is_writable_only_for_the_kernel_that_has_it_as_an_output(emulate_rounds, floats):
    text = SPLIT.replace("o[threadIdx.x] = scale", "const_cast<float*>(partial)[0] = scale")
    partial = floats(64)
    with pytest.raises(KernelCrashed, match=r"write to read-only input partial at byte 0, kernel combine"):
        emulate_rounds(text, [[("halves", arange(64), partial), ("combine", partial, floats(32), np.float32(2))]])


def test_tensors_of_one_name_have_one_address(emulate_rounds, scratch):
    text = 'extern "C" __global__ void f(char* a, const char* in, long long* o) { o[0] = long(a); o[1] = long(in); }'
    for seed in range(2):
        calls = [[("f", scratch(64), np.zeros(8, np.int8), np.zeros(2, np.int64))]] * 3
        addresses = [t["o"].tolist() for t in emulate_rounds(text, calls, threads=1, seed=seed).tensors]
        assert addresses[0] == addresses[1] == addresses[2]


def test_a_failure_names_kernel_and_launch(emulate_rounds, floats):
    text = 'extern "C" __global__ void f(const int* n, float* o) { o[n[0]] = 1; }'
    calls = [[("f", np.array([n], np.int32), floats(4))] for n in (0, 1, 4)]
    with pytest.raises(KernelCrashed, match=r"of o: 0 bytes past its end, kernel f, block .*, thread \d+, launch 3"):
        emulate_rounds(text, calls)


def test_a_kernel_that_is_not_in_the_text_is_named(emulate_rounds, floats):
    text = ADD + '#if 0\nextern "C" __global__ void gone(float* o) {}\n#endif\n'
    with pytest.raises(KernelCrashed, match="the source has no such kernel, kernel gone"):
        emulate_rounds(text, [[("gone", floats(1))]])


PARTLY = """
extern "C" __global__ void f(TYPE* o, int n) {
    if (threadIdx.x < n) o[threadIdx.x] = VALUE;
}
"""


@pytest.mark.parametrize(
    ("dtype", "ctype", "value"),
    [
        (np.int32, "int", "-1"),
        *more([
            (np.int32, "int", "threadIdx.x"),
            (np.float32, "float", "__int_as_float(-1)"),
            (np.uint16, "unsigned short", "0xffff"),
            (np.int8, "signed char", "-1"),
            (np.uint8, "bool", "true"),
            (np.int64, "long long", "-1"),
            (np.int64, "long long", "0xfefefefefefefefell"),
        ]),
    ],
)  # fmt: skip
def test_elements_that_nothing_was_stored_to_are_counted_whatever_is_stored_to_the_others(
    emulate_rounds, dtype, ctype, value
):
    text = PARTLY.replace("TYPE", ctype).replace("VALUE", value)
    for written, missing in ((32, {}), (27, {"o": 5})):
        done = emulate_rounds(text, [[("f", np.zeros(32, dtype), np.int32(written))]])
        assert done.unwritten == missing


def test_what_only_a_later_round_writes_is_unwritten(emulate_rounds):
    calls = [[("f", np.zeros(32, np.int32), np.int32(n))] for n in (7, 32)]
    done = emulate_rounds(PARTLY.replace("TYPE", "int").replace("VALUE", "1"), calls)
    assert done.unwritten == {"o": 25}


DYNAMIC = """
extern "C" __global__ void small(float* o) {
    __shared__ float four[4];
    four[threadIdx.x % 4] = threadIdx.x;
    __syncthreads();
    o[threadIdx.x] = four[threadIdx.x % 4] * 0 + 1;
}
extern "C" __global__ void swizzled(unsigned* o) {
    extern __shared__ unsigned char tile[];
    o[threadIdx.x] = unsigned(__cvta_generic_to_shared(tile)) % 1024;
}
"""


def test_dynamic_shared_memory_begins_behind_the_static_variables_of_its_own_kernel(emulate_rounds, floats):
    done = emulate_rounds(DYNAMIC, [[("small", floats(32)), ("swizzled", np.zeros(32, np.uint32))]])
    assert (done.tensors[0]["o"] == 0).all()
