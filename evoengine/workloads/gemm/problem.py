"""The shape, layouts, dtype and epilogue of one matrix product, and how a configuration cuts C into tiles."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from evoengine.devices.base import DTYPE_BYTES
from evoengine.errors import UsageError
from evoengine.records import Config, Value, named
from evoengine.workloads.problem_text import read_parts

HALVES = ("fp16", "bf16")
BYTES = {"fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2", "int8": "s8"}
"""dtype of one byte → PTX's name of it"""
DTYPES = (*HALVES, *BYTES)
OUT_DTYPES = {f"out_{dtype}": dtype for dtype in (*HALVES, "fp32")}
NO_SCALES = "none"
SCALES = {"tensor_scales": "tensor", "row_scales": "row", "block_scales": "block"}
SCALED_TOGETHER = 128
"""elements along k, and columns of B, that share a scale of `block_scales`"""
NO_EPILOGUE = "none"
ACTIVATIONS = ("relu", "gelu", "silu")
SWIGLU = "swiglu"
EPILOGUES = ("bias", *(f"bias_{name}" for name in ACTIVATIONS), *ACTIVATIONS, SWIGLU)
BEHIND_SUMS = tuple(name for name in EPILOGUES if name != SWIGLU)
"""epilogues of a single product"""
EXAMPLE = "gemm:m4096,n4096,k4096,fp16"
A_LAYOUTS, B_LAYOUTS = {"a_mk": "mk", "a_km": "km"}, {"b_kn": "kn", "b_nk": "nk"}
"""word → layout: the two extents from the outer to the inner one; nn.Linear stores its weights as [n, k]"""
RESIDUAL = "residual"


