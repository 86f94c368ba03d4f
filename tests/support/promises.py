"""What evoengine promises not to take away (docs/compatibility.md), as this version has it.

python -m tests.support.promises       # records it again, once a change is meant
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from click.testing import CliRunner
from pydantic import TypeAdapter

import evoengine
from evoengine.accuracy.page import Row
from evoengine.cli.main import evoengine as commands
from evoengine.gpu import find_gpu
from evoengine.ledger.store import Ledger, open_ledger
from evoengine.paths import asset
from evoengine.publish.export import export_files
from evoengine.publish.folder import CHECKSUMS
from evoengine.records import EXECUTOR, Baseline, Candidate, Config, Device, Kind, Outcome, Profile, RefusedBaseline
from evoengine.search.proposer import Proposer
from evoengine.search.recorded import read_recorded
from evoengine.search.samplers.prior import StartedSpace
from evoengine.space.space import SearchSpace, load_space, space_from_text
from evoengine.tuning.doctor import Finding
from evoengine.tuning.measure import Agreement, MeasureResult, Pair
from evoengine.tuning.propose import ProposeResult
from evoengine.tuning.ray_cluster import BusyGpu, ClusterStatus, DetachedStatus, Node
from evoengine.tuning.setup import register_kernel
from evoengine.views import jsonable
from evoengine.views.accuracy import AccuracyView, PredictedAgainView, accuracy_json, again_json
from evoengine.views.boards import BoardsView, ClusterView, FindingsView, WorkloadsView, cluster_json, findings_json
from evoengine.views.comparison import RunComparisonView
from evoengine.views.foreign_kernels import CubinsAnswer, cubins_json
from evoengine.views.results import (
    MeasuredView,
    ProposedView,
    RankingView,
    ReportView,
    RunsView,
    SearchSummaryView,
    measured_json,
    proposed_json,
)
from evoengine.views.service import QueuedJobsView, TokenListView
from evoengine.views.trials import (
    LineageView,
    OneTrialView,
    ProfilePageView,
    TrialPageView,
    TrialsView,
    VerifiedView,
    profile_json,
)
from evoengine.workloads import find_workload, parse_problem
from evoengine.workloads.base import Target
from tests.support.ledger_examples import (
    GPU,
    POLICY,
    PROBLEM,
    SUSTAINED,
    a_binary,
    a_figure,
    a_source,
    a_verdict,
    add_ranked,
    add_step,
    start_run,
)
from tests.support.recorded import cache as kernel_tuner_cache
from tests.support.spaces import launches

FOLDER = Path(__file__).parents[1] / "compatibility"

# --- the shape of JSON

BY_NAME = frozenset(
    """config terms mix instructions outcomes figures cells visited versions searches limits variables grid_by_sms
    families left_out""".split()
)
"""fields whose keys are data: knobs, opcodes, outcomes. Of these the types of values are promised alone"""


def shape(value: Any) -> Any:
    """Return the fields of a JSON value with their types; items of a list are merged, as they may differ."""
    if isinstance(value, dict):
        return {key: shape(item) if key not in BY_NAME else values_of(item) for key, item in value.items()}
    if isinstance(value, list):
        return ["list", *merged([shape(item) for item in value])]
    return {bool: "true or false", int: "number", float: "number", str: "text", type(None): "null"}[type(value)]


def values_of(value: Any) -> Any:
    if not isinstance(value, dict):
        return shape(value)
    return ["by name", *merged([shape(item) for item in value.values()])]


def merged(shapes: Iterable[Any]) -> list[Any]:
    """Return the shapes that differ; objects among them as one, which has the fields of all."""
    scalars: set[str] = set()
    objects: list[dict[str, Any]] = []
    lists: list[list[Any]] = []
    for found in shapes:
        if isinstance(found, dict):
            objects.append(found)
        elif isinstance(found, list) and found[0] == "one of":
            scalars.update(item for item in found[1:] if isinstance(item, str))
            objects += [item for item in found[1:] if isinstance(item, dict)]
            lists += [item for item in found[1:] if isinstance(item, list)]
        elif isinstance(found, list):
            lists.append(found)
        else:
            scalars.add(found)
    result: list[Any] = sorted(scalars)
    for name in ("list", "by name"):
        if of_name := [found for found in lists if found[0] == name]:
            result.append([name, *merged(item for found in of_name for item in found[1:])])
    if objects:
        keys = dict.fromkeys(key for found in objects for key in found)
        result.append({key: one_of([found[key] for found in objects if key in found]) for key in keys})
    return result


def one_of(shapes: Sequence[Any]) -> Any:
    alternatives = merged(shapes)
    return alternatives[0] if len(alternatives) == 1 else ["one of", *alternatives]


def lost(before: Any, now: Any, path: str = "") -> list[str]:
    """Return the paths of recorded fields that are missing or of another type; new ones are no loss."""
    if isinstance(before, dict) and isinstance(now, dict):
        missing = [f"{path}.{key}".strip(".") for key in before if key not in now]
        common = [key for key in before if key in now]
        return missing + [each for key in common for each in lost(before[key], now[key], f"{path}.{key}".strip("."))]
    if isinstance(before, list) and isinstance(now, list) and before[0] == now[0]:
        objects = [next((item for item in side if isinstance(item, dict)), {}) for side in (before, now)]
        gone = [item for item in before if not isinstance(item, dict) and item not in now]
        return [path] if gone else lost(*objects, path)
    return [] if before == now else [path]


# --- every command's JSON


def json_shapes(folder: Path) -> dict[str, Any]:
    """Return the shape of what each command prints with --json, over a ledger with a trial of each sort."""
    db, replayed = folder / "evo.db", folder / "replayed.db"
    with open_ledger(str(db), create=True) as ledger:
        fill(ledger)
    recorded = ["--device", f"recorded:{kernel_tuner_cache(folder / 'test.json')}", "--seed", "1"]
    call("token", "new", "ci", "--db", db)
    call("new", folder / "own")
    config = json.dumps(next(iter(own_space(folder / "own").starts)))
    lines: dict[str, list[Sequence[object]]] = {
        "problems": [[]],
        "gpus": [[]],
        "search": [[*recorded, "--trials", 9, "--db", replayed]],
        "best": [["--db", db], ["--db", replayed]],
        "best --top": [["--top", 9, "--db", db], ["--top", 9, "--db", replayed]],
        "history": [["--db", db], ["--db", replayed]],
        "runs": [["--db", db], ["--db", replayed]],
        "compare": [[1, 2, "--db", db]],
        "show": [[trial, "--db", db] for trial in range(1, 7)],
        "show --lineage": [[2, "--lineage", "--db", db]],
        "report": [["--db", db]],
        "verify": [["--kernel", folder / "own", "--config", config, "--device", "emulator", "--gpu", "h100"]],
        "token list": [["--db", db]],
        "retune": [["--gpu", "h200", "--db", db]],
    }
    found = {name: one_of([printed(name, line) for line in each]) for name, each in lines.items()}
    for name, value in of_other_machines().items():
        text = json.dumps(jsonable(value))
        require_shape(ANSWERS[name], text)
        found[name] = shape(json.loads(text))
    return found


ANSWERS = {
    "problems": WorkloadsView,
    "gpus": BoardsView,
    "search": SearchSummaryView,
    "best": OneTrialView,
    "best --top": RankingView,
    "history": TrialsView,
    "runs": RunsView,
    "compare": RunComparisonView,
    "show": TrialPageView,
    "show --lineage": LineageView,
    "report": ReportView,
    "verify": VerifiedView,
    "token list": TokenListView,
    "retune": QueuedJobsView,
    "measure": MeasuredView,
    "propose": ProposedView,
    "profile": ProfilePageView,
    "cluster status": ClusterView,
    "accuracy": AccuracyView,
    "doctor": FindingsView,
    "accuracy --repredict": PredictedAgainView,
    "cubins": CubinsAnswer,
}
"""the shape of what each command prints"""


def call(*arguments: object) -> str:
    done = CliRunner().invoke(commands, list(map(str, arguments)))
    assert done.exit_code in (0, 1, 3), (arguments, done.output, done.exception)
    return done.stdout


def printed(name: str, line: Sequence[object]) -> Any:
    words = [word for word in name.split() if not word.startswith("--")]
    text = call(*words, *line, "--json")
    require_shape(ANSWERS[name], text)
    return shape(json.loads(text))


def require_shape(answer: Any, text: str) -> None:
    """Raise ValueError unless the JSON has all fields of the shape, of their types, and no other."""
    adapter = TypeAdapter(answer)
    known = adapter.dump_python(adapter.validate_json(text, strict=True), mode="json")  # without fields it has not
    if unknown := lost(shape(json.loads(text)), shape(known)):
        raise ValueError(f"{answer.__name__} has no {', '.join(unknown)}")


def fill(ledger: Ledger) -> None:
    """Write two runs: estimated, measured, sustained, suspect, incorrect, crashed and pending trials."""
    first = start_run(ledger)
    _, second = add_step(ledger, first, 40.0, 50.0)
    ledger.record_profile(second, Profile("model", "h100", {"tensor %": 12.5}, ("a remark",)))
    measured = start_run(ledger, device=Device("NVIDIA H200", "GPU-1", "sm_90", "CUDA 13.0", {"torch": "2.6"}))
    timed = replace(a_figure(45.0, Kind.MEASURED), vs_baseline=1.5, normalised_us=98.0)
    third = add_ranked(ledger, measured, timed, name="timed")
    ledger.record_measurement(third, replace(timed, policy=SUSTAINED, terms={"sm_mhz": 1410.0, "watts": 690.0}))
    add_ranked(ledger, measured, replace(timed, suspect="too fast"), {"n": 0}, "suspect")
    wrong = ledger.add_candidate(measured, PROBLEM, GPU, {"family": "wmma"}, (third,), "mutation", a_source("wrong"))
    ledger.record_binary(wrong, a_source("wrong"), a_binary())
    ledger.record_verdict(wrong, a_verdict(Outcome.INCORRECT))
    ledger.finish(wrong, Outcome.INCORRECT, "off by 1", None, "emulator")
    ledger.add_candidate(measured, PROBLEM, GPU, {"family": "scalar"}, (), None)


def own_space(folder: Path) -> SearchSpace:
    workload = register_kernel(folder)
    problem = workload.parse(workload.example)
    return load_space(workload.space_file(), problem, find_gpu("h100"))


def of_other_machines() -> dict[str, Any]:
    """Return what commands print that need a GPU, a cluster or seconds of work, from the records that they print."""
    candidate = Candidate(1, 1, PROBLEM, GPU, {"n": 1})
    baseline = Baseline("MATH", "NVIDIA H100", 900.0, 305.0, (900.0,), POLICY)
    refused = RefusedBaseline("CUDNN_ATTENTION", "NVIDIA H100", "No available kernel.")
    pair = Pair(1, PROBLEM, GPU, "NVIDIA H100", "wmma", 2.0, 2.5)
    node = Node("n1", "host", "10.0.0.1", 8, {"h100": 1}, "3.12.1", "0.1.0", "NVRTC 13.0", "no compiler")
    status = ClusterStatus(
        nodes=[node], cpus=8.0, cpus_busy=1.0, gpus=1.0, gpus_busy=1.0,
        at_work=[BusyGpu("h100", "host", "NVIDIA H100", "GPU-1", "search", "trial 3", 2.0)],
        searches=[DetachedStatus("search:1", "host", PROBLEM, ("h100",), 3, 60, "trial 3")],
    )  # fmt: skip
    kernel = SimpleNamespace(
        entry="k", arch=90, registers=32, shared_bytes=0, local_bytes=0, parameters=[(0, 8)], max_threads=None,
        cluster=(1, 1, 1),
    )  # fmt: skip
    kernels = [kernel, SimpleNamespace(**vars(kernel) | {"max_threads": 256})]
    row = Row("ours", "wmma", PROBLEM, GPU, "boost", 9.0, 10.0, "wgmma with softmax", "tensor")
    rows = [row] * 3
    return {
        "measure": measured_json(
            MeasureResult(2, (baseline, refused), (candidate,), (pair,), Agreement(2, 0.5, 0.1), ())
        ),
        "propose": proposed_json(ProposeResult(3, (candidate,), 20, "all proposals judged")),
        "profile": profile_json(1, Profile("model", "h100", {"tensor %": 12.5}, ("a remark",))),
        "cluster status": cluster_json(status),
        "accuracy": accuracy_json(rows),
        "cubins": cubins_json(Path("kernels.cubin"), kernels),
        "doctor": findings_json(True, [Finding("NVRTC", False, "is missing", "pip install it", True)]),
        "accuracy --repredict": again_json([1], ["trial 2: no machine code"]),
    }


# --- what is exported


def bundle() -> dict[str, Any]:
    """Return an exported kernel's files, and the fields of its kernel.json."""
    workload, problem = parse_problem(PROBLEM)
    candidate = Candidate(
        3, 1, PROBLEM, GPU, {"family": "wmma", "tile_m": 64}, Outcome.MEASURED, source=a_source(), binary=a_binary(),
        verdict=a_verdict(), binary_verdict=replace(a_verdict(), device=EXECUTOR),
        measurement=replace(a_figure(45.0, Kind.MEASURED), vs_baseline=1.5),
    )  # fmt: skip
    files = export_files(candidate, Target(workload, problem, find_gpu(GPU)), grids={78: (78, 1, 1)})
    described = json.loads(files["kernel.json"])
    names = [name.replace(described["module"], "MODULE") for name in files]
    return {"files": [*names, CHECKSUMS], "kernel.json": shape(described)}


