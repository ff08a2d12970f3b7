"""Model weights written by something else than the optimizer: notice before masters are stepped or saved."""

from __future__ import annotations

from .diagnostics import warn_model_write
from .masters import MasterParams

POLICIES = ("refresh", "error", "ignore")


def notice(params: MasterParams, policy: str, passed_by: bool = False, waits: bool = True) -> None:
    """Compare the model's bits with those that masters were last rounded to, and follow ``policy`` where they differ.

    By a content hash, because version counters alone would miss writes through ``.data``; model and masters are
    compared only where hashes differ. Equal bits are no write. Where the user wrote the master too, the master wins.
    Syncs with the device unless it need not wait.

    Args:
        params: Whose parameters.
        policy: One of ``POLICIES``.
        passed_by: Rely on the hashes that the unscaling pass took as it went by, and ask version counters and a sample
            of the bits about the time since. Else one read of 2 bytes a parameter.
        waits: False leaves the look at the hashes to the device, where the policy is "refresh"; what was taken is told
            later (:mod:`fp16opt.late`).

    Raises:
        RuntimeError: The policy is "error" and a parameter was written; or one changed its dtype, shape or device.
    """
    params.verify()
    if policy == "ignore":
        return
    if policy == "refresh" and not waits:
        params.take_written()
        return
    written = params.written_models(passed_by)
    if not written:
        return
    if policy == "error":
        raise RuntimeError(
            f"the model's weights were written behind the optimizer: {params.describe(written)}. Call "
            'refresh_masters() after writing to the model, or use on_model_write="refresh".'
        )
    params.take_from_model(written)
    warn_model_write([params.names[i] for i in written])
