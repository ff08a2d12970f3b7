"""Each test starts and ends with torch as it was, and with a session that knows nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fp16opt.amp import _amp_state


@pytest.fixture(autouse=True)
def fresh_session() -> Iterator[None]:
    yield
    _amp_state.casts.deactivate()
    kept = _amp_state.casts
    kept.registered.clear()
    _amp_state.__init__()  # type: ignore[misc]
    _amp_state.casts = kept
