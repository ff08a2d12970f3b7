"""torch.amp.GradScaler's interface, on this library's kernels and loss scaler."""

from .face import GradScaler

__all__ = ["GradScaler"]