@dataclass(frozen=True, slots=True)
class GemmProblem:
    """C = f(A·B + bias) + residual, for each entry of a batch.

    A is [batch, m, k] or [batch, k, m], B [batch, k, n] or [batch, n, k], both of `dtype`; bias [n], residual and C
    [batch, m, n] of `out_dtype`; a batch of 1 has no such axis. The sum is float32 (of int8 int32) and rounded once,
    behind the epilogue. f is nothing, max(x, 0), GELU by erf, or SiLU, x / (1 + exp(-x)). Where the epilogue has no
    bias it is not read; a residual that the problem does not have is not a parameter. With swiglu there is a second B,
    b_up, and C = SiLU(A·B) · (A·b_up) + residual.

    Bytes have both operands along k, and float32 scales by which each product is multiplied: `tensor`: scale_a and
    scale_b [batch]; `row`: scale_a [batch, m], scale_b [batch, n]; `block`: scale_a [batch, k/128, m] and scale_b
    [batch, n/128, k/128], rounded up.
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
    out_dtype: str = ""
    """empty for `dtype`, and for bf16 where that is of bytes"""
    scales: str = ""
    """empty for `tensor` of bytes, and for none of others"""
    batched: bool = False
    """whether kernels take a batch, which may be of one entry: as most cases of the gate have of a larger one"""

    def __post_init__(self) -> None:
        if self.batch > 1:
            object.__setattr__(self, "batched", True)
        if not self.out_dtype:
            object.__setattr__(self, "out_dtype", _usual_out_dtype(self.dtype))
        if not self.scales:
            object.__setattr__(self, "scales", "tensor" if self.dtype in BYTES else NO_SCALES)

    def __str__(self) -> str:
        batch = f"b{self.batch}," if self.batch > 1 else ""
        words = [self.dtype]
        words += [] if self.a_layout == "mk" else [f"a_{self.a_layout}"]
        words += [] if self.b_layout == "kn" else [f"b_{self.b_layout}"]
        words += [] if self.epilogue == NO_EPILOGUE else [self.epilogue]
        words += [RESIDUAL] if self.residual else []
        words += [] if self.out_dtype == _usual_out_dtype(self.dtype) else [f"out_{self.out_dtype}"]
        words += [f"{self.scales}_scales"] if self.scales in ("row", "block") else []
        return f"gemm:{batch}m{self.m},n{self.n},k{self.k},{','.join(words)}"

    @property
    def has_bias(self) -> bool:
        return self.epilogue.startswith("bias")

    @property
    def activation(self) -> str:
        """Return one of ACTIVATIONS, or another word where there is none."""
        return self.epilogue.removeprefix("bias_")

    @property
    def gated(self) -> bool:
        return self.epilogue == SWIGLU

    @property
    def operands(self) -> tuple[str, ...]:
        """Return the names of the matrices that are multiplied, A first."""
        return ("a", "b", "b_up") if self.gated else ("a", "b")

    def axes(self, tensor: str) -> str:
        """Return the axes of rows and columns in memory of a, b, b_up, residual or c."""
        return {"a": self.a_layout, "b": self.b_layout, "b_up": self.b_layout}.get(tensor, "mn")

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Return the shape of a, b, b_up, residual or c in memory."""
        own: tuple[int, ...] = tuple(getattr(self, axis) for axis in self.axes(tensor))
        return own if self.batch == 1 else (self.batch, *own)

    def scale_shape(self, operand: str) -> tuple[int, ...]:
        """Return the shape of the scales of a or b."""
        blocks = -(-self.k // SCALED_TOGETHER)
        own: tuple[int, ...]
        match self.scales, operand:
            case "tensor", _:
                return (self.batch,)
            case "row", _:
                own = (self.m if operand == "a" else self.n,)
            case _, "a":
                own = (blocks, self.m)
            case _:
                own = (-(-self.n // SCALED_TOGETHER), blocks)
        return own if self.batch == 1 else (self.batch, *own)

    def variables(self) -> dict[str, Value]:
        """Return the names that a space's expressions and templates may use, with their values."""
        return {
            **named(self, ("m", "n", "k", "batch", "batched", "dtype")),
            "element_bytes": DTYPE_BYTES[self.dtype],
            **named(self, ("epilogue", "a_layout", "b_layout", "residual", "out_dtype", "scales")),
            "byte_product": BYTES.get(self.dtype, ""),
            **named(self, ("promoted", "gated")),
        }

    @property
    def promoted(self) -> bool:
        """Return whether the products of each step along k are added up by themselves, and then to the others in float.

        Tensor cores keep 14 bits of sums of FP8; and each block of k may have a scale of its own.
        """
        return self.dtype.startswith("fp8") or self.scales == "block"


def parse_problem(text: str) -> GemmProblem:
    """Parse `[b8,]m4096,n4096,k4096,fp16[,a_km][,b_nk][,bias][,residual][,out_fp32][,row_scales]`.

    Raises UsageError naming the part that is wrong and what would be right.
    """
    numbers = {"m": "m", "n": "n", "k": "k", "b": "batch"}
    known = {
        "dtype": DTYPES, "epilogue": EPILOGUES, "a_layout": tuple(A_LAYOUTS), "b_layout": tuple(B_LAYOUTS),
        RESIDUAL: (RESIDUAL,), "out_dtype": tuple(OUT_DTYPES), "scales": tuple(SCALES),
    }  # fmt: skip # a table
    optional = ("epilogue", "batch", "a_layout", "b_layout", RESIDUAL, "out_dtype", "scales")
    sizes, words = read_parts(text, EXAMPLE, numbers, known, optional)
    problem = GemmProblem(
        sizes["m"], sizes["n"], sizes["k"], words["dtype"], words.get("epilogue", NO_EPILOGUE),
        sizes.get("batch", 1), A_LAYOUTS[words.get("a_layout", "a_mk")], B_LAYOUTS[words.get("b_layout", "b_kn")],
        RESIDUAL in words, OUT_DTYPES.get(words.get("out_dtype", ""), ""), SCALES.get(words.get("scales", ""), ""),
    )  # fmt: skip # in the order of the fields
    if why := why_not(problem):
        raise UsageError(f"the problem {text!r} is invalid: {why}")
    return problem


def _usual_out_dtype(dtype: str) -> str:
    return dtype if dtype in HALVES else "bf16"


def why_not(problem: GemmProblem) -> str | None:
    """Return the rule that the words of a problem break together, with what would be right."""
    p = problem
    if p.dtype in BYTES and (p.a_layout, p.b_layout) != ("mk", "nk"):
        return f"tensor cores take {p.dtype} along k alone, A as [m, k] and B as [n, k]: without a_km, and with b_nk"
    if p.dtype in HALVES and p.scales != NO_SCALES:
        return f"{p.dtype} has no scales, which are for {', '.join(BYTES)}: leave {p.scales}_scales out"
    if p.gated and p.dtype in BYTES:
        return f"swiglu is of {' and '.join(HALVES)} alone: write one of them in the place of {p.dtype}"
    if p.dtype.startswith("fp8") and p.out_dtype == "fp32":
        return f"tensor cores keep 14 bits of sums of {p.dtype}: leave out_fp32 out, or write out_fp16"
    if p.dtype in HALVES and p.out_dtype not in (p.dtype, "fp32"):
        return f"C of {p.dtype} is {p.dtype} or fp32: leave out_{p.out_dtype} out, or write out_fp32"
    return None


# ── tiles ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def tile_sizes(config: Config) -> tuple[int, int, int]:
    tile_m, tile_n, tile_k = (int(config.get(name, 64)) for name in ("tile_m", "tile_n", "tile_k"))
    return tile_m, tile_n, tile_k


_CLUSTERS = {"2x1": (2, 1), "1x2": (1, 2)}


def cluster_shape(config: Config) -> tuple[int, int]:
    """Return the tiles that a cluster computes at a time, below and beside one another."""
    return _CLUSTERS.get(str(config.get("cluster")), (1, 1))


def split_k(config: Config) -> int:
    """Return among how many blocks the steps of each tile are shared equally."""
    return int(config.get("split_k", 1))


def stream_steps(config: Config) -> int:
    """Return the steps of each block, of one tile or of several; 0 where blocks have whole tiles, or equal parts."""
    return int(config.get("stream_steps", 0)) if split_k(config) == 1 else 0


def sums_in_memory(config: Config) -> bool:
    """Return whether the sums of a tile's blocks go through global memory, and not through that of a cluster."""
    return stream_steps(config) > 0 or (split_k(config) > 1 and config.get("family") == "mma")


def most_sharers(problem: GemmProblem, config: Config) -> int:
    """Return how many blocks share a tile at most."""
    each = stream_steps(config)
    return (tile_steps(problem, config) + each - 2) // each + 1 if each else split_k(config)


def sharers(problem: GemmProblem, config: Config, tile: int) -> range:
    """Return the numbers of the blocks that have steps of a tile in memory; of a stream's cluster, of its first one."""
    steps, each, together = tile_steps(problem, config), stream_steps(config), blocks_of_cluster(config)
    if not each:
        return range(tile * split_k(config), (tile + 1) * split_k(config))
    return range(tile * steps // each * together, (((tile + 1) * steps - 1) // each + 1) * together, together)


def whole_tiles(problem: GemmProblem, config: Config, blocks: Collection[int]) -> list[int]:
    """Return the tiles all of whose blocks are among `blocks`."""
    steps, each, together = tile_steps(problem, config), stream_steps(config), blocks_of_cluster(config)
    found: set[int] = set()
    for cluster in {block // together for block in blocks}:
        first, after = (cluster * each, (cluster + 1) * each) if each else (cluster * steps, (cluster + 1) * steps)
        found.update(range(first // steps, min(-(-after // steps), cluster_tiles(problem, config))))
    return sorted(tile for tile in found if set(sharers(problem, config, tile)) <= set(blocks))


def parts(problem: GemmProblem, config: Config, block: int) -> Iterator[int]:
    """Yield the steps of each tile that a block, or a cluster of a stream, has a part of, in order."""
    steps, each = tile_steps(problem, config), stream_steps(config)
    if not each:
        share, left = divmod(steps, split_k(config))
        yield share + (block % split_k(config) < left)
        return
    at = block * each
    end = min(at + each, cluster_tiles(problem, config) * steps)
    while at < end:
        own = min(steps - at % steps, end - at)
        yield own
        at += own


def tile_steps(problem: GemmProblem, config: Config) -> int:
    """Return the steps of a tile along k."""
    return -(-problem.k // tile_sizes(config)[2])


def blocks_of_cluster(config: Config) -> int:
    down, across = cluster_shape(config)
    return down * across * split_k(config)


def cluster_extents(config: Config) -> tuple[int, int]:
    """Return the rows and columns of C that a cluster computes at a time."""
    down, across = cluster_shape(config)
    return down * int(config["tile_m"]), across * int(config["tile_n"])


def cluster_tiles(problem: GemmProblem, config: Config) -> int:
    rows, columns = cluster_extents(config)
    return problem.batch * -(-problem.m // rows) * -(-problem.n // columns)


def fills_clusters(problem: GemmProblem, config: Config) -> bool:
    """Return whether every block of a cluster has a tile within C whenever one of them has."""
    return all(
        -(-length // int(config[tile])) % together == 0
        for length, tile, together in zip(
            (problem.m, problem.n), ("tile_m", "tile_n"), cluster_shape(config), strict=True
        )
    )
