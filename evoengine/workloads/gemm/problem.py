"""The shape, dtype and epilogue of one matrix product."""

from __future__ import annotations

from dataclasses import dataclass

from evoengine.devices.base import DTYPE_BYTES
from evoengine.records import Value
from evoengine.workloads.problem_text import read_parts

DTYPES = ("fp16", "bf16")
NO_EPILOGUE = "none"
EPILOGUES = ("bias", "bias_relu", "bias_gelu")
EXAMPLE = "gemm:m4096,n4096,k4096,fp16"


@dataclass(frozen=True, slots=True)
class GemmProblem:
    """C = f(A·B + bias): A [m, k], B [k, n], bias [n], C [m, n], all row-major and of one dtype.

    The sum is float32 and rounded once, behind the epilogue. f is nothing, max(x, 0), or GELU by erf; without an
    epilogue the bias is not read.
    """

    m: int
    n: int
    k: int
    dtype: str
    epilogue: str = NO_EPILOGUE

    def __str__(self) -> str:
        epilogue = "" if self.epilogue == NO_EPILOGUE else f",{self.epilogue}"
        return f"gemm:m{self.m},n{self.n},k{self.k},{self.dtype}{epilogue}"

    def variables(self) -> dict[str, Value]:
        """Return the names that a space's expressions and templates may use, with their values."""
        return {
            "m": self.m,
            "n": self.n,
            "k": self.k,
            "dtype": self.dtype,
            "element_bytes": DTYPE_BYTES[self.dtype],
            "epilogue": self.epilogue,
        }


def parse_problem(text: str) -> GemmProblem:
    """Parse `m4096,n4096,k4096,fp16[,bias]`.

    Raises UsageError naming the part that is wrong and what would be right.
    """
    known = {"dtype": DTYPES, "epilogue": EPILOGUES}
    sizes, words = read_parts(text, EXAMPLE, {"m": "m", "n": "n", "k": "k"}, known, optional=("epilogue",))
    return GemmProblem(sizes["m"], sizes["n"], sizes["k"], words["dtype"], words.get("epilogue", NO_EPILOGUE))
