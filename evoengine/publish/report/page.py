"""The report page: sections with charts, Plotly inlined, and a policy that blocks all other scripts and resources.

Text from the ledger is escaped in HTML and in charts; the charts' JSON has no character that could end the script
around it. The page's Content-Security-Policy allows only the two scripts whose SHA-256 it names.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evoengine.errors import UsageError
from evoengine.paths import write_atomically
from evoengine.publish.report.style import Section
from evoengine.sandbox.untrusted import read_limited
from evoengine.text import plain

BEGINNING = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="evoengine report">
"""
"""by which a report is recognised"""
_SEAL = "<!-- SHA-256 of all before this line: "
LARGEST = 1 << 30
"""largest file, in bytes, that may be an earlier report"""
STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #f4f4f2; margin: 0; }
main { max-width: 1080px; margin: 0 auto; padding: 12px; }
h1 { font-size: 1.4rem; margin: 12px 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 0 0 4px; }
section { background: #fff; border: 1px solid #ddd; border-radius: 6px; padding: 12px; margin: 12px 0; }
p { margin: 0 0 8px; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; margin: 8px 0; }
dt { color: #666; } dd { margin: 0; overflow-wrap: anywhere; }
nav { display: flex; flex-wrap: wrap; gap: 4px 14px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.85rem; }
th, td { text-align: left; padding: 3px 10px 3px 0; border-bottom: 1px solid #eee; vertical-align: top; }
.failed { color: #b00; }
@media (max-width: 600px) { body { font-size: 15px; } main { padding: 6px; } section { padding: 8px; }
  dl { grid-template-columns: 1fr; } dt { margin-top: 4px; } }
"""
DRAW = """
"use strict";
const charts = JSON.parse(document.getElementById("charts").textContent);
const narrow = window.innerWidth < 600;
const drawing = Object.entries(charts).map(([name, chart]) => {
  const place = document.getElementById("chart-" + name);
  const layout = Object.assign({height: chart.height, autosize: true}, chart.layout);
  if (narrow) {
    layout.font = Object.assign({}, layout.font, {size: 10});
    layout.height += 16 * chart.data.length;  // the legend has a line for each
  }
  const buttons = [["toImage", "zoom2d", "pan2d", "resetScale2d"]];
  const bar = {displayModeBar: narrow ? false : "hover", modeBarButtons: buttons, displaylogo: false};
  return Plotly.newPlot(place, chart.data, layout, Object.assign({responsive: true, typesetMath: false}, bar))
    .catch(error => {
      place.textContent = "This chart could not be drawn: " + error;
      place.className = "failed";
      throw error;
    });
});
Promise.all(drawing).then(all => { document.documentElement.dataset.drawn = String(all.length); });
"""
Facts = Sequence[tuple[str, str]]
"""named facts at the top of the page"""


def page(title: str, facts: Facts, sections: Sequence[Section], plotly: str) -> str:
    """Return the whole file. `plotly` is Plotly's JavaScript."""
    charts = {section.name: section.chart for section in sections if section.chart}
    scripts = [_script(plotly), _script(DRAW)]
    body = [
        f"<h1>{_text(title)}</h1>",
        "<dl>",
        *(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in facts),
        "</dl>",
        "<nav>",
        *(f'<a href="#{s.name}">{_text(s.title)}</a>' for s in sections),
        "</nav>",
        "<noscript><p>The charts need scripts, which are disabled in this browser.</p></noscript>",
        *map(_section, sections),
    ]
    parts = [
        BEGINNING,
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(scripts)}">\n',
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
        f"<title>{_text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n",
        "\n".join(body),
        f'\n</main>\n<script type="application/json" id="charts">{_json(charts)}</script>\n',
        *(f"<script>{script}</script>\n" for script in scripts),
        "</body>\n</html>\n",
    ]
    return _sealed("".join(parts))


def write_page(file: Path, text: str) -> None:
    """Write the file completely or not at all.

    Raises UsageError if `file` is not a report, was changed since it was written, or cannot be written.
    """
    require_writable(file)
    write_atomically(file, [text])


def require_writable(file: Path) -> None:
    """Raise UsageError if no report may be written there."""
    if file.is_dir():
        raise UsageError(f"cannot write {file}: it is a folder; name a file in it, such as {file / 'report.html'}")
    if not file.exists():
        return
    try:
        found = read_limited(file, LARGEST)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {file}: {error}; --html takes a new file or an earlier report") from error
    if not found.startswith(BEGINNING.encode()):
        why = "it exists and is not a report"
    elif not is_unchanged(found):
        why = "it is a report that has been changed"
    else:
        return
    raise UsageError(f"cannot write {file}: {why}; --html takes a new file or an earlier report")


def is_unchanged(found: bytes) -> bool:
    """Return whether a report ends with the SHA-256 of its preceding text."""
    text, seal, digest = found.rpartition(_SEAL.encode())
    return bool(seal) and digest == _closing(hashlib.sha256(text).hexdigest()).encode()


def _sealed(text: str) -> str:
    return f"{text}{_SEAL}{_closing(hashlib.sha256(text.encode()).hexdigest())}"


def _closing(digest: str) -> str:
    return f"{digest} -->\n"


# ── parts ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _section(section: Section) -> str:
    parts = [f'<section id="{section.name}">', f"<h2>{_text(section.title)}</h2>", f"<p>{_text(section.text)}</p>"]
    if section.chart:
        parts.append(f'<div id="chart-{section.name}"></div>')
    if section.rows:
        parts += ['<div class="wide"><table>', _row("th", section.headings)]
        parts += [_row("td", row) for row in section.rows]
        parts.append("</table></div>")
    return "\n".join([*parts, "</section>"])


def _row(tag: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{_text(cell)}</{tag}>" for cell in cells) + "</tr>"


def _text(text: str) -> str:
    return html.escape(plain(text))


def _script(text: str) -> str:
    """Return JavaScript as it stands between the tags. Raises ValueError if it contains the end tag."""
    lowered = text.lower()
    if "</script" in lowered or "<!--" in lowered:
        raise ValueError("a script with </script or <!-- in it cannot stand in a page")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _policy(scripts: Sequence[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    # Plotly sets styles; images are those that it makes of a chart
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
        "form-action 'none'"
    )


def _json(charts: Mapping[str, Any]) -> str:
    r"""Return JSON in ASCII with <, > and & as \u003c and so on.

    Thus nothing in it ends the script or begins a comment.
    """
    text = json.dumps(_rounded(charts), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _rounded(value: Any) -> Any:
    """Round numbers to 6 digits; those that JSON cannot represent become null."""
    if isinstance(value, Mapping):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
