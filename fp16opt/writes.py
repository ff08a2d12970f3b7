"""Model weights written by something else than the optimizer: notice before masters are stepped or saved."""

from __future__ import annotations

from .diagnostics import warn_model_write
from .masters import MasterParams

POLICIES = ("refresh", "error", "ignore")


def notice(params: MasterParams, policy: str) -> None:
    """Compare the model's bits with those that masters were last rounded to, and follow ``policy`` where they differ.

    One read of 2 bytes a parameter for the content hash; model and masters are compared only where hashes differ.
    Version counters alone would miss writes through ``.data``. Equal bits are no write. Where the user wrote the
    master too, the master wins. Syncs with the device.

    Raises:
        RuntimeError: The policy is "error" and a parameter was written; or one changed its dtype, shape or device.
    """
    params.verify()
    if policy == "ignore":
        return
    written = params.written_models()
    if not written:
        return
    if policy == "error":
        raise RuntimeError(
            f"the model's weights were written behind the optimizer: {params.describe(written)}. Call "
            'refresh_masters() after writing to the model, or use on_model_write="refresh".'
        )
    params.take_from_model(written)
    warn_model_write([params.names[i] for i in written])
