"""The file that a WeightDelta is saved in: the layout of safetensors, with a checksum.

Eight bytes tell the length of a JSON header; behind it lie the tensors' bytes. The header says of each tensor where it
lies, and under ``__metadata__`` what the delta tells of each tensor of the model.
https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import ctypes
import io
import json
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .engine.modes.changes import TensorChange
from .engine.modes.regions import Region

_FORMAT = "fp16opt.WeightDelta"
_VERSION = 1
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""The dtypes of safetensors, by its names."""
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_CRC = b'"crc32":"'
"""What stands before the checksum, eight digits that are zeros while it is made."""


class Contents(NamedTuple):
    """What a file holds: the arguments of a ``WeightDelta``."""

    sequence: int
    since: int
    changes: list[TensorChange]
    source: int | None


# -- writing -----------------------------------------------------------------------------------------------------------


def file_size(contents: Contents) -> int:
    """What :func:`write` writes, in bytes."""
    header, tensors = _laid_out(contents)
    return 8 + len(header) + sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def write(file: Any, contents: Contents) -> None:
    """Write a delta to a binary file, from where it stands."""
    header, tensors = _laid_out(contents)
    tensors = [tensor.cpu() for tensor in tensors]
    blocks = [_bytes_of(tensor) for tensor in tensors]
    checksum = zlib.crc32(header)
    for block in blocks:
        checksum = zlib.crc32(block, checksum)
    mark = header.index(_CRC) + len(_CRC)
    _write_all(file, header[:mark] + f"{checksum:08x}".encode() + header[mark + 8 :], blocks)


def _laid_out(contents: Contents) -> tuple[bytes, list[Tensor]]:
    """The header, with zeros for the checksum, and the tensors in the order in which they lie behind it."""
    told, found = [], []
    for change in contents.changes:
        region = change.region
        told.append(
            {
                "name": change.name,
                "tied": change.tied,
                "dtype": str(change.dtype).removeprefix("torch."),
                "region": [region.shape, region.starts, region.sizes],
                "before": change.before,
                "after": change.after,
            }
        )
        for kind, tensor in (("places", change.places), ("values", change.values)):
            if tensor is not None:
                dense = tensor.contiguous()
                found.append((f"{kind}:{change.name}", dense if dense.dtype in _CODES else dense.view(torch.uint8)))
    found.sort(key=lambda named: -named[1].element_size())  # so that each begins at a multiple of its items
    entries, at = {}, 0
    for key, tensor in found:
        size = tensor.numel() * tensor.element_size()
        entries[key] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    numbers = {"sequence": contents.sequence, "since": contents.since, "source": contents.source}
    own = {"version": _VERSION, **numbers, "tensors": told}
    metadata = {"format": _FORMAT, "fp16opt": json.dumps(own, separators=(",", ":"))}
    header = {"__metadata__": {**metadata, "crc32": "0" * 8}, **entries}
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8), [tensor for _, tensor in found]


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, which must outlive it."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr() if size else 0)).cast("B")


def _write_all(file: Any, header: bytes, blocks: Sequence[memoryview]) -> None:
    """All of it, to the other end of a pipe too. Unbuffered files may take a part of what they are given."""
    writer = io.BufferedWriter(file) if isinstance(file, io.RawIOBase) else file
    try:
        writer.write(struct.pack("<Q", len(header)) + header)
        for block in blocks:
            writer.write(block)
        if hasattr(writer, "flush"):
            writer.flush()
    finally:
        if writer is not file:
            writer.detach()


# -- reading -----------------------------------------------------------------------------------------------------------


def read(file: Any, name: str) -> Contents:
    """Read what :func:`write` wrote.

    Args:
        file: a binary file, which is read from where it stands to the end of the delta.
        name: what errors call it.

    Raises:
        ValueError: It is no delta, or damaged.
    """
    try:
        return _parsed(file)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"load: {name} holds no WeightDelta, or is damaged ({error}). Send it again.") from None


