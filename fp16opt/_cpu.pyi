"""The compiled CPU module, built from csrc/ by setup.py. Only fp16opt/kernels/native.py imports it."""

from torch import Tensor

class Addresses: ...

class Column:
    def __init__(self, exchange: object, tensor_type: type, tensors: list[Tensor]) -> None: ...
    def match(self, tensors: list[Tensor]) -> Addresses | None: ...

class Table:
    def __init__(self, numels: list[int], rows: list[int], dtypes: list[list[int]], places: list[int]) -> None: ...

List = Addresses | list[int]

Watched = tuple[Table, List, int, int] | None
Options = list[tuple[float | bool, ...]]

def unscale(
    table: Table,
    grads: List,
    outs: List,
    inv_scale: float,
    accumulate: bool | list[bool],
    writes: bool,
    nonfinite: int,
    sumsq: int,
    n: int,
    norm: int,
    found_inf: int,
    watched: Watched,
    threads: int,
) -> None: ...
def unscale_clipped(
    table: Table, grads: List, outs: List, inv_scale: float, factor: float, watched: Watched, threads: int
) -> None: ...
def l2norm(table: Table, tensors: List, sumsq: int, n: int, norm: int, norms: int, threads: int) -> None: ...
def scale(table: Table, tensors: List, factor: float, threads: int) -> None: ...
def axpby(table: Table, a: float, xs: List, b: float, ys: List, outs: List, check: int, threads: int) -> bool: ...
def cast(table: Table, masters: List, params: List, overflow: int, hashes: int, threads: int) -> None: ...
def clip_decision(norm: float, found_inf: float, only_finite: bool, max_norm: float) -> float: ...
def follow_scale(overflow: bool, scale: int, clean: int, skips: int, settings: int) -> None: ...
def content_hash(table: Table, tensors: List, hashes: int, threads: int) -> None: ...
def content_sample(table: Table, tensors: List, samples: int, threads: int) -> None: ...
def adam(
    table: Table,
    grads: List,
    masters: List,
    state: list[List],
    models: List | None,
    steps: List,
    group_of: list[int],
    options: Options,
    inv_scale: float,
    coefficient: float,
    overflow: int,
    hashes: int,
    threads: int,
) -> None: ...
def sgd(
    table: Table,
    grads: List,
    masters: List,
    state: list[List],
    models: List | None,
    first: list[bool],
    group_of: list[int],
    options: Options,
    inv_scale: float,
    coefficient: float,
    overflow: int,
    hashes: int,
    threads: int,
) -> None: ...
def split(
    table: Table, masters: List, models: List, remainders: List, overflow: int, hashes: int, threads: int
) -> None: ...
def join(table: Table, models: List, remainders: List, masters: List, threads: int) -> None: ...
def simd_level() -> str: ...
def simd_levels() -> list[str]: ...
def use_simd_level(name: str) -> None: ...
