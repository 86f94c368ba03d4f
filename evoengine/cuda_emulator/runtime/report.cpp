// The end of a launch that cannot continue: one line on standard error and an exit code.
#include "internal.h"

#include <unistd.h>

#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <initializer_list>

#if defined(__x86_64__)
#include <ucontext.h>
#endif

namespace evo_emu {

ThreadName thread_name(unsigned rank) {
    ThreadName name;
    const Dim at = index_in_block(rank);
    if (blockDim.y * blockDim.z == 1) snprintf(name.text, sizeof name.text, "%u", rank);
    else snprintf(name.text, sizeof name.text, "(%u,%u,%u)", at.x, at.y, at.z);
    return name;
}

extern "C" const char __executable_start[];

// run.py replaces {an address in the executable} by the line.
LineName line_name(Where where) {
    LineName name;
    if (where.line) snprintf(name.text, sizeof name.text, "line %d", where.line);
    else
        snprintf(name.text, sizeof name.text, "line {%lx}",
                 (unsigned long)(static_cast<const char*>(where.code) - 1 - __executable_start));
    return name;
}

void finish(Exit code, const char* message, bool with_thread) {
    char text[4096];
    int used = snprintf(text, sizeof text, "%s", message);
    if (kernel.name) used += snprintf(text + used, sizeof text - used, ", kernel %s", kernel.name);
    if (current < max_fibers || !with_thread)
        used += snprintf(text + used, sizeof text - used, ", block (%u,%u,%u)", blockIdx.x, blockIdx.y, blockIdx.z);
    if (current < max_fibers && with_thread)
        used += snprintf(text + used, sizeof text - used, ", thread %s", thread_name(rank_of(current)).text);
    if (round_of_launches) used += snprintf(text + used, sizeof text - used, ", launch %u", round_of_launches + 1);
    text[used++] = '\n';
    (void)!write(STDERR_FILENO, text, size_t(used));
    _exit(code);
}

void crash(const char* format, ...) {
    char message[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    finish(exit_crashed, message, true);
}

namespace {

const char* access_of(void* context) {
#if defined(__x86_64__)
    constexpr int write_bit = 2;  // of the page-fault error code
    return static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & write_bit ? "write" : "read";
#else
    (void)context;
    return "access";
#endif
}

void on_signal(int signal, siginfo_t* info, void* context) {
    if (signal == SIGFPE) crash("integer division by zero");
    if (signal == SIGILL) crash("the kernel ran into a trap");
    // A general-protection fault has no address: an aligned vector instruction, or an address that no page can have.
    if (info->si_code == SI_KERNEL) crash("misaligned vector access, or an address beyond the address space");
    const char* address = static_cast<const char*>(info->si_addr);
    if (is_on_stacks(address)) crash("stack overflow: more than 256 KiB of local memory in a thread");
    if (provide_page(address, access_of(context))) return;
    report_fault(address, access_of(context));
    crash("%s of address 0x%lx, which belongs to no tensor and no shared memory", access_of(context),
          reinterpret_cast<unsigned long>(address));
}

}  // namespace

void install_handlers() {
    static char stack[64 << 10];
    stack_t alternate{};
    alternate.ss_sp = stack;
    alternate.ss_size = sizeof stack;
    sigaltstack(&alternate, nullptr);
    struct sigaction action{};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigaction(signal, &action, nullptr);
}

}  // namespace evo_emu

// Candidates are compiled with -fsanitize=alignment,bounds; these are the handlers that the compiler calls. The layouts
// are the sanitizer's ABI, common to GCC and Clang.
extern "C" {

struct SourceLocation {
    const char* file;
    uint32_t line, column;
};
struct TypeDescriptor {
    uint16_t kind, info;
    char name[1];
};
struct TypeMismatch {
    SourceLocation location;
    const TypeDescriptor* type;
    unsigned char log_alignment, check;
};
struct OutOfBounds {
    SourceLocation location;
    const TypeDescriptor *array, *index;
};

[[noreturn]] void __ubsan_handle_type_mismatch_v1_abort(TypeMismatch* data, uintptr_t address) {
    unsigned long alignment = 1ul << data->log_alignment;
    evo_emu::crash("misaligned access to %s at line %u: the address is %lu bytes past a multiple of %lu",
                   data->type->name, data->location.line, (unsigned long)(address % alignment), alignment);
}

[[noreturn]] void __ubsan_handle_out_of_bounds_abort(OutOfBounds* data, uintptr_t index) {
    evo_emu::crash("index %ld out of bounds of %s at line %u", long(index), data->array->name, data->location.line);
}
}
