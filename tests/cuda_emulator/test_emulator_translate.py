import re

import numpy as np
import pytest

from evoengine.cuda_emulator.translate import constant_names, translate
from evoengine.devices.base import KernelUnbuildable


def test_text_without_ptx_or_shared_memory_stays_as_it_is():
    text = '__device__ void f(float* a) { a[threadIdx.x] = 1; }  // asm("nop"); __shared__ int x;\n'
    assert translate(text) == text


def test_a_ptx_instruction_becomes_a_call_with_its_operands_in_order():
    text = 'asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\\n" :: "r"(to), "l"(a + 8) : "memory");'
    assert translate(text) == "do { evo_emu::ptx::cp_async_cg_shared_global((to), (a + 8), 16); } while (0);"


def test_outputs_come_first_and_are_filled_behind_copies_of_the_inputs():
    assert translate('asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y[i]) : "f"(g(x, 1)));') == (
        "do { auto& evo_emu_o0 = (y[i]); auto evo_emu_i0 = (g(x, 1)); evo_emu::poison(evo_emu_o0); "
        "evo_emu::ptx::ex2_approx_ftz_f32(evo_emu_o0, evo_emu_i0); } while (0);"
    )


def test_what_wgmma_reads_later_is_not_copied():
    name = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16"
    translated = translate(f'asm("{name} {{%0}}, {{%1}}, %2, 0, 1, 1, 0;" : "=f"(d) : "r"(a), "l"(b));')
    assert "evo_emu::poison(evo_emu_o0);" in translated
    assert "(evo_emu::registers(evo_emu_o0), evo_emu::registers((a)), (b), 0" in translated


def test_adjacent_literals_hold_several_instructions_and_lines_keep_their_place():
    text = 'a;\nasm volatile("cp.async.commit_group;\\n\\t"\n    "cp.async.wait_group %0;\\n"\n    ::"n"(N - 1));\nb;\n'
    translated = translate(text)
    assert translated.count("\n") == text.count("\n")
    assert "cp_async_commit_group(); evo_emu::ptx::cp_async_wait_group((N - 1));" in translated
    assert translated.splitlines()[-1] == "b;"


def test_a_macro_stays_one_macro():
    text = '#define COMMIT() \\\n    asm volatile("cp.async.commit_group;" \\\n        ::: "memory")\nCOMMIT();\n'
    translated = translate(text)
    assert translated.count("\n") == 4
    assert translated.splitlines()[1].endswith("\\")
    assert not translated.splitlines()[2].endswith("\\")


def test_a_label_may_have_the_number_of_its_statement():
    code = translate('asm volatile("{ .reg .pred p; wait%=: @!p bra wait%=; }" ::: "memory");')
    assert "__label__ wait;" in code and "goto wait;" in code


def test_scopes_predicates_labels_and_displacements_are_understood():
    text = (
        'asm volatile("{ .reg .pred p; LOOP: bar.sync 1, 64; @!p bra.uni LOOP; '
        '@p cp.async.ca.shared.global.L2::128B [%0 + 32], [%1], 4; }" :: "r"(to), "l"(from));'
    )
    translated = translate(text)
    assert "__label__ LOOP; { bool p; LOOP:; evo_emu::ptx::bar_sync(1, 64); if (!p) goto LOOP;" in translated
    assert "if (p) evo_emu::ptx::cp_async_ca_shared_global(evo_emu::displaced((to), 32), (from), 4); }" in translated


def test_sizes_in_a_mnemonic_become_template_arguments():
    name = "wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16"
    wgmma = f'asm("{name} {{%0}}, %1, %2, 1, 1, 1, 0, 1;" : "+f"(d) : "l"(a), "l"(b));'
    assert "wgmma_mma_async_sync_aligned_m64k16_f32_bf16_bf16<24>(evo_emu::registers((d)), (a), (b), 1" in translate(
        wgmma
    )
    name = "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group"
    tma = f'asm("{name} [%0, {{%1, 4, %1}}], [%2];" :: "l"(m), "r"(x), "r"(s));'
    assert "cp_async_bulk_tensor_global_shared_bulk_group<3>((m), evo_emu::coordinates((x), 4, (x)), (s))" in translate(
        tma
    )


def test_scopes_unwanted_results_and_declared_registers_are_understood():
    text = (
        'asm("{ .reg .pred %%p; elect.sync _|%%p, %1; selp.u32 %0, 1, 0, %%p; '
        'mbarrier.arrive.release.cta.shared::cta.b64 _, [%1]; }" : "=r"(o) : "r"(x));'
    )
    assert (
        "bool p; evo_emu::ptx::elect_sync(evo_emu::Ignored(), p, evo_emu_i0); "
        "evo_emu::ptx::selp_u32(evo_emu_o0, 1, 0, p); "
        "evo_emu::ptx::mbarrier_arrive_shared_b64(evo_emu::Ignored(), evo_emu_i0); }" in translate(text)
    )


def test_a_tensor_map_by_plain_value_is_refused_and_by_reference_is_not():
    translate("void load(const TensorMap& m); void f(int x, const __grid_constant__ TensorMap m) {}")
    with pytest.raises(KernelUnbuildable, match="line 2: tensor map m must be a const __grid_constant__ parameter"):
        translate("\nvoid f(int x, const TensorMap m) {}")