# --- the road of a search

NUMBERS = """\
kernel = "attention"
[knobs]
family = ["left", "right"]
a = [1, 2, 4, 8, 16]
b = { values = [0, 1, 2, 3, 4, 5, 6, 7], when = "family == 'right'" }
c = [0.0, 0.25, 0.5, 0.75, 1.0]
d = ["none", "some", "all"]
e = { values = [false, true], when = "d != 'none'" }
[[constraint]]
expr = "a + b < 20"
why = "they must fit"
[[start]]
family = "right"
a = 4
b = 2
c = 0.5
d = "none"
""" + launches("left", "right")
SEEDS = 20


def time_of(config: Config) -> float:
    """Return a time that each knob and some pairs of knobs move, without ties."""
    text = json.dumps(dict(config), sort_keys=True)
    noise = int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 2**32
    slow = sum((index + 1) * (len(str(value)) % 5) for index, value in enumerate(config.values()))
    return 100.0 + slow + float(config.get("b", 3)) * (1.0 + float(config.get("c", 0.0))) + noise


def proposals(space: StartedSpace, sampler: str, seed: int, count: int) -> str:
    """Return a digest of the configurations that a search asks for, in order, with their operators and parents."""
    proposer, asked = Proposer(space, sampler, seed), []
    for trial in range(count):
        proposal = proposer.propose()
        if proposal is None:
            break
        proposer.started(proposal, trial)
        asked.append([proposal.key, proposal.operator, proposal.parents])
        rejected = trial % 7 == 3
        proposer.tell(proposal, None if rejected else (time_of(proposal.config),))
    return digest(asked)


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


