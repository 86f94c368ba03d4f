"""The tools of `evoengine mcp`, called by the protocol's own client, in a process of its own where it matters."""

from __future__ import annotations

import sys

import anyio
import pytest

pytest.importorskip("mcp", reason="pip install evoengine[mcp]")

from mcp import Client, StdioServerParameters

import evoengine
from evoengine.cli.mcp import server
from evoengine.sandbox import jail

PROBLEM = "rms_norm:rows9,hidden64,fp16"
TOOLS = {"search", "best", "verify", "predict", "profile", "explain", "propose"}


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    place = tmp_path_factory.mktemp("mcp") / "m.db"
    best = evoengine.tune(PROBLEM, gpu="h100", trials=1, db=place, device="emulator").best[0]
    return str(place), best


def called(db, *calls):
    """The answers of tools: the JSON of a call, or the text of its error."""

    async def run():
        async with Client(server(db)) as client:
            answers = []
            for name, arguments in calls:
                found = await client.call_tool(name, arguments)
                answers.append(found.content[0].text if found.is_error else found.structured_content)
            return answers

    return anyio.run(run)


def test_a_process_serves_the_tools_on_stdin_and_stdout(searched):
    parameters = StdioServerParameters(command=sys.executable, args=["-m", "evoengine", "mcp", "--db", searched[0]])

    async def run():
        async with Client(parameters) as client:
            tools = {tool.name for tool in (await client.list_tools()).tools}
            return tools, (await client.call_tool("best", {})).structured_content

    tools, best = anyio.run(run)
    assert tools == TOOLS
    assert (best["problem"], best["trials"][0]["trial"]) == (PROBLEM, searched[1].trial)


def test_what_is_known_of_a_trial_is_told_without_seeds(searched):
    db, best = searched
    explained, profile = called(db, ("explain", {"trial": best.trial}), ("profile", {"trial": best.trial}))
    assert explained["text"] == best.source.text and explained["outcome"] == "estimated"
    assert explained["predicted_us"] == pytest.approx(best.measurement.compared_us)
    assert any("waiting" in name for name in profile["figures"])
    seeds = {case.seed for verdict in best.verdicts for case in verdict.cases}
    assert seeds and not any(str(seed) in str(explained) for seed in seeds)


def test_a_configuration_is_verified_and_predicted(searched):
    db, best = searched
    config = dict(best.config)
    (predicted,) = called(db, ("predict", {"config": config, "problem": PROBLEM}))
    assert predicted["correct"] and predicted["median_us"] == pytest.approx(best.measurement.compared_us)


@pytest.mark.skipif(jail.why_no_jail() is not None, reason=str(jail.why_no_jail()))
def test_a_proposal_is_judged(searched):
    db, best = searched
    wrong = best.source.text.replace("rsqrtf", "sqrtf")
    (found,) = called(db, ("propose", {"parent": best.trial, "text": wrong}))
    assert (found["outcome"] == "incorrect" and found["counterexample"]["reason"] is None) or found["counterexample"]


@pytest.mark.parametrize(
    ("tool", "arguments", "sentence"),
    [
        ("best", {"problem": "gemm:m1,n1,k1,fp16"}, "holds no run for gemm:m1"),
        ("search", {"problem": PROBLEM, "trials": 0}, "1 to 200"),
        ("search", {"problem": "nothing:x1"}, "there is no workload"),
        ("verify", {}, "either a trial or a config"),
        ("profile", {"trial": 99}, "there is no trial 99"),
        ("propose", {"parent": 99, "text": "x"}, "there is no trial 99"),
    ],
)
def test_bad_calls_are_answered_with_a_sentence(searched, tool, arguments, sentence):
    (said,) = called(searched[0], (tool, arguments))
    assert sentence in said
