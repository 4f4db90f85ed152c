"""Colours and style sheet that reports share."""

from __future__ import annotations

from typing import Final

__all__ = ["COLOURS", "STYLE"]

# Told apart by people who see colours differently (Okabe and Ito).
COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")

STYLE: Final = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1b2733; background: #fff;
  max-width: 980px; margin: 2.5rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p { margin: .4rem 0; } .lead { color: #44515e; }
table { border-collapse: collapse; width: 100%; font-size: .86rem; }
th, td { text-align: left; padding: .28rem .6rem .28rem 0; border-bottom: 1px solid #e3e8ec;
  vertical-align: top; } th { color: #55636f; font-weight: 600; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
figure { margin: .5rem 0; } figure img { max-width: 100%; height: auto; }
figcaption { color: #55636f; font-size: .85rem; }
.pair { display: flex; flex-wrap: wrap; gap: 1rem; } .pair figure { flex: 1 1 22rem; }
.say { border-left: 3px solid #0072B2; padding: .2rem .8rem; background: #f4f8fb; }
.say.no { border-color: #D55E00; background: #fdf5ef; }
.box { border: 1px solid #c9d3db; border-radius: 6px; padding: .4rem 1rem .7rem;
  margin: .8rem 0 1rem; } .box td { font-size: .95rem; }
.case { margin: .55rem 0; } .case b { font-weight: 600; font-size: .82rem; }
.case .t { font: 13px/1.9 ui-monospace, monospace; white-space: pre-wrap; }
.case .t span { border-radius: 2px; padding: 1px 0; }
code { font-size: .84em; overflow-wrap: anywhere; }
"""
