"""The CUDA execution model on a CPU, hostile on purpose: it proves or refutes a kernel, it never times one.

translate.py, inline_ptx.py, declarations.py   the source NVRTC takes → C++20, line for line
include/                      what that C++ includes: CUDA's names; evo_emu/ptx*.h are the table of known PTX
runtime/                      fibers, barriers, guarded memory, copies, tensor cores; compiled once per machine
build.py, run.py              source → executable → tensors, or the reason why there are none
"""
