// Describes the entry point to the runtime: what cudaLaunchKernel knows of a kernel, deduced from its type.
#pragma once
#include <evo_emu/runtime.h>

namespace evo_emu {

template <class T> struct value_type { using type = T; };
template <class T> struct value_type<const T> { using type = T; };
template <class T> inline constexpr char kind_of = __is_class(T) || __is_union(T) ? 's' : 'i';
template <class T> inline constexpr char kind_of<T*> = 'p';
template <> inline constexpr char kind_of<float> = 'f';
template <> inline constexpr char kind_of<double> = 'f';

template <unsigned... I> struct indices {};

template <auto function, class... P>
struct Entry {
    static constexpr char kinds[] = {kind_of<typename value_type<P>::type>..., 0};
    static constexpr unsigned sizes[] = {sizeof(P)..., 0};

    template <unsigned... I>
    static void call(void* const* arguments, indices<I...>) {
        function(*static_cast<P*>(arguments[I])...);
    }
#if __has_builtin(__make_integer_seq)
    template <class, unsigned... I> using sequence = indices<I...>;
    using Sequence = __make_integer_seq<sequence, unsigned, sizeof...(P)>;
#else
    using Sequence = indices<__integer_pack(sizeof...(P))...>;
#endif
    static void invoke(void* const* arguments) { call(arguments, Sequence{}); }
};

template <auto function, class... P>
constexpr Kernel describe(const char* name, unsigned least_blocks, unsigned cluster, void (*)(P...)) {
    using E = Entry<function, P...>;
    return {name, &E::invoke, sizeof...(P), E::kinds, E::sizes, least_blocks, cluster};
}

}  // namespace evo_emu

#define EVO_EMU_CONSTANT(name) {#name, (void*)&name, sizeof(name)},
#define EVO_EMU_ENTRY(name, least_blocks, cluster) \
    extern const evo_emu::Kernel evo_emu::kernel = evo_emu::describe<&name>(#name, least_blocks, cluster, &name);
