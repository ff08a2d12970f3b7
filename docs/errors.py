"""Writes docs/errors.md from the messages of fp16opt/engine/errors.py: ``python docs/errors.py``."""

from __future__ import annotations

import textwrap
from pathlib import Path

from fp16opt.engine import errors

PAGE = Path(__file__).with_suffix(".md")

BEGINNING = """
# Messages and what to do

<!-- Written by docs/errors.py from fp16opt/engine/errors.py: edit there. -->

Look for the first words of your message on this page. Two kinds are not here: what refuses an argument names the
argument and says what to write, and what says why compiled kernels don't serve is explained in [GPUs](gpu.md). Each
message is shown as it comes from a model with one layer `fc`; yours names your parameters and your loss scale. A test
provokes every message and compares it with this page.

Errors are raised before anything is changed: the optimizer is as it was. Lines of the log come from the logger
`fp16opt`. A line comes at most four times a minute, and the next one says how many were left out. Where several
optimizers live, a line ends with whose it is: `[optimizer 2: AdamW over fc.weight and 1 more]`. Numbers count the
optimizers of the process in the order in which they were wrapped. Parameters have names where you gave
`named_parameters=model.named_parameters()`, or attached the module; else they are called `group 0, param 3`.
"""


def wrapped(words: str, width: int = 120) -> str:
    """A paragraph in lines of at most ``width`` characters, but for longer words."""
    return textwrap.fill(" ".join(words.split()), width, break_on_hyphens=False, break_long_words=False)


def parts() -> list[str]:
    """What stands on the page, with an empty line after each."""
    made = list(map(wrapped, BEGINNING.strip().split("\n\n")))
    for one in errors.page():
        if isinstance(one, errors.Chapter):
            made += [f"## {one.heading}", *([wrapped(one.words)] if one.words else [])]
            continue
        message = wrapped(one.filled(**one.shown), width=110)
        made += [
            f"### {one.heading}",
            f"<!-- message: {one.key} -->\n```text\n{message}\n```",
            wrapped(f"**What happened.** {one.what_happened}"),
            wrapped(f"**What to do.** {one.what_to_do}"),
        ]
    return made


def page() -> str:
    """The page whole."""
    return "\n\n".join(parts()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
