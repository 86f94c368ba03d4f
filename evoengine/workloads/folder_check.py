"""Looks at the reference of a folder's workload before a search: a task for a worker process."""

from __future__ import annotations

from evoengine.workloads.base import Case
from evoengine.workloads.folder import FolderWorkload
from evoengine.workloads.folder_cases import work
from evoengine.workloads.folder_definition import Definition, FolderProblem
from evoengine.workloads.folder_reference import NotDouble, run_as_is, run_in_float64

MOST_WORK = float(1 << 26)
"""elements and a quarter of the operations, of all sizes that are tried here"""
SLOW_WORK = 2.5e8
"""of one case: a billion operations, some ten seconds in the emulator"""


def check_reference(workload: FolderWorkload, problem: FolderProblem) -> tuple[str, ...]:
    """Runs the reference on sizes of the gate's cases, smallest first, and gives what a person should know of it.

    Raises UsageError where it raises, or returns a wrong number of outputs, shape or dtype.
    """
    definition = workload.definition
    cases = sorted(workload.cases(problem, {}), key=lambda case: work(definition, case.problem))
    remarks: list[str] = []
    if work(definition, cases[0].problem) > SLOW_WORK:
        remarks.append(
            f"the gate's smallest case is {cases[0].problem}, which is slow in the emulator; name a smaller --problem, "
            "or leave axes out of compile_time in problem.json"
        )
    done = 0.0
    for case in cases:
        done += work(definition, case.problem)
        if done > MOST_WORK and case is not cases[0]:
            break
        _check(workload, case, remarks)
    return tuple(remarks)


def _check(workload: FolderWorkload, case: Case[FolderProblem], remarks: list[str]) -> None:
    definition = workload.definition
    inputs = workload.tensors().draw(case, seed=0).inputs
    run_as_is(definition, case.problem, inputs)
    try:
        run_in_float64(definition, case.problem, inputs)
    except NotDouble as why:
        said = "the reference does not compute in float64, so outputs are compared with its own: "
        if not any(remark.startswith(said) for remark in remarks):
            remarks.append(f"{said}{why}{_advice(definition)}")


def _advice(definition: Definition) -> str:
    stated = definition.tolerance.rtol is not None or definition.tolerance.atol is not None
    return "" if stated else "; state a tolerance with rtol and atol in problem.json"