SEARCHES = {f"evolution numbers {seed}": ("numbers", "evolution", seed, 30) for seed in range(SEEDS)} | {
    "evolution recorded": ("recorded", "evolution", 1, 30),
    "evolution attention": ("attention", "evolution", 1, 45),
    "tpe numbers": ("numbers", "tpe", 1, 15),
    "nsga2 numbers": ("numbers", "nsga2", 1, 25),
    "cmaes numbers": ("numbers", "cmaes", 1, 15),
    "gp numbers": ("numbers", "gp", 1, 12),
    "random numbers": ("numbers", "random", 1, 15),
}
"""space, sampler, seed and the number of proposals"""


def search(name: str) -> str:
    space, sampler, seed, count = SEARCHES[name]
    return proposals(searched_space(space), sampler, seed, count)


@cache
def searched_space(name: str) -> StartedSpace:
    if name == "numbers":
        return space_from_text(NUMBERS, name, *bound(PROBLEM))
    if name == "attention":
        return load_space(asset("search_spaces") / "attention.toml", *bound("attention:b16,h16,s2048,d128,fp16"))
    with tempfile.TemporaryDirectory() as folder:
        return read_recorded(kernel_tuner_cache(Path(folder) / "test.json", paddings=5))


def searches() -> dict[str, str]:
    """Return what each search asks for."""
    return {name: search(name) for name in SEARCHES}


