"""The report as LaTeX: ``report.tex``, tables and figures to compile alone or to copy from.

Needs no package but graphicx. Tables are plain ``tabular``; figures are the PNG files beside it.
"""

import textwrap
from collections.abc import Sequence

from lab.report import tables
from lab.report.drawings.figure_pages import Drawing
from lab.report.findings import findings
from lab.report.losses import loss_table
from lab.report.verdict import verdict
from lab.report.view import ComparisonGroup, what_is_emulated

_WIDTH = 100
_SPECIAL = {mark: f"\\{mark}" for mark in "&%$#_{}"} | {
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': "''"},
    **{"–": "--", "—": "---", "…": r"\ldots{}", "\u00a0": "~", "·": r"\textperiodcentered{}"},
    **{"µ": r"\textmu{}", "×": r"\texttimes{}", "±": r"\textpm{}", "✗": "(wrong)", "→": "to"},
    **{"`": r"\textasciigrave{}", "[": "{[}", "]": "{]}", "\u200b": "{}"},  # no ligature there
}
_BEGIN = r"""\documentclass{article}
\usepackage{textcomp}
\usepackage{graphicx}
\usepackage[margin=2cm]{geometry}
\begin{document}
"""


def document(
    drawings: Sequence[tuple[ComparisonGroup, Sequence[Drawing]]], skipped: Sequence[str]
) -> str:
    """Return the whole document, which will lie beside the figures' files.

    drawings : of each block. skipped : why folders are not in the report.
    """
    parts = [_BEGIN]
    for number, (block, figures) in enumerate(drawings, start=1):
        parts += _block(block, figures, f"group{number}-" if len(drawings) > 1 else "")
    parts += [f"{_paragraph(f'Not in this report: {reason}')}\n" for reason in skipped]
    return "\n".join([*parts, r"\end{document}", ""])


def _block(block: ComparisonGroup, figures: Sequence[Drawing], prefix: str) -> list[str]:
    """Return the answer, the tables and the figures of a block; their labels have the prefix."""
    answer = verdict(block, findings(block))
    parts = []
    if block.label:
        parts.append(f"\\section*{{{escape(block.label)}}}")
    if block.emulated:
        parts.append(_paragraph(what_is_emulated(block.settings)))
    parts.append(_paragraph(f"{answer.text} {answer.why}"))
    lines = tables.lines(block)
    shown = {
        "results": ("Results", tables.with_values(tables.RESULTS, lines)),
        "times": ("Seconds of a step, by section", tables.with_values(tables.TIMES, lines)),
    }
    for label, (caption, names) in shown.items():
        headings = [tables.heading(name, block.place) for name in names]
        rows = [[line.texts[name] for name in names] for line in lines]
        parts.append(_table(f"{prefix}{label}", f"{caption}. {_MEDIANS}", headings, rows))
    losses = loss_table(block)
    if losses is not None:
        caption = "Training loss over the global batch, by step"
        parts.append(_table(f"{prefix}losses", caption, losses.headings, losses.rows))
    return parts + [_figure(figure) for figure in figures if not figure.missing]


_MEDIANS = "Medians over the repeats of the mean over the ranks; in brackets the 95 % interval"


def _table(label: str, caption: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table, as wide as the page at most; the first column is left-aligned."""
    columns = "l" + "r" * (len(headings) - 1)
    head = " & ".join(map(_heading, headings))
    body = [" & ".join(map(_cell, row)) + r" \\" for row in rows]
    tabular = [f"\\begin{{tabular}}{{{columns}}}", r"\hline", f"{head} \\\\", r"\hline"]
    tabular += [*body, r"\hline", r"\end{tabular}"]
    return "\n".join(
        [
            *(r"\begin{table}[htbp]", r"\centering", r"\small"),
            *(f"\\caption{{{escape(caption)}.}}", f"\\label{{tab:{label}}}"),
            r"\par\medskip",
            *(r"\setbox0=\hbox{%", *tabular, "}%"),
            r"\leavevmode\ifdim\wd0>\linewidth \resizebox{\linewidth}{!}{\box0}\else\box0\fi",
            r"\end{table}",
        ]
    )


def _heading(text: str) -> str:
    """Return a column's heading, in lines of few letters."""
    lines = textwrap.wrap(text.replace(" %", "\u00a0%"), 12, break_long_words=False)
    if len(lines) == 1:
        return escape(text)
    stacked = r" \\ ".join(map(escape, lines))
    return f"\\begin{{tabular}}[b]{{@{{}}r@{{}}}}{stacked}\\end{{tabular}}"


def _cell(text: str) -> str:
    if text.startswith("-"):  # a minus is longer than a hyphen
        return f"$-${escape(text[1:])}"
    return escape(text)


def _figure(drawing: Drawing) -> str:
    return "\n".join(
        [
            *(r"\begin{figure}[htbp]", r"\centering"),
            f"\\includegraphics[width=\\linewidth]{{{drawing.name}.png}}",
            f"\\caption{{{escape(f'{drawing.title}. {drawing.caption}')}}}",
            f"\\label{{fig:{drawing.name}}}",
            r"\end{figure}",
        ]
    )


def _paragraph(text: str) -> str:
    return textwrap.fill(escape(text), _WIDTH, break_long_words=False) + "\n"


def escape(text: str) -> str:
    """Return ``text`` as LaTeX prints it, on one line; a letter without a glyph becomes ``?``."""
    letters = []
    for letter in text.replace("--", "-\u200b-"):
        if letter in _SPECIAL:
            letters.append(_SPECIAL[letter])
        elif letter.isspace():
            letters.append(" ")
        else:
            letters.append(letter if letter.isprintable() and ord(letter) < 0x180 else "?")
    return "".join(letters)
