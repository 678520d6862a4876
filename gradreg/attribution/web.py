"""Pages of one file: no server, no network, light and dark, everything from users escaped."""

from __future__ import annotations

import html
import json
from typing import Any

__all__ = ["document", "escaped", "script_data"]


def document(title: str, body: str, *, style: str = "", script: str = "", data: Any = None) -> str:
    """Write a page around a body.

    Args:
        title: Plain text.
        body: HTML.
        style: CSS after the common one.
        script: JavaScript, without anything from users; that is in `data`.
        data: What the script reads from the element `data`, as JSON; None for nothing.

    Returns:
        HTML with a policy that forbids it to fetch anything.
    """
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'" + (
        "; script-src 'unsafe-inline'" if script else ""
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escaped(title)}</title>\n<style>{_STYLE}{style}</style>\n</head>\n<body>\n{body}"
        + (f'<script type="application/json" id="data">{script_data(data)}</script>\n' if data is not None else "")
        + (f"<script>\n{script}</script>\n" if script else "")
        + "</body>\n</html>\n"
    )


def escaped(value: object) -> str:
    """Return a value as text within HTML, also within quotes."""
    return html.escape(str(value), quote=True)


def script_data(value: Any) -> str:
    """Return JSON that may stand in a script element: nothing in it ends the element or a line of it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # ASCII, so U+2028 is written as an escape
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


# Fills are what text lies on: at full strength it keeps a contrast above 4.5 in both schemes.
_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1a1a1a; --soft: #595959; --line: #ccc;
  --for: #2f6fde; --against: #d9730d; --for-fill: #2f6fde; --against-fill: #d9730d; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16181c; --ink: #ececec; --soft: #a8a8a8; --line: #3a3d44; --for: #6ea0ff; --against: #ff9d4d;
    --for-fill: #3f7ae0; --against-fill: #c46210; }
}
* { box-sizing: border-box; }
body { background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; margin: 0 auto;
  max-width: 80rem; padding: 1rem; }
h1, h2, h3, dd, p { overflow-wrap: anywhere; }
a { color: inherit; }
a:focus-visible, summary:focus-visible, select:focus-visible { outline: 3px solid var(--for); outline-offset: 2px; }
.skip { position: absolute; left: -999rem; }
.skip:focus { position: static; }
dl { display: flex; flex-wrap: wrap; gap: .25rem 2rem; } dl div { display: flex; gap: .5rem; }
dt, .label, nav { color: var(--soft); } dd { margin: 0; }
nav ul { display: flex; flex-wrap: wrap; gap: .25rem 1rem; list-style: none; padding: 0; }
section { border-top: 1px solid var(--line); }
.token { border-radius: .2rem; padding: 0 .1rem; }
.token.for { background: color-mix(in srgb, var(--for-fill) var(--strength), transparent);
  text-decoration: underline; }
.token.against { background: color-mix(in srgb, var(--against-fill) var(--strength), transparent);
  text-decoration: underline dashed; }
td, th { padding: 0 .75rem 0 0; text-align: left; }
"""
