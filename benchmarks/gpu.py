"""Everything that needs a GPU, in eight minutes: a sweep that holds the model against its times, then searches
of FlashAttention-3's problems beside every backend of SDPA, JSON and tables; without --no-tests the `gpu` tests first.

    python benchmarks/gpu.py --no-tests             on a machine with a GPU and NVRTC: `make gpu`
    python benchmarks/gpu.py --prepare FILE         on any machine: compiles and gates candidates into a ledger
    python benchmarks/gpu.py --from FILE            on a machine with a GPU that can install nothing: times those

The last needs the checkout, with the dependencies on PYTHONPATH. `--problem` takes several, which share the minutes
alike. Results go to benchmarks/results/GPU-DATE.json, or beside it where there is one of that day already.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import exp2_sweep  # noqa: E402  (the checkout need not be installed)
from evoengine import __version__  # noqa: E402
from evoengine.devices.driver import GpuDevice, find_driver  # noqa: E402
from evoengine.errors import MachineError  # noqa: E402
from evoengine.gpu import find_gpu  # noqa: E402
from evoengine.ledger.store import open_ledger  # noqa: E402
from evoengine.records import Baseline, RefusedBaseline  # noqa: E402
from evoengine.sass.predict import Unpredictable  # noqa: E402
from evoengine.tuning.measure import measured_pairs  # noqa: E402
from evoengine.workloads.attention.problem import parse_problem  # noqa: E402

MINUTES = 8.0
RESERVE_SECONDS = 75.0
"""of a problem: for starting, finals and writing, after the search has started its last candidate"""
TEST_SECONDS = 150.0
SWEEP_SECONDS = 90.0
"""for three kernels that differ in one knob"""
PROBLEMS = ("b2,h32,s8192,d64,fp16", "b1,h16,s16384,d128,fp16", "b2,h16,s8192,d128,fp16,causal")
"""of FlashAttention-3's figures, those that benchmarks/machine_code.py has marks for; the sweep is of the first"""
LIBRARIES = ("torch", "cupy-cuda13x", "cupy-cuda12x", "numpy")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.prepare:
        return prepare(options)
    start = time.monotonic()
    found = find_driver()
    if isinstance(found, str):
        print(f"evoengine: no GPU to time on: {found}; --prepare FILE compiles for one", file=sys.stderr)
        return MachineError.exit_code
    driver, [device, *_] = found
    results = {**about(device, driver), "tests": None, "problems": []}
    path, codes = file_for(results, options.out), []
    tests = None if options.no_tests else run_tests(path.with_suffix(".tests.log"))
    if tests:
        results["tests"] = tests
        write(results, path)
    with tempfile.TemporaryDirectory(prefix="evoengine-") as folder:
        db = options.source or Path(folder, "gpu.db")
        if not options.source:
            run_sweep(options, db, SWEEP_SECONDS)
            add_sweep(results, options, db, path)
        for done, problem in enumerate(options.problem):
            left = 60 * options.minutes - (time.monotonic() - start)
            code, summary = time_problem(options, problem, db, left / (len(options.problem) - done))
            codes.append(code)
            if summary is not None:
                results["problems"].append(gather(problem, summary, db))
                write(results, path)  # after each: the session may be killed in the next
        if options.source:
            add_sweep(results, options, db, path)
    if not results["problems"]:
        return codes[0] or 1
    print(tables(results))
    print(f"wrote {path}", file=sys.stderr)
    wrong = len(results["problems"]) < len(options.problem) or (tests and tests["failed"])
    return 1 if wrong else 0


