"""The shape, layouts, dtype and epilogue of one matrix product."""

from __future__ import annotations

from dataclasses import dataclass

from evoengine.devices.base import DTYPE_BYTES
from evoengine.records import Value
from evoengine.workloads.problem_text import read_parts

DTYPES = ("fp16", "bf16")
NO_EPILOGUE = "none"
ACTIVATIONS = ("relu", "gelu", "silu")
EPILOGUES = ("bias", *(f"bias_{name}" for name in ACTIVATIONS), *ACTIVATIONS)
EXAMPLE = "gemm:m4096,n4096,k4096,fp16"
A_LAYOUTS, B_LAYOUTS = {"a_mk": "mk", "a_km": "km"}, {"b_kn": "kn", "b_nk": "nk"}
"""word → layout: the two extents from the outer to the inner one; nn.Linear stores its weights as [n, k]"""
RESIDUAL = "residual"


@dataclass(frozen=True, slots=True)
class GemmProblem:
    """C = f(A·B + bias) + residual, for each entry of a batch, all of one dtype.

    A is [batch, m, k] or [batch, k, m], B [batch, k, n] or [batch, n, k], bias [n], residual and C [batch, m, n]; a
    batch of 1 has no such axis. The sum is float32 and rounded once, behind the epilogue. f is nothing, max(x, 0), GELU
    by erf, or x / (1 + exp(-x)). Where the epilogue has no bias it is not read; a residual that the problem does not
    have is no parameter.
    """

    m: int
    n: int
    k: int
    dtype: str
    epilogue: str = NO_EPILOGUE
    batch: int = 1
    a_layout: str = "mk"
    b_layout: str = "kn"
    residual: bool = False

    def __str__(self) -> str:
        batch = f"b{self.batch}," if self.batch > 1 else ""
        words = [self.dtype]
        words += [] if self.a_layout == "mk" else [f"a_{self.a_layout}"]
        words += [] if self.b_layout == "kn" else [f"b_{self.b_layout}"]
        words += [] if self.epilogue == NO_EPILOGUE else [self.epilogue]
        words += [RESIDUAL] if self.residual else []
        return f"gemm:{batch}m{self.m},n{self.n},k{self.k},{','.join(words)}"

    @property
    def has_bias(self) -> bool:
        return self.epilogue.startswith("bias")

    @property
    def activation(self) -> str:
        """Return one of ACTIVATIONS, or another word where there is none."""
        return self.epilogue.removeprefix("bias_")

    def axes(self, tensor: str) -> str:
        """Return the axes of rows and columns in memory of a, b, residual or c."""
        return {"a": self.a_layout, "b": self.b_layout}.get(tensor, "mn")

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Return the shape of a, b, residual or c in memory."""
        own = tuple(int(getattr(self, axis)) for axis in self.axes(tensor))
        return own if self.batch == 1 else (self.batch, *own)

    def variables(self) -> dict[str, Value]:
        """Return the names that a space's expressions and templates may use, with their values."""
        return {
            "m": self.m,
            "n": self.n,
            "k": self.k,
            "batch": self.batch,
            "batched": self.batch > 1,
            "dtype": self.dtype,
            "element_bytes": DTYPE_BYTES[self.dtype],
            "epilogue": self.epilogue,
            "a_layout": self.a_layout,
            "b_layout": self.b_layout,
            "residual": self.residual,
        }


def parse_problem(text: str) -> GemmProblem:
    """Parse `[b8,]m4096,n4096,k4096,fp16[,a_km][,b_nk][,bias][,residual]`.

    Raises UsageError naming the part that is wrong and what would be right.
    """
    numbers = {"m": "m", "n": "n", "k": "k", "b": "batch"}
    known = {
        "dtype": DTYPES, "epilogue": EPILOGUES, "a_layout": tuple(A_LAYOUTS), "b_layout": tuple(B_LAYOUTS),
        RESIDUAL: (RESIDUAL,),
    }  # fmt: skip # a table
    optional = ("epilogue", "batch", "a_layout", "b_layout", RESIDUAL)
    sizes, words = read_parts(text, EXAMPLE, numbers, known, optional)
    return GemmProblem(
        sizes["m"], sizes["n"], sizes["k"], words["dtype"], words.get("epilogue", NO_EPILOGUE),
        sizes.get("batch", 1), A_LAYOUTS[words.get("a_layout", "a_mk")], B_LAYOUTS[words.get("b_layout", "b_kn")],
        RESIDUAL in words,
    )  # fmt: skip # in the order of the fields
