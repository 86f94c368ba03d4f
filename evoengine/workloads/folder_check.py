"""Looks at the reference of a folder's workload before a search: a task for a worker process."""

from __future__ import annotations

from evoengine.workloads.folder import FolderWorkload
from evoengine.workloads.folder_definition import FolderProblem
from evoengine.workloads.folder_reference import NotDouble, run_as_is, run_in_float64


def check_reference(workload: FolderWorkload, problem: FolderProblem) -> tuple[str, ...]:
    """Runs the reference on the sizes of the gate's cases, and gives what a person should know of it; for a worker.

    Raises UsageError where it raises, or returns a wrong number of outputs, shape or dtype.
    """
    tensors, definition = workload.tensors(), workload.definition
    remarks: dict[str, None] = {}
    for case in workload.cases(problem, {}):
        inputs = tensors.draw(case, seed=0).inputs
        run_as_is(definition, case.problem, inputs)
        try:
            run_in_float64(definition, case.problem, inputs)
        except NotDouble as why:
            stated = definition.tolerance.rtol is not None or definition.tolerance.atol is not None
            advice = "" if stated else "; state a tolerance with rtol and atol in problem.json"
            remarks[
                f"the reference does not compute in float64, so outputs are compared with its own: {why}{advice}"
            ] = None
    return tuple(remarks)[:1]
