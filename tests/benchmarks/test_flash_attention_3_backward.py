"""The benchmark of FlashAttention-3's backward binary: its parameter, and input that is no such binary."""

from __future__ import annotations

import pytest

from benchmarks import flash_attention_3_backward as benchmark
from evoengine.devices.base import ScalarArgument, TensorMapArgument
from evoengine.sass.cubin import Kernel


@pytest.mark.parametrize("causal", [False, True])
def test_parts_of_the_parameter_lie_beside_each_other(causal):
    class Given:
        parameters = ((576, 1792),)

    given: Kernel = Given()  # type: ignore[assignment]
    parameter = benchmark.parameter(given, causal, seq_k=benchmark.SEQLEN)
    ends = 0
    for at, part in sorted(parameter.parts, key=lambda part: part[0]):
        assert at >= ends
        size = (
            128 if isinstance(part, TensorMapArgument) else part.value.nbytes if isinstance(part, ScalarArgument) else 8
        )
        ends = at + size
    assert ends <= parameter.bytes


def test_a_missing_file_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        benchmark.main(["--cubin", str(tmp_path / "none.cubin")])
    assert ended.value.code == 2 and "none.cubin" in capsys.readouterr().err
