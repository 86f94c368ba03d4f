"""Kernels timed on an H100, each beside the time that the model predicted for it before.

    python benchmarks/measured_h100.py --prepare DIR --data SHARED   anywhere: kernels, launches, frozen predictions
    python benchmarks/measured_h100.py --prepare DIR --set families  likewise, of measured_families.py
    python benchmarks/measured_h100.py --from DIR --out FILE.json    on the GPU: times them; needs NumPy alone
    python benchmarks/measured_h100.py --counters DIR --out FILE     on the GPU: what ncu counts of some of them, cold
    python benchmarks/measured_h100.py --report FILE.json DIR        anywhere: errors by class and set, ranks, picks
    python benchmarks/measured_h100.py --again DIR ROWS.jsonl        anywhere: the rows as the model predicts them now
    python benchmarks/measured_h100.py --compare FILE.json DIR ROWS.jsonl      anywhere: errors of both
    python benchmarks/measured_h100.py --page FILE.json ROWS.jsonl OUT.json    anywhere: rows for accuracy_page.py

The time of a launch is that between two events around it, of ten or more, once with what the launches before left in
the L2 and once behind a read of 256 MB; a one-thread kernel before each (behind each, cold) reads the SM's clock
against the GPU's timer. Short kernels are timed back to back as well. The heaviest kernels of the tensor cores then run
for 0.6 s without a pause, and torch's own kernels are timed at the same problems, where torch is installed. In what
time is left all is timed again, in the other order: `again`, by which the report says how far times repeat.
"""

from __future__ import annotations

import argparse
import gzip
import json
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

ROOT = next(p for p in Path(__file__).resolve().parents if (p / "evoengine" / "__init__.py").is_file())
sys.path.insert(0, str(ROOT))

from benchmarks.measured_bench import (  # noqa: E402
    TOOLS,
    Bench,
    Launches,
    Memory,
    Row,
    about_gpu,
    call,
    load,
    read_results,
    read_rows,
)
from evoengine.devices import cuda_api  # noqa: E402
from evoengine.devices.cuda_api import CudaError  # noqa: E402

ROW_LIMIT_SECONDS, START_LIMIT_SECONDS, SUSTAINED_ROWS = 8.0, 60.0, 30
TENSOR_CLASSES = ("wgmma with softmax", "wgmma", "mma.sync")
TORCH_SECONDS = 45.0
PARTS = ("rows", "sustained", "torch", "again")
TORCH = ROOT / "benchmarks" / "measured_torch.py"


def held_by(folder: Path, row: Row) -> tuple[int, int]:
    """Return the registers of a thread and the bytes of shared memory of a block of the row's first kernel."""
    from evoengine.sass.cubin import read_kernel

    image = gzip.decompress((folder / "cubins" / f"{row['cubin']}.gz").read_bytes())
    kernel = read_kernel(image, row["kernels"][0]["entry"])
    return kernel.registers, kernel.shared_bytes + int(row["kernels"][0]["shared"])


def in_turns(rows: Sequence[Row]) -> list[Row]:
    """Return the rows so that every problem of every set comes once before one comes again."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["set"], "" if row["config"] is None else row["problem"]].append(row)
    turns = max(map(len, groups.values()))
    return [of[turn] for turn in range(turns) for of in groups.values() if turn < len(of)]


# ── a process that times, and one that keeps it going ───────────────────────────────────────────────────────────────


def work(folder: Path) -> int:
    """Time the rows whose ids come on the input, a JSON line each; end where the context does not survive a failure."""
    rows = {row["id"]: row for row in read_rows(folder)}
    bench = Bench(folder, list(rows.values()))
    print(json.dumps({"ready": about_gpu()}), flush=True)
    for line in sys.stdin:
        what, name = line.split()
        try:
            found = bench.sustain(rows[name]) if what == "sustain" else bench.measure(rows[name])
            print(json.dumps(found), flush=True)
        except Exception as error:
            gone = not is_alive()
            print(json.dumps({"id": name, "error": f"{type(error).__name__}: {error}", "gone": gone}), flush=True)
            if gone:
                return 3
    return 0


def is_alive() -> bool:
    """Return whether the context has survived."""
    try:
        call("cuCtxSynchronize")
    except CudaError:
        return False
    return True


class Worker:
    """A process that answers lines with lines, each within a time limit."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, *map(str, arguments)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def say(self, line: str) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass

    def hear(self, seconds: float) -> Row:
        """Return the next answer; {"error": …} where the process has ended or does not answer, which ends it."""
        try:
            line = self._lines.get(timeout=max(seconds, 0.1))
        except queue.Empty:
            self.end()
            return {"error": f"no answer within {seconds:.0f} s", "gone": True}
        if not line:
            self.end()
            return {"error": f"the process ended with {self._process.returncode}", "gone": True}
        try:
            return dict(json.loads(line))
        except ValueError:
            return self.hear(seconds)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        self._process.kill()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:  # the driver holds it in a call
            print("a process does not end", file=sys.stderr)