def _parsed(file: Any) -> Contents:
    (length,) = struct.unpack("<Q", _exactly(file, 8))
    if length > 1 << 30:
        raise ValueError("its header has no length")
    header = _exactly(file, length)
    entries = json.loads(header)
    metadata = entries.pop("__metadata__")
    if metadata["format"] != _FORMAT:
        raise ValueError(f"its format is {metadata['format']!r}")
    size = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    data = _exactly(file, size)
    mark = header.index(_CRC) + len(_CRC)
    if zlib.crc32(data, zlib.crc32(header[:mark] + b"0" * 8 + header[mark + 8 :])) != int(metadata["crc32"], 16):
        raise ValueError("its checksum is another one")
    own = json.loads(metadata["fp16opt"])
    if own["version"] != _VERSION:
        raise ValueError(f"its version is {own['version']}, this fp16opt reads {_VERSION}")
    sequence, since, source = own["sequence"], own["since"], own.get("source")
    changes = [_change(told, entries, data) for told in own["tensors"]]
    names = [name for change in changes for name in (change.name, *change.tied)]
    if (
        entries
        or len(set(names)) != len(names)
        or not _is_int(sequence, since, source or 0)
        or not 0 <= since < sequence
    ):
        raise ValueError("its parts don't fit together")
    return Contents(sequence, since, changes, source)


def _exactly(file: Any, size: int) -> bytearray:
    """So many bytes. A pipe gives them in parts; a size may be damaged, so memory is asked for as they come."""
    found = bytearray()
    while len(found) < size:
        part = file.read(min(size - len(found), 1 << 24))
        if not part:
            raise ValueError(f"it ends {size - len(found)} bytes early")
        found += part
    return found


def _change(told: Mapping[str, Any], entries: dict[str, Any], data: bytearray) -> TensorChange:
    """One tensor's, as a file has it; its entries are taken out.

    Raises:
        ValueError: its parts don't fit together.
    """
    name, tied, dtype = told["name"], told["tied"], getattr(torch, told["dtype"])
    places, values = (
        None if (entry := entries.pop(f"{kind}:{name}", None)) is None else _tensor(entry, data)
        for kind in ("places", "values")
    )
    if values is not None and dtype not in _CODES:
        values = values.view(dtype)
    region = Region(*map(tuple, told["region"]))
    change = TensorChange(name, tuple(tied), dtype, region, told["before"], told["after"], places, values)
    if not isinstance(tied, list) or not _is_described(change) or not _is_filled(change):
        raise ValueError(f"what it has of {name!r} does not fit together")
    return change


def _is_int(*numbers: object) -> bool:
    return all(isinstance(number, int) for number in numbers)


def _is_described(change: TensorChange) -> bool:
    """Whether names, dtype, region and digests are such."""
    region = change.region
    shape, starts, sizes = region
    digests = [change.after] if change.before is None else [change.before, change.after]
    return (
        all(isinstance(name, str) for name in (change.name, *change.tied))
        and isinstance(change.dtype, torch.dtype)
        and all(_is_int(*numbers) for numbers in region)
        and len(starts) == len(shape)
        and (len(sizes) == len(shape) or (shape, sizes) == ((), (0,)))  # the latter: a number that another rank has
        and all(0 <= start <= start + size <= of for of, start, size in zip(shape, starts, sizes, strict=False))
        and _is_int(*digests)
        and all(-(2**63) <= digest < 2**63 for digest in digests)
    )


def _is_filled(change: TensorChange) -> bool:
    """Whether there is one value for each place, and places ascend within the region."""
    region, places, values = change.region, change.places, change.values
    if values is None:
        return places is None
    if values.dtype != change.dtype or values.dim() != 1:
        return False
    if places is None:
        return values.numel() == region.numel
    if places.dtype == torch.uint8:
        fits = region.is_whole and places.shape == (-(-region.numel // 8),)
    else:
        fits = places.dtype in (torch.int32, torch.int64) and places.dim() == 1
    if not fits:
        return False
    indices = change.indices()
    ends = torch.cat([indices.new_tensor([-1]), indices, indices.new_tensor([math.prod(region.shape)])])
    ascend = bool((ends[1:] > ends[:-1]).all())
    return ascend and indices.numel() == values.numel() and bool((region.places(indices) >= 0).all())


def _tensor(entry: Mapping[str, Any], data: bytearray) -> Tensor:
    begin, end = entry["data_offsets"]
    raw = torch.empty(0, dtype=torch.uint8, device="cpu")
    if begin != end:
        raw = torch.frombuffer(data, dtype=torch.uint8, offset=begin, count=end - begin).clone()
    return raw.view(_DTYPES[entry["dtype"]]).view(entry["shape"])
