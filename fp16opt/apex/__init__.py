"""``import apex`` for scripts that were written for it: opt in, and take back.

    import fp16opt
    fp16opt.install_as_apex()      # or: python -m fp16opt.apex script.py args...
    from apex import amp           # works from here on

Nothing happens on ``import fp16opt``. :mod:`fp16opt.apex.table` says which names resolve to what.
"""

from __future__ import annotations

import logging
import sys

from .finder import ApexFinder, real_apex

__all__ = ["install_as_apex", "uninstall"]

logger = logging.getLogger("fp16opt")


def _installed() -> ApexFinder | None:
    return next((finder for finder in sys.meta_path if isinstance(finder, ApexFinder)), None)


def install_as_apex(*, replace: bool = False) -> ApexFinder:
    """Let ``apex``, ``amp_C`` and ``apex_C`` be imported in this process, from this package. Logs one line.

    Beside an apex that is installed and has no amp (from June 2025 on), what that one has stays its own, and amp,
    fp16_utils and parallel are added. Called again, it changes nothing.

    Args:
        replace: Stand in for an apex with amp too. Modules that hold names of it already keep them.

    Returns:
        A handle with ``uninstall()``; it may be used in ``with``.

    Raises:
        RuntimeError: An apex with amp is installed, or imported, and ``replace`` is False. Nothing is changed then.

    Example:
        >>> with install_as_apex(replace=True):
        ...     from apex.fp16_utils import tofp16
        >>> tofp16.__module__
        'fp16opt.fp16_utils.networks'
    """
    installed = _installed()
    if installed is not None:
        return installed
    real = real_apex()
    if real is not None and real.has_amp and not replace:
        raise RuntimeError(
            f"apex is installed at {real.where} and has amp: this would hide it. Uninstall it, or call "
            "install_as_apex(replace=True)."
        )
    finder = ApexFinder(beside_real=real is not None and not real.has_amp and not replace)
    finder.install()
    logger.warning(
        "fp16opt serves `import apex` in this process from now on%s. fp16opt.apex.uninstall() undoes it.",
        f" (amp, fp16_utils and parallel; the rest is the apex at {real.where})"
        if real and finder.beside_real
        else f" in place of the apex at {real.where}"
        if real
        else "",
    )
    return finder


def uninstall() -> None:
    """Undo :func:`install_as_apex`: ``import apex`` does again what it did before. Names that were imported stay."""
    installed = _installed()
    if installed is not None:
        installed.uninstall()