def time_problem(options: argparse.Namespace, problem: str, db: Path, seconds: float) -> tuple[int, dict | None]:
    if options.source:
        return run_for(measuring(options, problem, db), seconds)
    return run_for(searching(options, problem, db, seconds - RESERVE_SECONDS), seconds)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prepare", type=Path, metavar="FILE", help="compile into this ledger; needs no GPU")
    parser.add_argument("--from", type=Path, metavar="FILE", dest="source", help="time what --prepare left there")
    parser.add_argument("--gpu", default="h100", help="what to compile for (default: h100)")
    parser.add_argument("--problem", nargs="+", default=list(PROBLEMS), help=f"one or more (default: {PROBLEMS})")
    parser.add_argument("--trials", type=int, default=200, help="candidates of each problem (default: 200)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"for all of it (default: {MINUTES:g})")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results")
    parser.add_argument("--no-tests", action="store_true", help="leave out the gpu tests")
    options = parser.parse_args(arguments)
    # evoengine runs in the checkout, wherever this was called
    for name in ("prepare", "source", "out"):
        if path := getattr(options, name):
            setattr(options, name, path.resolve())
    return options


def evoengine(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "evoengine", *map(str, arguments)]


def prepare(options: argparse.Namespace) -> int:
    """The sweep, and a search by estimate per problem: its ledger holds the binaries, gated in the emulator."""
    if code := run_sweep(options, options.prepare, None, "emulator"):
        return code
    for problem in options.problem:
        target = ("--gpu", options.gpu, "--problem", problem, "--trials", options.trials)
        command = evoengine("search", "--device", "emulator", "--db", options.prepare, *target)
        if code := subprocess.run(command, cwd=ROOT).returncode:
            return code
    return 0


def searching(options: argparse.Namespace, problem: str, db: Path, seconds: float) -> list[str]:
    minutes = max(seconds / 60, 0.5)
    target = ("--gpu", options.gpu, "--problem", problem, "--trials", options.trials, "--minutes", minutes)
    return evoengine("search", "--device", "cuda", "--db", db, *target, "--json")


def run_sweep(options: argparse.Namespace, db: Path, seconds: float | None, device: str = "cuda") -> int:
    """Its kernels into the ledger; nothing where the GPU or the problem has none. Without `seconds`, to its end."""
    gpu, problem = find_gpu(options.gpu), options.problem[0]
    start = exp2_sweep.start_of(problem, gpu) if gpu.capability == exp2_sweep.CAPABILITY else None
    if start is None:
        return 0
    with tempfile.TemporaryDirectory(prefix="evoengine-") as folder:
        space = Path(folder, "exp2_on_fma.toml")
        space.write_text(exp2_sweep.narrowed_space(start))
        target = ("--gpu", options.gpu, "--problem", problem, "--family", "wgmma", "--space", space)
        command = evoengine("search", "--device", device, "--db", db, *target, "--trials", min(3, options.trials))
        if seconds is None:
            return subprocess.run(command, cwd=ROOT).returncode
        return run_for([*command, "--json"], seconds)[0]


def add_sweep(results: dict, options: argparse.Namespace, db: Path, path: Path) -> None:
    if not db.exists():
        return
    try:
        results["sweep"] = exp2_sweep.verdict(db, options.problem[0], options.gpu)
    except Unpredictable as reason:
        print(f"the sweep of {exp2_sweep.KNOB} cannot be set beside predictions: {reason}", file=sys.stderr)
    write(results, path)


def measuring(options: argparse.Namespace, problem: str, db: Path) -> list[str]:
    return evoengine("measure", "--all", "--gpu", options.gpu, "--problem", problem, "--db", db, "--json")