class Session:
    """One sitting at the GPU: every result is in FILE.jsonl once it is there, and all of them in FILE at the end."""

    def __init__(self, folder: Path, out: Path, seconds: float) -> None:
        self.folder, self.out, self.begun, self.seconds = folder, out, time.monotonic(), seconds
        out.parent.mkdir(parents=True, exist_ok=True)
        self._stream = out.with_suffix(".jsonl").open("w")
        self.results: dict[str, list[Row]] = {"gpu": [], "rows": [], "sustained": [], "torch": [], "again": []}
        self._worker: Worker | None = None

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.begun)

    def note(self, kind: str, found: Row) -> None:
        self.results[kind].append(found)
        self._stream.write(json.dumps({"kind": kind, **found}) + "\n")
        self._stream.flush()

    def ask(self, what: str, name: str) -> Row:
        if self._worker is None or not self._worker.is_running:
            self._worker = Worker(Path(__file__).resolve(), "--worker", self.folder)
            ready = self._worker.hear(min(START_LIMIT_SECONDS, self.left))
            self.note("gpu", ready)
            if "ready" not in ready:
                return {"id": name, "error": f"the process did not start: {ready.get('error')}", "start": True}
        self._worker.say(f"{what} {name}")
        answer = self._worker.hear(min(ROW_LIMIT_SECONDS, self.left + 1))
        if answer.get("gone"):
            self._worker.end()
        return {"id": name, **answer}

    def run(self, rows: Sequence[Row], parts: Sequence[str]) -> None:
        baselines = Worker(TORCH, self.folder) if "torch" in parts else None
        for_torch = TORCH_SECONDS if baselines else 0.0
        reserve = min(for_torch + 1.3 * SUSTAINED_ROWS * ("sustained" in parts), self.seconds / 3)
        try:
            if "rows" in parts:
                self._rows("rows", in_turns(rows), reserve)
            if "sustained" in parts:
                self._sustained(rows, for_torch)
            if baselines:
                self._torch(baselines)
            if "again" in parts:
                self._rows("again", in_turns(rows)[::-1], 2)
        finally:
            for worker in (self._worker, baselines):
                if worker:
                    worker.end()
            self.results["gpu"].append({"seconds": round(time.monotonic() - self.begun, 1)})
            self.out.write_text(json.dumps(self.results) + "\n")

    def _rows(self, kind: str, rows: Sequence[Row], reserve: float) -> None:
        failed_starts = 0
        for n, row in enumerate(rows):
            if self.left < reserve or failed_starts > 2:
                print(f"stopped before row {n} of {len(rows)}", file=sys.stderr)
                return
            found = self.ask("measure", row["id"])
            failed_starts += "start" in found
            self.note(kind, found)
            if n % 25 == 0 or "error" in found:
                us, guess = found.get("cold_us", [0]), row["predicted"].get("cold", {"us": "nothing"})["us"]
                said = found.get("error") or f"{statistics.median(us):.1f} µs, predicted {guess}"
                print(f"{self.seconds - self.left:.0f} s, {n + 1}/{len(rows)} {row['set']}: {said}", file=sys.stderr)

    def _sustained(self, rows: Sequence[Row], reserve: float) -> None:
        for row in heaviest(rows, self.results["rows"]):
            if self.left < reserve + 2:
                return
            self.note("sustained", self.ask("sustain", row["id"]))

    def _torch(self, baselines: Worker) -> None:
        baselines.say(str(max(5.0, min(TORCH_SECONDS, self.left - 3))))
        while self.left > 0:
            found = baselines.hear(self.left)
            if "end" in found or "gone" in found:
                self.note("torch", found)
                return
            self.note("torch", found)


def heaviest(rows: Sequence[Row], measured: Sequence[Row]) -> list[Row]:
    """Return the fastest kernels of the tensor cores, three at most of a set and problem."""
    times = {m["id"]: statistics.median(m["warm_us"]) for m in measured if m.get("warm_us")}
    known = [r for r in rows if r["id"] in times and "warm" in r["predicted"]]
    heavy = [r for r in known if r["predicted"]["warm"]["class"] in TENSOR_CLASSES]
    speeds = {r["id"]: r["flops"] / times[r["id"]] for r in heavy}
    chosen: list[Row] = []
    taken: dict[tuple[str, str], int] = defaultdict(int)
    for row in sorted((r for r in rows if r["id"] in speeds), key=lambda r: -speeds[r["id"]]):
        group = row["set"], row["problem"]
        if times[row["id"]] > 40 and taken[group] < 3 and len(chosen) < SUSTAINED_ROWS:
            taken[group] += 1
            chosen.append(row)
    return chosen


