"""What docs/problems.md says of sizes, dtypes and GPUs is what the parsers take: each limit, and one beyond it."""

from __future__ import annotations

import re

import pytest

from evoengine.errors import UsageError
from evoengine.gpu import find_gpu, known_gpus
from evoengine.gpu_file import read_gpu_file
from evoengine.paths import asset
from evoengine.space.reader import read_definition
from evoengine.workloads import find_workload, parse_problem
from evoengine.workloads.attention.problem import DTYPES, HEAD_DIMS, MOST
from tests.support.documents import ROOT, blocks

PAGE = ROOT / "docs" / "problems.md"
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL))
LARGEST = 2_147_483_647
SIZES = {
    "attention": "attention:b{b},h{h},sq{sq},sk{sk},d64,fp16",
    "attention-backward": "attention-backward:b{b},h{h},sq{sq},sk{sk},d64,fp16",
    "gemm": "gemm:m{m},n{n},k{k},fp16",
    "rms_norm": "rms_norm:rows{rows},hidden{hidden},bf16",
    "rowwise": "rowwise:softmax,rows{rows},hidden{hidden},bf16",
    "convolution": "convolution:w{w},h{h},fw{fw},fh{fh}",
}
TAKEN = ("b", "h", "sq", "sk", "m", "n", "k", "rows", "hidden", "w", "fw", "fh")


def row(part: str) -> str:
    """What the page says that a part of attention's problem may be."""
    (found,) = re.findall(rf"^\| [^|]*`{part}`[^|]* \|[^|]*\| ([^|]+) \|$", SECTIONS["attention"], re.MULTILINE)
    return found


def numbers(text: str) -> list[int]:
    return [int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*\d|\d", text)]


def taken(workload: str, **sizes: int) -> bool:
    names = re.findall(r"{(\w+)}", SIZES[workload])
    text = SIZES[workload].format(**(dict.fromkeys(names, 1) | sizes))
    try:
        return str(parse_problem(text)[1]).startswith(workload)
    except UsageError:
        return False


def test_head_dims_and_dtypes_of_attention_are_the_parser_s():
    assert tuple(numbers(row("d"))) == HEAD_DIMS
    assert (
        tuple(re.findall(r"`(\w+)`", re.search(r"^\| \| dtype \| (.*) \|$", PAGE.read_text(), re.MULTILINE)[1]))
        == DTYPES
    )


@pytest.mark.parametrize(("part", "field"), [("b", "batch"), ("h", "heads")])
def test_batch_and_heads_have_the_limits_of_the_page(part, field):
    least, most = numbers(row(part))
    assert (least, most) == (1, MOST[field])
    assert taken("attention", **{part: most}) and not taken("attention", **{part: most + 1})
    assert taken("attention", **{part: least}) and not taken("attention", **{part: least - 1})


@pytest.mark.parametrize("part", ["sq", "sk"])
def test_lengths_have_the_limits_of_the_page(part):
    least, most = numbers(row("s"))[:2]
    assert (least, most) == (1, LARGEST)
    assert taken("attention", **{part: most}) and not taken("attention", **{part: most + 1})
    assert not taken("attention", **{part: 0})


@pytest.mark.parametrize(
    ("workload", "part"),
    [("gemm", p) for p in "mnk"] + [(name, p) for name in ("rms_norm", "rowwise") for p in ("rows", "hidden")],
)
def test_sizes_of_the_others_have_the_limits_of_the_page(workload, part):
    assert f"1 to {LARGEST:,}" in SECTIONS[workload]
    assert taken(workload, **{part: LARGEST}) and not taken(workload, **{part: LARGEST + 1})
    assert not taken(workload, **{part: 0})


@pytest.mark.parametrize(("part", "filter_part"), [("w", "fw"), ("h", "fh")])
def test_the_image_of_a_convolution_has_the_limit_of_the_page(part, filter_part):
    assert f"the image has at most {LARGEST:,} rows and columns" in SECTIONS["convolution"]
    assert taken("convolution", **{part: LARGEST - 2, filter_part: 3})
    assert not taken("convolution", **{part: LARGEST - 1, filter_part: 3})


@pytest.mark.parametrize("workload", ["gemm", "rms_norm"])
def test_every_dtype_and_epilogue_of_a_section_is_taken_and_no_other(workload):
    text = SECTIONS[workload]
    dtypes = set(re.findall(r"`(fp\d+|bf16|fp8)`", text))
    every = {"fp16", "bf16", "fp32", "fp64", "fp8", "int8"}
    example = find_workload(workload).example.rpartition(",")[0]
    assert {d for d in every if accepted(f"{example},{d}")} == dtypes
    assert all(accepted(f"{example},fp16,{e}") for e in re.findall(r"`(bias\w*)`", text))


def accepted(text: str) -> bool:
    try:
        parse_problem(text)
    except UsageError:
        return False
    return True


@pytest.mark.parametrize("workload", ["attention", "gemm"])
def test_families_run_on_the_architectures_of_the_page(workload):
    """`sm_80 and later` holds for every board, and `sm_90a` for Hopper alone."""
    rows = dict(re.findall(r"^\| `(\w+)` \| (sm_[^|]+) \|", SECTIONS[workload], re.MULTILINE))
    made = find_workload(workload)
    problem = made.parse(made.example).variables()
    path = asset("search_spaces") / f"{workload}.toml"
    definition = read_definition(path, {**problem, **find_gpu("h100").variables()})
    assert rows.keys() == set(definition.knobs[0].values)
    for gpu in known_gpus().values():
        for family, said in rows.items():
            least = int(re.match(r"sm_(\d+)", said)[1])
            fits = gpu.capability >= least if "and later" in said else gpu.capability == least
            assert fits == (family not in definition.impossible_families(gpu.variables())), (gpu.key, family)


def test_the_board_of_the_page_is_one(tmp_path):
    (board,) = (block.text for block in blocks(PAGE) if block.language == "toml")
    (tmp_path / "board.toml").write_text(board)
    gpu = read_gpu_file(tmp_path / "board.toml")
    assert (gpu.key, gpu.sms) == ("a4500", 56)
