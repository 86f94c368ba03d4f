"""The CUDA execution model on a CPU, hostile on purpose: it proves or refutes a kernel, it never times one.

translate.py, inline_ptx.py, declarations.py   the source NVRTC takes → C++20, line for line
includes.py                   which headers a kernel may include, and where each comes from
include/                      what that C++ includes: CUDA's names; evo_emu/ptx*.h are the table of known PTX;
                              cooperative groups and CUB's block and warp primitives
runtime/                      fibers, barriers, guarded memory, copies, tensor cores; compiled once per machine
build.py, run.py              source → executable → tensors, or the reason why there are none
"""