def test_a_brace_list_becomes_registers():
    text = 'asm("ldmatrix.sync.aligned.m8n8.x2.shared.b16 { %0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(c));'
    assert "x2_shared_b16(evo_emu::registers(evo_emu_o0, evo_emu_o1), evo_emu_i0);" in translate(text)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ('asm volatile("frobnicate.b32 %0;" :: "r"(x));', "line 3: .*does not know the PTX instruction frobnicate.b32"),
        # what orders nothing must not be taken for what does
        ('asm("mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [%0];" :: "r"(x));', "line 3: .*mbarrier.arrive.relaxed"),
        ('asm volatile("cp.async.wait_group %2;" :: "n"(0));', "line 3: the asm statement has no operand %2"),
        ('asm volatile("cp.async.wait_group %smid;");', "line 3: .*no PTX register %smid"),
        ('asm volatile("cp.async.wait_group 0;" :: "n" 0);', "line 3: .*cannot read the asm operand"),
        ('asm volatile(".reg .b128 x;");', "line 3: .*no PTX register of type .b128"),
    ],
)
def test_what_the_emulator_does_not_know_is_named_with_its_line(statement, message):
    with pytest.raises(KernelUnbuildable, match=message):
        translate(f"// one\n// two\n{statement}\n")


def test_static_shared_variables_become_references_with_name_type_and_alignment():
    text = "void f() { __shared__ __align__(16) half tile[2][A<int, 3>::n], row[8]; }"
    assert translate(text) == (
        "void f() { "
        'auto& tile = evo_emu::shared_variable<__typeof__(half[2][A<int, 3>::n]), (16), 0>("tile", []{});'
        'auto& row = evo_emu::shared_variable<__typeof__(half[8]), (16), 0>("row", []{}); }'
    )


def test_dynamic_shared_memory_becomes_a_pointer():
    text = "void f() { extern __shared__ __align__(128) unsigned char smem[]; }"
    assert "unsigned char* const smem = evo_emu::dynamic_array<unsigned char, (128), 0>();" in translate(text)


def test_dynamic_shared_memory_of_a_namespace_is_looked_up_at_each_use():
    text = "namespace evo { extern __shared__ float smem[]; }"
    assert "static float* const& smem = evo_emu::dynamic_array<float, (1), 0>();" in translate(text)


def test_a_static_shared_variable_outside_of_a_function_is_refused():
    with pytest.raises(KernelUnbuildable, match="line 2: a __shared__ variable outside of a function"):
        translate("namespace x {\n__shared__ int a[4];\n}")


FILLED = [
    ("float x;", ["x"]),
    ("float a[2][N + 1], b = 0, c;", ["a", "c"]),
    ("unsigned long long bits;", ["bits"]),
    ("wmma::fragment<wmma::matrix_a, 16, 16, 16, half, row> f[2], g;", ["f", "g"]),
    ("typename A<int>::type x;", ["x"]),
    ("struct S s;", ["s"]),
    ("volatile int v;", ["v"]),
    ("switch (n) { case 3: int x; x = n; }", ["x"]),
    ("for (int i = 0; i < n && j > k; ++i) { Tile t; }", ["t"]),
    ("auto f = [&](int a) { half h; return h; };", ["h"]),
    ("struct Local { float member; }; Local l;", ["l"]),
    ("float x = 1, y[] = {1, 2}; const int n = 3; T t(1); T u{}; T* p; int& r = n;", []),
    ("return x; goto end; using A; typedef int B; struct C; i < n; delete p; static int s; constexpr int c = 1;", []),
    ("__shared__ float s[4]; extern __shared__ float d[];", []),
    ("\n#define TWICE float t; t\n", []),
]


@pytest.mark.parametrize(("body", "names"), FILLED)
def test_local_variables_without_a_value_are_filled(body, names):
    filled = re.findall(r"evo_emu::poison\(([^)]*)\)", translate(f"__device__ void f(int n) {{ {body} }}"))
    assert [name for found in filled for name in found.split(", ")] == names


def test_variables_of_namespaces_and_classes_are_not_filled_where_they_are_declared():
    text = 'float global; namespace a { int b; } extern "C" { int c; } struct S { float member; };'
    assert translate(text) == text


def test_classes_with_a_constructor_fill_themselves_before_it():
    fill = "[[no_unique_address]] evo_emu::Poison<S> evo_emu_poison{this};"
    assert translate("struct S { int a; __device__ S(int x) : a(x) {} };").startswith(f"struct S {{ {fill}")
    assert fill in translate("template <int N>\nclass alignas(16) S {\npublic:\n  float a; S() { a = N; }\n};")
    for members in ("{ int a; S() = default; }", ": B { S() {} }", "{ S make() { return S(); } }"):
        assert "Poison" not in translate(f"struct S {members};")


def test_constant_variables_have_plain_names_outside_of_namespaces_and_functions_alone():
    text = """
extern "C" {
__constant__ float filter[9];
}
namespace own { __constant__ int hidden; }
__constant__ int b, c[3];
__global__ void f() { __constant__ int inside; }
"""
    assert constant_names(text) == ["filter", "b", "c"]


def test_a_shared_union_may_be_declared_in_place(emulate):
    text = """
extern "C" __global__ void f(float* o) {
    __shared__ alignas(16) union { float as_float; unsigned as_bits; } both;
    __shared__ struct Pair { float first, second; } pair;
    if (threadIdx.x == 0) both.as_bits = 0x3f800000, pair.second = 2;
    SYNC
    if (threadIdx.x == 31) o[0] = both.as_float + pair.second;
}
"""
    assert emulate(text.replace("SYNC", "__syncthreads();"), np.zeros(1, np.float32))["o"][0] == 3
    unset = [emulate(text.replace("SYNC", ""), np.zeros(1, np.float32), seed=seed)["o"][0] for seed in range(6)]
    assert np.isnan(unset).any()
    with pytest.raises(KernelUnbuildable, match="line 3: the emulator requires one name after __shared__ union"):
        emulate(text.replace("} both", "} both, other"), np.zeros(1, np.float32))
