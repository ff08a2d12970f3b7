"""Images for the two programs: scikit-learn's digits, or a directory with one folder of image files a class."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm")
TEST_SIZE = 450


@dataclass(frozen=True)
class Images:
    """A set of labelled images.

    Attributes:
        images: uint8, [n, channels, height, width].
        labels: int64, [n].
        classes: names.
    """

    images: Tensor
    labels: Tensor
    classes: list[str]

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, size: int, order: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches in the given order; the last one may be smaller."""
        order = torch.arange(len(self)) if order is None else order
        for part in order.split(size):
            yield self.images[part], self.labels[part]


def digits() -> tuple[Images, Images]:
    """(train, test) of 1,797 digits of 8 x 8 pixels."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.from_numpy(np.round(found.images * (255 / 16)).astype(np.uint8))[:, None]
    labels = torch.from_numpy(found.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    names = [str(name) for name in found.target_names]
    test, train = order[:TEST_SIZE], order[TEST_SIZE:]
    return Images(images[train], labels[train], names), Images(images[test], labels[test], names)


def folder(path: Path, size: int, classes: list[str] | None = None) -> Images:
    """``path/class_name/*.png`` and so on, each cut to its middle square and scaled to ``size`` x ``size``, RGB."""
    from PIL import Image

    names = classes or sorted(entry.name for entry in path.iterdir() if entry.is_dir())
    pictures, labels = [], []
    for number, name in enumerate(names):
        for file in sorted((path / name).rglob("*")):
            if file.suffix.lower() in SUFFIXES:
                with Image.open(file) as picture:
                    pictures.append(_square(picture.convert("RGB"), size))
                labels.append(number)
    if not pictures:
        raise SystemExit(f"{path}: expected folders of images, one a class, and found none ({', '.join(SUFFIXES)}).")
    return Images(torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2), torch.tensor(labels), names)


def _square(picture: object, size: int) -> np.ndarray:
    width, height = picture.size  # type: ignore[attr-defined]
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    cut = picture.crop((left, top, left + side, top + side))  # type: ignore[attr-defined]
    return np.asarray(cut.resize((size, size)))


def load(path: Path | None, size: int) -> tuple[Images, Images]:
    """(train, validation): of ``path/train`` and ``path/val``, or the digits."""
    if path is None:
        return digits()
    train = folder(path / "train", size)
    return train, folder(path / "val", size, train.classes)


class Prefetcher:
    """The next batches are made ready in a thread, and on a GPU copied beside the computation.

    Images come out as float32 with mean 0 and standard deviation 1.

    Args:
        batches: (uint8 images, labels).
        device: where they go.
        mean, std: of the pixels, per channel, from 0 to 255.
        depth: batches that wait at most.
    """

    def __init__(
        self,
        batches: Iterable[tuple[Tensor, Tensor]],
        device: torch.device,
        mean: Tensor,
        std: Tensor,
        depth: int = 4,
    ) -> None:
        self._batches, self._device = batches, device
        self._mean, self._std = mean.view(1, -1, 1, 1).to(device), std.view(1, -1, 1, 1).to(device)
        self._ready: queue.Queue[tuple[Tensor, Tensor] | BaseException | None] = queue.Queue(depth)
        self._stopped = threading.Event()
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            for images, labels in self._batches:
                if self._stopped.is_set():
                    return
                if self._stream is not None:
                    images, labels = images.pin_memory(), labels.pin_memory()
                self._put((images, labels))
            self._put(None)
        except BaseException as error:
            self._put(error)

    def _put(self, item: tuple[Tensor, Tensor] | BaseException | None) -> None:
        while not self._stopped.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        try:
            upcoming = self._fetch()
            while upcoming is not None:
                if self._stream is not None:
                    torch.cuda.current_stream().wait_stream(self._stream)
                images, labels = upcoming
                if self._stream is not None:
                    images.record_stream(torch.cuda.current_stream())
                    labels.record_stream(torch.cuda.current_stream())
                upcoming = self._fetch()
                yield images, labels
        finally:
            self._stopped.set()
            self._thread.join()

    def _fetch(self) -> tuple[Tensor, Tensor] | None:
        item = self._ready.get()
        if isinstance(item, BaseException):
            raise item
        if item is None:
            return None
        images, labels = item
        if self._stream is None:
            return self._normalised(images.to(self._device)), labels.to(self._device)
        with torch.cuda.stream(self._stream):
            moved = images.to(self._device, non_blocking=True)
            return self._normalised(moved), labels.to(self._device, non_blocking=True)

    def _normalised(self, images: Tensor) -> Tensor:
        return (images.float() - self._mean) / self._std
