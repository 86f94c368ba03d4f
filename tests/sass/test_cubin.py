"""What a kernel asks for at launch is read from its binary, and bytes that are no binary are refused in a sentence."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from evoengine.errors import UsageError
from evoengine.sass import elf
from evoengine.sass.cubin import kernel_names, read_kernel, whole_image
from tests.support.exhaustive import more
from tests.support.sass_kernels import ALL_PARTS, COUNTS, compiled

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a")


@pytest.fixture(scope="module", params=["sm_75", "sm_90a", *more(ARCHS[1:-1])])
def binary(request):
    return compiled(ALL_PARTS, "parts", request.param)


@pytest.fixture
def kernel(binary):
    return read_kernel(binary.cubin, "parts")


def test_its_architecture_is_read(binary, kernel):
    assert f"sm_{kernel.arch}" == binary.arch.removesuffix("a")


def test_its_resources_are_those_that_ptxas_reported(binary, kernel):
    assert kernel.registers == binary.registers
    assert kernel.shared_bytes == binary.shared_bytes == 36 * 4
    assert kernel.local_bytes >= binary.stack_bytes > 0
    assert kernel.max_threads == 128


def test_every_parameter_has_its_offset_and_size(kernel):
    first = 0x210 if kernel.arch == 90 else 0x160
    sizes = [8, 8, 4, 24, 1, 8]
    offsets = [0, 8, 16, 24, 48, 56]
    assert kernel.parameters_at == first
    assert kernel.parameters == tuple((first + offset, size) for offset, size in zip(offsets, sizes, strict=True))
    assert len(kernel.banks[0]) == first + 64


LARGE = """
struct Large { float v[3000]; };
extern "C" __global__ void large(const __grid_constant__ Large s, float* o, int n) { o[threadIdx.x] = s.v[n]; }
"""


def test_parameters_of_more_than_4_kb_have_their_offsets_and_sizes_too():
    kernel = read_kernel(compiled(LARGE, "large", "sm_90a").cubin, "large")
    first = kernel.parameters_at
    assert kernel.parameters == ((first, 12000), (first + 12000, 8), (first + 12008, 4))


def test_constants_and_their_first_values_are_found_by_name(kernel):
    assert kernel.constants == {"table": (0, 28), "other": (28, 12)}
    assert np.frombuffer(kernel.banks[3], np.float32, 7).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert kernel.banks[3][28:] == bytes(12)


def test_device_variables_have_a_size_a_first_value_and_a_place_for_their_address(kernel):
    sizes = {segment.name: (segment.size, segment.data) for segment in kernel.globals}
    assert sizes == {".nv.global": (4000, b""), ".nv.global.init": (16, struct.pack("<4i", 9, 8, 7, 6))}
    assert {(p.segment, p.place) for p in kernel.pointers} == {(".nv.global", 0), (".nv.global.init", 0)}
    assert {p.offset for p in kernel.pointers} == {0, 8}


def test_a_cluster_is_read_where_there_is_one(kernel):
    assert kernel.cluster == ((2, 1, 1) if kernel.arch == 90 else (1, 1, 1))


def test_each_kernel_of_a_binary_is_read_for_itself(binary):
    assert sorted(kernel_names(binary.cubin)) == ["parts", "second"]
    second = read_kernel(binary.cubin, "second")
    assert [size for _, size in second.parameters] == [8]
    assert (second.local_bytes, second.shared_bytes, second.max_threads) == (0, 0, None)


def test_a_kernel_that_is_not_there_is_named_beside_those_that_are(binary):
    with pytest.raises(UsageError, match="the binary has no kernel third: it has (parts, second|second, parts)"):
        read_kernel(binary.cubin, "third")


@pytest.mark.parametrize("image", [b"", b"\x7fELF", b"\x7fELF\x02\x01", b"PK\x03\x04" * 99])
def test_what_is_no_elf_file_is_refused(image):
    with pytest.raises(UsageError, match="no cubin|cut off"):
        read_kernel(image, "f")


def test_an_image_that_is_cut_off_anywhere_is_refused_in_a_sentence():
    image = compiled(COUNTS, "counts", "sm_80").cubin
    head = elf.header(image)
    for length in range(0, head.sections_at + head.section_count * head.section_bytes, 61):
        with pytest.raises(UsageError):
            read_kernel(image[:length], "counts")


def test_an_image_with_any_byte_changed_is_read_or_refused_and_nothing_else():
    """The headers and tables, byte by byte: a broken offset, size or index never escapes as another error."""
    image = compiled(ALL_PARTS, "parts", "sm_90a").cubin
    head = elf.header(image)
    tables = range(head.sections_at, head.sections_at + head.section_count * head.section_bytes)
    info = [s for s in elf.sections(image) if s.name in (".nv.info", ".nv.info.parts", ".symtab", ".rela.nv.constant4")]
    starts = [(image.index(s.data), len(s.data)) for s in info]
    places = [*range(64), *tables, *(at + i for at, size in starts for i in range(size))]
    refused = 0
    for place in places[::2]:
        for value in (0xFF, image[place] ^ 0x41):
            broken = bytearray(image)
            broken[place] = value
            try:
                read_kernel(bytes(broken), "parts")
            except UsageError as error:
                refused += 1
                assert str(error) and "\n" not in str(error)
    assert refused > 100


def test_the_byte_that_cupy_leaves_out_is_put_back():
    image = compiled(COUNTS, "counts", "sm_80").cubin
    assert whole_image(image) == image
    assert whole_image(image[:-1]) == image
