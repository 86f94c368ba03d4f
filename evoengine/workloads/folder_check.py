"""Check the reference of a user's own kernel before a search, by running it as the gate will."""

from __future__ import annotations

from evoengine.errors import UsageError
from evoengine.workloads.base import Case
from evoengine.workloads.folder import FolderWorkload
from evoengine.workloads.folder_cases import Extent, affordable, free_axes, own_extents, work
from evoengine.workloads.folder_definition import Definition, FolderProblem, first_config, size_rules
from evoengine.workloads.folder_reference import NotDouble, run_as_is, run_in_float64

MOST_WORK = float(1 << 26)
"""limit of elements plus a quarter of the operations, for all small sizes that are tried"""
SLOW_WORK = 2.5e8
"""limit of one case; a billion operations take about ten seconds in the emulator"""


def check_reference(workload: FolderWorkload, problem: FolderProblem) -> tuple[str, ...]:
    """Run the reference as the gate will, and return remarks for the user.

    It is run on the gate's small sizes, smallest first, on the problem's own length along each axis, and on the problem
    itself if affordable. Raises UsageError if it raises, or returns a wrong number of outputs, shape or dtype; if it
    does so only for the problem's own lengths, the axis is named.
    """
    definition = workload.definition
    rules, problem_of = size_rules(definition, {}), workload.problem_like(problem)
    extents = [] if definition.cases else list(own_extents(definition, problem, {}, rules, problem_of))
    own = {problem, *(extent.problem for extent in extents)}
    cases = sorted(workload.cases(problem, first_config(definition)), key=lambda case: work(definition, case.problem))
    remarks: list[str] = []
    if work(definition, cases[0].problem) > SLOW_WORK:
        remarks.append(
            f"the gate's smallest case is {cases[0].problem}, which is slow in the emulator; name a smaller --problem, "
            "or leave axes out of compile_time in problem.json"
        )
    done = 0.0
    for case in (case for case in cases if case.problem not in own or case is cases[0]):
        done += work(definition, case.problem)
        if done > MOST_WORK and case is not cases[0]:
            break
        _check(workload, case, remarks)
    for extent in extents:
        _check_own_length(workload, extent, remarks)
    if affordable(definition, problem) and problem != cases[0].problem:
        _check_itself(workload, problem, remarks)
    return tuple(remarks)


def _check_own_length(workload: FolderWorkload, extent: Extent, remarks: list[str]) -> None:
    try:
        _check(workload, Case(f"own {extent.axis}", extent.problem, config=first_config(workload.definition)), remarks)
    except UsageError as error:
        length = extent.problem.axes[extent.axis]
        raise UsageError(f"{error}; there the axis {extent.axis} has the problem's own length, {length:,}") from None


def _check_itself(workload: FolderWorkload, problem: FolderProblem, remarks: list[str]) -> None:
    try:
        _check(workload, Case("the problem itself", problem, config=first_config(workload.definition)), remarks)
    except UsageError as error:
        axis = _axis_at_fault(workload, problem)
        what = f"it does not where the axis {axis} is shorter" if axis else "that is the problem's own size"
        raise UsageError(f"{error}; {what}") from None


def _axis_at_fault(workload: FolderWorkload, problem: FolderProblem) -> str | None:
    """Return the first axis whose own length makes the reference raise."""
    definition, problem_of = workload.definition, workload.problem_like(problem)
    given = {axis: problem.axes[axis] for axis in definition.var_axes}
    for axis in free_axes(definition):
        for length in (3, 8, 64, 256):
            try:
                shorter = problem_of({**given, axis: min(length, given[axis])})
                _check(workload, Case(axis, shorter, config=first_config(definition)), [])
            except UsageError:
                continue
            return axis
    return None


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