def bound(problem: str) -> tuple[Any, Any]:
    return parse_problem(problem)[1], find_gpu("h100")


# --- the spaces that come with evoengine

PROBLEMS = (
    ("attention:b16,h16,s2048,d64,fp16", "h100"),
    ("attention:b16,h16,s2048,d128,fp16,causal", "h100"),
    ("attention:b2,h8,s4096,d192,dv128,bf16", "h200"),
    ("attention:b16,h16,s2048,d128,fp16", "a100"),
    ("attention:b16,h16,s2048,d256,bf16,causal", "l4"),
    ("gemm:m4096,n4096,k4096,fp16", "h100"),
    ("gemm:m512,n512,k512,bf16", "a100"),
    ("rms_norm:rows4096,hidden4096,bf16", "h100"),
    ("rowwise:softmax,rows8192,hidden4096,bf16", "h100"),
    ("convolution:w4096,h4096,fw17,fh17", "a100"),
    ("conv2d:n32,c128,h28,w28,k128,r3,s3,pad1,fp16", "a100"),
    ("decode:b32,h32,kv8,s8192,d128,bf16,page16", "h100"),
)


def space(problem: str, gpu: str) -> dict[str, Any]:
    """Return a space's start points, and a digest of every configuration that it admits, in order."""
    workload, parsed = parse_problem(problem)
    space = load_space(asset("search_spaces") / f"{workload.name}.toml", parsed, find_gpu(gpu))
    rows = hashlib.sha256()
    for enumeration in space._enumerations.values():
        for knob in space.knobs:
            rows.update(enumeration.rows[knob.name].tobytes())
    return {
        "combinations": space.size,
        "valid": space.valid,
        "configurations": rows.hexdigest()[:16],
        "starts": len(space.starts),
        "starts in order": digest([space.starts, space.dropped_starts]),
        "neighbours of the first": digest(space.neighbours(space.starts[0])),
    }


