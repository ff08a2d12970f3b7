"""Docstrings as the site shows them: an extension of griffe, which reads them for mkdocstrings."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|meth|func|attr|mod):`~?([^`]+)`")


class PlainDocstrings(griffe.Extension):
    """Examples are code, and roles of another tool's are names."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Griffe calls a section of code "Examples"."""
        if obj.docstring is not None:
            text = re.sub(r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = _ROLE.sub(r"`\1`", text)