def run_for(command: list[str], seconds: float) -> tuple[int, dict | None]:
    """Runs it and, when its time is up, has it end with what there is, as Ctrl-C does; its JSON, or None."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        out, _ = process.communicate(timeout=max(seconds, 1.0))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate()
    return process.returncode, json.loads(out) if out.strip() else None


def run_tests(log: Path) -> dict[str, object] | None:
    """The tests that need a GPU, each in `log` as it ends: nothing is lost when time is up. None without pytest."""
    if find_spec("pytest") is None:
        return None
    start, ended = time.monotonic(), None
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-u", "-m", "pytest", "-v", "--color=no", "-m", "gpu", "-p", "no:cacheprovider"]
    with log.open("w") as file:
        try:
            subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=TEST_SECONDS)
        except subprocess.TimeoutExpired:
            ended = f"time was up after {TEST_SECONDS:g} s"
    found = read_log(log.read_text(), time.monotonic() - start)
    if ended is None and not found["passed"] + found["failed"] + found["skipped"]:
        ended = "pytest did not start"  # for want of a package for one
    return found | {"failed": found["failed"] + 1, "names": [*found["names"], ended]} if ended else found


RESULT = re.compile(r"^(\S+\.py::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)


def read_log(text: str, seconds: float) -> dict[str, object]:
    """Counts, and the names of what failed, from the lines that pytest -v prints as each test ends."""
    ended = dict(RESULT.findall(text))
    failed = [name for name, how in ended.items() if how in ("FAILED", "ERROR")]
    skipped = sum(how == "SKIPPED" for how in ended.values())
    passed = len(ended) - len(failed) - skipped
    return {"passed": passed, "failed": len(failed), "skipped": skipped, "seconds": round(seconds, 1), "names": failed}


def about(device: GpuDevice, driver: str) -> dict[str, object]:
    """The machine and the code that the figures are of."""
    return {
        "gpu": device.name,
        "driver": f"CUDA {driver}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "evoengine": __version__,
        "commit": commit(),
        "machine": {"python": platform.python_version(), **libraries()},
    }


def gather(problem: str, summary: dict, db: Path) -> dict[str, object]:
    """All that was measured of a problem."""
    with open_ledger(str(db), create=False) as ledger:
        baselines = ledger.baselines(summary["run"])
        figures = {c["trial"]: ledger.candidate(c["trial"]).measurement for c in summary["best"]}
        pairs = measured_pairs(ledger, str(parse_problem(problem)))
    return {
        "problem": str(parse_problem(problem)),
        "baselines": [
            {"name": b.name, "tflops": b.tflops, "median_us": b.median_us, "samples": len(b.samples_us)}
            for b in baselines
            if isinstance(b, Baseline)
        ],
        "not_timed": {b.name: b.reason for b in baselines if isinstance(b, RefusedBaseline)},
        "best": [c | {"terms": dict(figures[c["trial"]].terms)} for c in summary["best"]],
        "estimates": [asdict(pair) for pair in pairs],
        "session": {name: value for name, value in summary.items() if name not in ("best", "baselines", "estimates")},
    }


def libraries() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def file_for(results: dict, folder: Path) -> Path:
    """One that is not there yet."""
    name = f"{'-'.join(str(results['gpu']).lower().split())}-{results['date']}"
    names = (f"{name}{suffix}.json" for suffix in chain([""], (f"-{n}" for n in count(2))))
    return next(folder / own for own in names if not (folder / own).exists())


def write(results: dict, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n")


def tables(results: dict) -> str:
    """Markdown, one a problem."""
    where = f"on {results['gpu']}, {results['date']}, evoengine {results['evoengine']}"
    sweep = results.get("sweep")
    swept = [f"{sweep['problem']} {where}, speed by {exp2_sweep.KNOB}\n\n{exp2_sweep.table(sweep)}"] if sweep else []
    return "\n\n".join([*swept, *(f"{of['problem']} {where}\n\n{table(of)}" for of in results["problems"])])


def _shown(baseline: str) -> str:
    """The name of a package's kernel has spaces, that of a backend has none."""
    return baseline if " " in baseline else f"SDPA {baseline.lower()}"


def table(of: dict) -> str:
    """SDPA's backends, packages' kernels and the best of each family, fastest first."""
    rows = [(b["tflops"], _shown(b["name"]), b["median_us"], None) for b in of["baselines"]]
    firsts: dict[str, dict] = {}
    for candidate in of["best"]:
        firsts.setdefault(candidate["config"]["family"], candidate)
    for family, c in firsts.items():
        rows.append((c["tflops"], f"evoengine {family} (trial {c['trial']})", c["median_us"], c["vs_sdpa"]))
    lines = [
        "| kernel | TFLOPS | µs | × fastest SDPA |",
        "|---|---:|---:|---:|",
    ]
    for tflops, name, microseconds, times in sorted(rows, reverse=True, key=lambda row: row[0]):
        lines.append(f"| {name} | {tflops:,.4g} | {microseconds:,.1f} | {f'{times:.3f}' if times else ''} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