# ── counters ────────────────────────────────────────────────────────────────────────────────────────────────────────

COUNTERS = (
    "gpu__time_duration.sum", "sm__cycles_elapsed.max", "sm__cycles_active.avg", "dram__bytes_read.sum",
    "dram__bytes_write.sum", "lts__t_sectors.sum", "lts__t_sectors_op_read.sum", "lts__t_sectors_op_write.sum",
    "lts__t_sectors_lookup_hit.sum", "lts__t_sectors_lookup_miss.sum", "smsp__inst_executed.sum",
    "smsp__issue_active.sum", "sm__inst_executed_pipe_xu.sum", "sm__pipe_tensor_cycles_active.avg",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum", "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum", "l1tex__t_sectors_pipe_lsu_mem_global_op_ld_lookup_hit.sum",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
)  # fmt: skip
COUNTED_AT_ONCE, COUNTED_OF_A_GROUP, COUNT_SECONDS = 12, 3, 60.0


def count(folder: Path, out: Path, seconds: float) -> int:
    """Write what ncu counts of some rows of every set, `COUNTED_AT_ONCE` in a process, a JSON line a process.

    ncu flushes the caches before each kernel, and is told to leave the clocks alone.
    """
    begun = time.monotonic()
    known = subprocess.run(["ncu", "--query-metrics"], capture_output=True, text=True).stdout
    stems = {line.split()[0] for line in known.splitlines() if "__" in line.partition(" ")[0]}
    metrics = [name for name in COUNTERS if name in stems or name.partition(".")[0] in stems]
    options = ("--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw")
    taken: dict[tuple[str, str], int] = defaultdict(int)
    rows = []
    for row in in_turns(read_rows(folder)):
        group = row["set"], row["problem"] if row["config"] else ""
        taken[group] += 1
        if taken[group] <= COUNTED_OF_A_GROUP and row["predicted"]["cold"]["us"] < 3000:
            rows.append(row)
    with out.open("w") as file:
        for first in range(0, len(rows), COUNTED_AT_ONCE):
            left = seconds - (time.monotonic() - begun)
            if left < 15:
                print(f"stopped before row {first} of {len(rows)}", file=sys.stderr)
                break
            ids = [row["id"] for row in rows[first : first + COUNTED_AT_ONCE]]
            command = ["ncu", *options, "--metrics", ",".join(metrics), sys.executable, str(Path(__file__).resolve())]
            try:
                done = subprocess.run(
                    [*command, "--once", str(folder), *ids], capture_output=True, text=True,
                    timeout=min(left, COUNT_SECONDS),
                )  # fmt: skip
                said = {"ids": ids, "code": done.returncode, "csv": done.stdout, "stderr": done.stderr[-2000:]}
            except subprocess.TimeoutExpired:
                said = {"ids": ids, "error": "time was up"}
            file.write(json.dumps(said) + "\n")
            file.flush()
            print(f"{time.monotonic() - begun:.0f} s, {first + len(ids)}/{len(rows)}", file=sys.stderr)
    return 0


def once(folder: Path, ids: Sequence[str]) -> int:
    """Launch each row twice, the second time for a profiler."""
    by_id = {row["id"]: row for row in read_rows(folder)}
    rows = [by_id[name] for name in ids]
    cuda_api.use_primary_context()
    memory = Memory(rows)
    for row in rows:
        module, _ = load(folder, row)
        launches = Launches(row, module, memory.place(row))
        launches.prepare()
        launches.queue()
        call("cuCtxSynchronize")
        launches.prepare()
        call("cuCtxSynchronize")
        call("cuProfilerStart")
        launches.queue()
        call("cuCtxSynchronize")
        call("cuProfilerStop")
        print(f"launched {row['id']} {len(row['kernels'])}", flush=True)
    return 0


# ── the command line ────────────────────────────────────────────────────────────────────────────────────────────────


