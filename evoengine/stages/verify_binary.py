"""The gate on the binary: its machine code is executed on the CPU, with the registers, addresses and descriptors that
the compiler for the GPU chose.

The emulator runs the source by another compiler. What NVRTC and ptxas made of it shows here: an accumulator that was
dropped, a wait that was moved, a launch that the binary was not made for.
"""

from __future__ import annotations

from evoengine.devices.base import KernelCall, KernelCrashed, Tensors
from evoengine.devices.single_launches import rounds_by_launches
from evoengine.errors import UsageError
from evoengine.records import EXECUTOR, Binary, Plan, Source
from evoengine.sass.core import Program, run
from evoengine.sass.cubin import read_kernel
from evoengine.sass.launch import prepare, require_arch
from evoengine.sass.listing import listing_of
from evoengine.stages.binary_check import BinaryCheck
from evoengine.stages.verify import verify
from evoengine.workloads.base import AnyWorkload


def verify_binary(workload: AnyWorkload, plan: Plan, source: Source, binary: Binary, seed: int) -> BinaryCheck:
    """Runs the plan's cases by machine code. No verdict where that cannot be read or has opcodes that the executor does
    not know. Raises MachineError where this machine has no disassembler or no C++ compiler.
    """
    try:
        kernel = read_kernel(binary.cubin, source.entry)
        require_arch(kernel)
        program = Program(listing_of(binary), source.entry)
    except UsageError as error:
        return BinaryCheck(None, str(error))
    if program.unknown:
        named = ", ".join(f"{opcode} ({count}×)" for opcode, count in program.unknown.items())
        return BinaryCheck(None, f"the executor does not know {named}")

    def launch(call: KernelCall, own_seed: int) -> Tensors:
        try:
            prepared = prepare(kernel, call.launch, call.arguments, own_seed)
        except UsageError as error:
            raise KernelCrashed(str(error)) from error
        run(program, prepared)
        return prepared.results()

    return BinaryCheck(verify(workload, plan, rounds_by_launches(launch), EXECUTOR, seed))
