"""The shape and dtype of one residual add with RMS normalisation."""

from __future__ import annotations

from dataclasses import dataclass

from evoengine.devices.base import DTYPE_BYTES
from evoengine.records import Value
from evoengine.workloads.problem_text import read_parts

DTYPES = ("fp16", "bf16", "fp32")
EXAMPLE = "rms_norm:rows4096,hidden4096,bf16"
EPS = 1e-6
"""added to the mean of the squares, as in Llama"""
KINDS = 7
"""number of kinds of rows in the case of extreme rows"""
EXTREMES = (
    "an element far above all others",
    "a row of zeros",
    "squares as small as eps",
    "squares beyond a half",
    "sums that all but cancel out",
    "a row of one constant",
)
TWO_CONSTANTS = "rows of one size in one half and another in the other, unlike their neighbours'"
INDEPENDENT = "many ordinary rows"
"""the faults that the values of cases show"""


@dataclass(frozen=True, slots=True)
class RmsNormProblem:
    """residual_out = x + residual and y = residual_out / √(mean(residual_out²) + eps) · weight, row by row.

    x, residual, y and residual_out are [rows, hidden], weight [hidden], all contiguous and of one dtype.
    """

    rows: int
    hidden: int
    dtype: str

    def __str__(self) -> str:
        return f"rms_norm:rows{self.rows},hidden{self.hidden},{self.dtype}"

    def variables(self) -> dict[str, Value]:
        """Return the names that a space's expressions and templates may use, with their values."""
        return {
            "rows": self.rows,
            "hidden": self.hidden,
            "dtype": self.dtype,
            "element_bytes": DTYPE_BYTES[self.dtype],
        }


def parse_problem(text: str) -> RmsNormProblem:
    """Parse `rows4096,hidden4096,bf16`.

    Raises UsageError naming the part that is wrong and what would be right.
    """
    sizes, words = read_parts(text, EXAMPLE, {"rows": "rows", "hidden": "hidden"}, {"dtype": DTYPES})
    return RmsNormProblem(sizes["rows"], sizes["hidden"], words["dtype"])
