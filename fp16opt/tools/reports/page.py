"""``python -m fp16opt report``: one page about a run, with nothing to load from elsewhere."""

from __future__ import annotations

import argparse
import base64
import html
from pathlib import Path

from . import pictures, reading
from .reading import RunRead

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
img { max-width: 100%; } code { background: #f2f3f5; padding: 0 .25em; }
li { margin: .3em 0; } .small { color: #5a6068; font-size: 13px; }
""".strip()

_CAPTIONS = {
    "scale": "Steps in red were skipped: a gradient was not finite. A few at the start are calibration.",
    "loss": "The sum of the losses that backward got; not known under a GradScaler and of closures.",
    "norm": "Blue: the norm before the clip. Grey: what a step took.",
    "margins": "Each line is a layer. Near the red line a step will be skipped; near the grey one gradients vanish.",
    "norms by layer": "A row that darkens loses its gradient, one that brightens grows. Pink: not finite, or none.",
    "underflow": "Share of each layer's 16-bit gradients that are subnormal or vanished. Much of it: raise the scale.",
    "updates": "Orange: smaller than the distance between 16-bit weights; only masters keep them. Pink: none.",
}


def page(run: RunRead, title: str) -> str:
    """The page as HTML, pictures included.

    Raises:
        ImportError: There is no matplotlib.
    """
    found = reading.worth_a_look(run)
    looks = [f"<li><code>{html.escape(one.row)}</code>: {html.escape(one.words)}.</li>" for one in found]
    listed = f"<ol>{''.join(looks)}</ol>" if looks else "<p>Nothing stands out.</p>"
    figures = []
    for name, caption in _CAPTIONS.items():
        data = base64.b64encode(pictures.one(run, name)).decode("ascii")
        alt = html.escape(name, quote=True)
        figures.append(f'<p><img alt="{alt}" src="data:image/png;base64,{data}"></p><p class="small">{caption}</p>')
    header = run.header
    about = (
        f"torch {header.get('torch')}, {header.get('optimizer')}, masters: {run.masters}, ranks: "
        f"{header.get('ranks')}, a sample every {header.get('every')} steps. "
        f"Scaler, at the start: {header.get('scaler')}."
    )
    words = " ".join(reading.of_run(run))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{html.escape(title)}</h1>\n<p>{html.escape(words)}</p>\n"
        f"<h2>Worth a look</h2>\n{listed}\n<h2>Pictures</h2>\n{''.join(figures)}\n"
        f'<p class="small">{html.escape(about)}</p></body></html>\n'
    )


def in_words(run: RunRead) -> str:
    """The same without pictures, for a terminal."""
    lines = reading.of_run(run)
    lines += [f"  {number}. {one.row}: {one.words}." for number, one in enumerate(reading.worth_a_look(run), 1)]
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of the command line."""
    parser.add_argument("run", type=Path, help="what fp16opt.Monitor has written")
    parser.add_argument("-o", "--output", type=Path, help="the page; report.html beside the run if not given")
    parser.add_argument("--png", action="store_true", help="all pictures as one PNG, beside the page, too")


def _check_apart(*paths: Path) -> None:
    """Raise ``ValueError`` where a file to be written is the run, or another one to be written."""
    for number, path in enumerate(paths):
        if path.resolve() in [other.resolve() for other in paths[:number]]:
            raise ValueError(f"{path}: the run, the page and its picture need a name each. Choose another --output.")


def write(given: argparse.Namespace) -> tuple[int, str]:
    """Write the page that parsed arguments ask for.

    Returns:
        (the exit status: 0, or 2 where there is nothing to report on; what to print).
    """
    output = given.output or given.run.parent / "report.html"
    picture = output.with_suffix(".png")
    try:
        _check_apart(given.run, output, *[picture][: given.png])
        run = reading.load(given.run)
        output.write_text(page(run, f"Run {given.run.name}"), encoding="utf-8")
        if given.png:
            picture.write_bytes(pictures.together(run))
    except (OSError, ValueError, ImportError) as error:
        return 2, f"fp16opt report: {error}"
    except (KeyError, TypeError, AttributeError) as error:
        return 2, (
            f"fp16opt report: {given.run}: the records are not as this version's fp16opt.Monitor writes them "
            f"({type(error).__name__}: {error})"
        )
    where = f"The page is {output}, its pictures are {picture}." if given.png else f"The page is {output}."
    return 0, f"{in_words(run)}\n{where}"
