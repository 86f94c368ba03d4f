"""Which strides an exported kernel's loader hands on in tensor maps, and which it refuses."""

from __future__ import annotations

import math
import struct
from dataclasses import replace

import pytest
import torch

from evoengine.cuda_emulator.build import build
from evoengine.cuda_emulator.run import run
from evoengine.devices.base import ScalarArgument, TensorArgument, TensorMapArgument
from evoengine.workloads import find_workload
from evoengine.workloads.base import Case
from tests.support.loader import ALL_MAPS, WGMMA, WMMA, on_gpu, parameters_of, strided

FOLLOWED = {
    "seq before heads, one batch entry": ((1, 4, 100, 64), (0, 64, 256, 1), (512, 128)),
    "seq before heads, one head": ((2, 1, 100, 64), (6400, 64, 64, 1), (128, 12800)),
    "rows padded": ((2, 4, 100, 64), (28800, 7200, 72, 1), (144, 14400)),
    "longer rows' sequence cut": ((2, 4, 100, 64), (32768, 8192, 64, 1), (128, 16384)),
    "one of q, k and v packed": ((1, 4, 100, 64), (0, 64, 768, 1), (1536, 128)),
    "strides of single elements say nothing": ((1, 1, 1, 64), (7, 3, 5, 1), (128, 128)),
    "one row of each head": ((2, 4, 1, 64), (256, 64, 9, 1), (128, 128)),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_strides_that_a_tensor_map_can_follow_reach_it(driver, load, name):
    shape, strides, (row, head) = FOLLOWED[name]
    _, heads, seq, _ = shape
    q = strided(shape, strides)
    k, v, out = torch.zeros(shape, dtype=torch.bfloat16), strided(shape, strides), strided(shape, strides)
    load(ALL_MAPS).attention(q, k, v, out)
    (found,) = driver.launches()
    maps = [struct.unpack_from("=6Q", m) for m in found.maps]
    dense = (k.data_ptr(), 64, seq, shape[0] * heads, 128, 128 * seq)
    wanted = [(t.data_ptr(), 64, seq, shape[0] * heads, row, head) for t in (q, v, out)]
    assert maps == [wanted[0], dense, *wanted[1:]]


def test_a_kernel_finds_its_tensors_by_their_maps_alone(driver, load, attention_gate):
    """The maps that the driver was asked for, given to the emulator; NaN lies between what it may read and write."""
    gate = attention_gate("b1,h4,s150,d64,fp16,kv2")
    problem, config = gate.problem, gate.start({"load": "tma"}) | {"o_store": "tma"}
    own = find_workload("attention").tensors()
    drawn = own.draw(Case("strided", problem), seed=5)
    memory = {"out": torch.full((150, 5, 64), math.nan, dtype=torch.float16)}
    for name, tensor in drawn.inputs.items():
        memory[name] = torch.full((150, tensor.shape[1] + 1, 64), math.nan, dtype=torch.float16)
        memory[name][:, :-1] = tensor[0].transpose(0, 1)
    views = {name: tensor[None, :, :-1].transpose(1, 2) for name, tensor in memory.items()}
    load(config, problem=str(problem)).attention(**views)

    maps = [struct.unpack_from("=16Q", m) for m in driver.launches()[0].maps]
    described = [
        replace(argument, dims=found[1:4], strides_bytes=found[4:6], box=found[6:9])
        for argument, found in zip(parameters_of(TensorMapArgument, problem, config), maps, strict=True)
    ]
    arguments = [TensorArgument(name, memory[name].view(torch.uint16).numpy()) for name in "qkv"]
    arguments += [TensorArgument("o", memory["out"].view(torch.uint16).numpy(), output=True)]
    arguments += [*parameters_of(ScalarArgument, problem, config), *described]
    source = gate.source(config)
    executable = build(source, gate.target.gpu.arch)
    done = run(executable, source.entry, gate.space.launch(config, problem), arguments, 3, 60.0)
    out = torch.from_numpy(done["o"]).view(torch.float16).view(150, 5, 64)
    expected = own.reference(problem, drawn.expected)["o"][0].transpose(0, 1)
    assert (out[:, :4].double() - expected).abs().max() < 1e-3
    assert out[:, 4].isnan().all()


REFUSED = {
    "seq before heads, several batch entries": ((2, 4, 100, 64), (25600, 64, 256, 1)),
    "head_dim not innermost": ((1, 4, 100, 64), (0, 6400, 1, 100)),
    "every second element": ((1, 4, 100, 64), (0, 12800, 128, 2)),
    "rows 4 bytes off": ((1, 4, 100, 64), (0, 6600, 66, 1)),
    "heads 4 bytes off": ((1, 4, 100, 64), (0, 6402, 64, 1)),
    "one head expanded": ((1, 4, 100, 64), (0, 0, 64, 1)),
    "one row expanded": ((1, 4, 100, 64), (0, 6400, 0, 1)),
    "one batch entry expanded": ((2, 4, 100, 64), (0, 6400, 64, 1)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_strides_that_no_tensor_map_follows_are_refused_with_the_remedy(driver, load, name):
    shape, strides = REFUSED[name]
    q = torch.zeros(shape, dtype=torch.bfloat16)
    module = load(ALL_MAPS)
    with pytest.raises(ValueError, match=r"k has strides .* can follow .* 4 heads apart: pass k.contiguous\(\)"):
        module.attention(q, strided(shape, strides), q, q.clone())
    with pytest.raises(ValueError, match="out has strides of .* can follow .*: pass a contiguous out"):
        module.attention(q, q, q, strided(shape, strides))
    module.attention(q, strided(shape, strides).contiguous(), q)
    assert len(driver.launches()) == 1


@pytest.mark.parametrize("config", [WMMA, WGMMA])
def test_a_kernel_takes_strides_only_of_what_it_moves_by_tensor_maps(driver, load, config):
    module = load(config)
    dense, view = torch.zeros(1, 4, 100, 64, dtype=torch.bfloat16), strided((1, 4, 100, 64), (0, 64, 256, 1))
    with pytest.raises(ValueError, match="out is not contiguous, as this kernel needs it: pass a contiguous out"):
        module.attention(dense, dense, dense, view)
    if config is WMMA:
        with pytest.raises(ValueError, match=r"v is not contiguous, as this kernel needs it: pass v.contiguous\(\)"):
            module.attention(dense, dense, view)
    else:
        module.attention(view, view, view)


def test_cupy_strides_are_bytes_and_the_remedy_is_cupys(driver, load):
    module = load(ALL_MAPS, problem="b1,h4,s100,d64,fp16")
    flat, memory = on_gpu(0, (1, 100, 4, 64))
    out, keep = on_gpu(0, (1, 4, 100, 64))
    view = flat.transpose(0, 2, 1, 3)
    module.attention(view, view, view, out)
    assert struct.unpack_from("=6Q", driver.launches()[0].maps[0])[1:] == (64, 100, 4, 512, 128)
    with pytest.raises(ValueError, match=r"q has strides .*: pass cupy.ascontiguousarray\(q\)"):
        module.attention(out[:, :, ::-1], view, view, out)