def prepare_set(options: argparse.Namespace) -> None:
    """Write the data set that --set names into the folder of --prepare."""
    from benchmarks import measured_families, measured_kernels

    folder, of_time = options.prepare, (options.processes, options.seconds, options.only)
    known = read_rows(options.known) if options.known else []
    measured_kernels.write_tools(folder, TOOLS)
    if options.set == "first":
        measured_kernels.prepare_folder(folder, measured_kernels.groups(options.data), *of_time)
    elif options.set == "searches":
        measured_families.search_folder(folder, *of_time, known)
    elif options.set in ("families", "later"):
        of_set = measured_families.FAMILIES if options.set == "families" else measured_families.LATER
        measured_kernels.prepare_folder(folder, measured_families.groups(of_set, known, ("cold",)), *of_time)
    else:
        later = (
            *measured_families.groups(measured_families.FAMILIES, known, ()),
            *measured_families.space_groups(known, ()),
        )
        measured_kernels.prepare_folder(folder, later, *of_time)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prepare", type=Path, metavar="DIR", help="write kernels and predictions here")
    parser.add_argument("--data", type=Path, metavar="SHARED", help="folder of measured_kernels and fa3_machine_code")
    parser.add_argument(
        "--set", choices=("first", "families", "later", "unpredicted", "searches"), default="first",
        help="families, later and searches of measured_families.py; unpredicted: families that --again predicts later",
    )  # fmt: skip
    parser.add_argument(
        "--known", type=Path, metavar="DIR", help="leave out what this folder has; searches go on from it"
    )
    parser.add_argument("--processes", type=int, default=2, help="that compile and predict (default: 2)")
    parser.add_argument("--from", type=Path, dest="source", metavar="DIR", help="time what --prepare wrote")
    parser.add_argument("--out", type=Path, metavar="FILE", help="results of --from")
    parser.add_argument("--seconds", type=float, default=240, help="for all of --from (default: 240)")
    parser.add_argument("--only", default="", help="rows of sets that contain this")
    parser.add_argument("--parts", default=",".join(PARTS), help="of --from, separated by commas (default: all)")
    parser.add_argument("--report", type=Path, nargs=2, metavar=("FILE", "DIR"), help="tables of the results")
    parser.add_argument(
        "--expected", type=Path, metavar="FILE", help="of --report: what measured_torch.py --expected wrote"
    )
    parser.add_argument(
        "--again", type=Path, nargs=2, metavar=("DIR", "ROWS"), help="predict what --prepare wrote again"
    )
    parser.add_argument(
        "--compare", type=Path, nargs=3, metavar=("FILE", "DIR", "ROWS"), help="errors then, and as predicted --again"
    )
    parser.add_argument(
        "--page", type=Path, nargs=3, metavar=("FILE", "ROWS", "OUT"), help="both for benchmarks/accuracy_page.py"
    )
    parser.add_argument("--freeze", type=Path, nargs=2, metavar=("DIR", "FILE"), help="write the predictions alone")
    parser.add_argument("--counters", type=Path, metavar="DIR", help="have ncu count some of what --prepare wrote")
    parser.add_argument("--once", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        return work(options.worker)
    if options.once:
        return once(Path(options.once[0]), options.once[1:])
    if options.counters:
        if not options.out:
            parser.error("--counters takes --out FILE")
        return count(options.counters, options.out, options.seconds)
    if options.source:
        if not options.out:
            parser.error("--from takes --out FILE")
        rows = [row for row in read_rows(options.source) if options.only in row["set"]]
        Session(options.source, options.out, options.seconds).run(rows, options.parts.split(","))
        return 0
    from benchmarks import measured_report

    if options.report:
        results, known = read_results(options.report[0]), read_rows(options.report[1])
        print(measured_report.report(results, known))
        if options.expected:
            found = json.loads(options.expected.read_text())
            print("\n".join(measured_report.beside_references(results, known, found)))
    elif options.compare:
        file, folder, again = options.compare
        rows = [json.loads(line) for line in again.read_text().splitlines()]
        results = read_results(file)
        print(measured_report.comparison(results, read_rows(folder), rows))
        holds = {row["id"]: held_by(folder, row) for row in rows}
        print("\n".join(measured_report.simplest(measured_report.pairs_of(results, rows), holds)))
    elif options.page:
        file, again, out = options.page
        rows = [json.loads(line) for line in again.read_text().splitlines()]
        out.write_text(json.dumps(measured_report.page_rows(read_results(file), rows)))
    elif options.again:
        from benchmarks.measured_kernels import predict_folder_again

        predict_folder_again(*options.again, options.processes, options.only)
    elif options.freeze:
        options.freeze[1].write_text(measured_report.frozen(read_rows(options.freeze[0])))
    elif options.prepare:
        if options.set == "first" and not options.data:
            parser.error("--prepare takes --data SHARED, or another --set")
        prepare_set(options)
    else:
        parser.error("say --prepare, --from, --report, --again or --compare")
    return 0


if __name__ == "__main__":
    sys.exit(main())
