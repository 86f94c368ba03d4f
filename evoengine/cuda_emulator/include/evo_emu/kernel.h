// Describes a kernel to the runtime: what cudaLaunchKernel knows of it, deduced from its type.
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
struct Signature {
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
constexpr Kernel describe(const char* name, unsigned least_blocks, unsigned cluster, unsigned number, void (*)(P...)) {
    using S = Signature<function, P...>;
    return {name, &S::invoke, sizeof...(P), S::kinds, S::sizes, least_blocks, cluster, number};
}

}  // namespace evo_emu

#define EVO_EMU_CONSTANT(name) {#name, (void*)&name, sizeof(name)},
// Behind the definition of a variable of the device.
#define EVO_EMU_DEVICE(name) \
    [[maybe_unused]] static const evo_emu::DeviceVariable evo_emu_device_##name{#name, (void*)&name, sizeof(name)};
// That the text has a kernel of that name.
#define EVO_EMU_REQUIRE(name) [[maybe_unused]] static auto* const evo_emu_required = &name;
// Behind the kernel's definition; its name may be a macro.
#define EVO_EMU_TEXT_OF(name) #name
#define EVO_EMU_TEXT(name) EVO_EMU_TEXT_OF(name)
#define EVO_EMU_ENTRY(name, least_blocks, cluster, number) \
    static evo_emu::Entry evo_emu_entry_##number{ \
        evo_emu::describe<&name>(EVO_EMU_TEXT(name), least_blocks, cluster, number, &name)};