def spaces() -> dict[str, Any]:
    return {f"{problem} on {gpu}": space(problem, gpu) for problem, gpu in PROBLEMS}


def starts() -> dict[str, list[Any]]:
    """Return the start points of each space file, whatever the problem."""
    found = {}
    for file in sorted(asset("search_spaces").glob("*.toml")):
        problem, gpu = bound(find_workload(file.stem).example)
        found[file.stem] = [dict(config) for _, config in load_space(file, problem, gpu).start_points()]
    return found


# --- names


def names() -> dict[str, Any]:
    """Return the names of `import evoengine`; of functions with their parameters."""
    return {name: _parameters(getattr(evoengine, name)) for name in evoengine.__all__}


def _parameters(value: Any) -> list[str] | str:
    """Return the parameters that a caller may name; `=` where one may be left out."""
    if inspect.isclass(value):
        return "class"
    given = inspect.signature(value).parameters.values()
    return [f"{p.name}{'=' * (p.default is not p.empty)}" for p in given if p.kind is not p.VAR_KEYWORD]


# --- the records


def json_fields() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return json_shapes(Path(folder))


PROMISES = {
    "names": names,
    "json": json_fields,
    "bundle": bundle,
    "searches": searches,
    "spaces": spaces,
    "starts": starts,
}
"""each is recorded in a file of its own"""


def recorded(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text("utf-8"))


def written(promised: Any) -> str:
    """Return it as JSON, the inner fields of a field on its line."""
    text = json.dumps(promised, indent=1)
    return re.sub(r"\n {4,}", " ", text).replace("\n   }", " }") + "\n"


def main() -> None:
    for name, promised in PROMISES.items():
        (FOLDER / f"{name}.json").write_text(written(promised()), "utf-8")


if __name__ == "__main__":
    main()
