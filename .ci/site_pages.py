"""Pages of the site that lie elsewhere in the repository, and links that lead out of docs/: a hook of MkDocs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
GENERATED = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """README, changes and the page for contributors become pages."""
    for source, page in GENERATED.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_rewritten(text, "")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that leave docs/ lead to the page that the file became, or are the file's name in the repository."""
    return markdown if page.file.src_uri in GENERATED.values() else _rewritten(markdown, "docs/")


def _rewritten(text: str, folder: str) -> str:
    """``text`` of a file in ``folder``, with links as the site has them."""

    def link(found: re.Match[str]) -> str:
        mark, words, target, anchor = found[1], found[2], found[3], found[4] or ""
        if "://" in target or (folder and not target.startswith("../")):
            return found[0]
        path = target.removeprefix("../")
        if path in GENERATED:
            return f"{mark}[{words}]({GENERATED[path]}{anchor})"
        if path.startswith("docs/") and (ROOT / path).is_file():
            return f"{mark}[{words}]({path.removeprefix('docs/')}{anchor})"
        if (ROOT / path).exists():
            return words if words.strip("`") == path.rstrip("/") else f"{words} (`{path}`)"
        return found[0]  # --strict says that it leads nowhere

    return _LINK.sub(link, text)
