"""A ledger with all that a page of charts can show: every kind of figure, finals, baselines, lineage, and hostile text
wherever the ledger has text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from evoengine.ledger.store import Ledger, open_ledger
from evoengine.records import LED_BY, Baseline, CaseResult, Kind, Outcome, Verdict
from tests.support.ledger_examples import POLICY, PROBLEM, SUSTAINED, a_binary, a_figure, a_source, start_run

HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=document.title='owned'>"
    '<a href="javascript:alert(1)">x</a> %{x} $\\alpha$ &lt;b&gt; \u2028 "q"'
)
TITLE = f"{PROBLEM} on h100"


def make_ledger(file: Path, text: str = HOSTILE) -> None:
    """Two dozen trials, of which each comes from the one before; `text` is among the values of a knob, its names, the
    operators, reasons, devices and cases."""
    with open_ledger(str(file), create=True) as ledger:
        run = start_run(ledger)
        for n in range(24):
            config = {"family": "mma" if n % 2 else text, "tile_m": 32 * (1 + n % 3), "stages": 1 + n % 4, text: n % 2}
            operator = f"mutation{LED_BY}{text}, the model" if n in (4, 5, 6, 9) else text
            source = None if n % 6 == 5 else a_source(f"kernel_{n + 1}")
            trial = ledger.add_candidate(run, PROBLEM, "h100", config, (n,) if n else (), operator, source)
            if n % 6 == 5:
                ledger.record_verdict(trial, _verdict(text, 5.0, Outcome.INCORRECT))
                ledger.finish(trial, Outcome.INCORRECT, text, None, text)
            else:
                _add_ranked(ledger, trial, 40.0 - n, text)
        ledger.add_candidate(run, PROBLEM, "h100", {"family": "mma"}, (), None)
        for name in (text, "cuDNN"):
            ledger.record_baseline(run, Baseline(name, text, 30.0, 100.0, (30.0,), POLICY))
        for place, trial in enumerate((23, 22, 21), 1):
            terms = {"place": float(place), "final_of_run": float(run)}
            samples = tuple(17.0 + place + 0.01 * i for i in range(20))
            ledger.record_measurement(trial, replace(_measured(17.1 + place, text), terms=terms, samples_us=samples))
            ledger.record_measurement(trial, replace(_measured(25.0 + place, text), policy=SUSTAINED))


def _add_ranked(ledger: Ledger, trial: int, us: float, text: str) -> None:
    ledger.record_binary(trial, a_source(f"kernel_{trial}"), a_binary())
    ledger.record_verdict(trial, _verdict(text, 0.1 * us / 40.0, None))
    ledger.record_measurement(
        trial, replace(a_figure(1.0), device=f"model {text}", median_us=us * 1.1, tflops=90.0 / us)
    )
    if trial % 5 == 0:
        formula = replace(a_figure(1.0), terms={}, device="formula", median_us=us * 2, tflops=45.0 / us)
        ledger.record_measurement(trial, formula)
    if trial % 4 == 0:
        ledger.record_measurement(
            trial, replace(_measured(us * 3, text), kind=Kind.RECORDED, device="A100", policy=None)
        )
    ledger.record_measurement(trial, _measured(us, text))
    ledger.finish(trial, Outcome.MEASURED, None, 0.5, text)


def _measured(us: float, text: str):
    return replace(a_figure(1.0, Kind.MEASURED), device=text, median_us=us, tflops=100.0 / us, vs_baseline=30.0 / us)


def _verdict(text: str, share: float, outcome: Outcome | None) -> Verdict:
    cases = (
        CaseResult("ragged", PROBLEM, 1, outcome is None, share * 1e-3, 1e-5, 1e-3),
        CaseResult(
            text, PROBLEM, 2, outcome is None, None if outcome else 1e-4, None, 1e-3, "a NaN" if outcome else None
        ),
    )
    return Verdict("emulator", outcome, "off" if outcome else None, cases, 1.0)
