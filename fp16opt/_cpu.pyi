"""The compiled CPU module, built from csrc/ by setup.py. Only fp16opt/kernels/native.py imports it.

Operations take a table, the addresses of its lists, how many threads to use, and n, the length of the lists. Numbers
and statistics go as addresses.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

class Addresses: ...

class Reading:
    def __init__(self, once: bool) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *raised: object) -> None: ...

class SeenLists:
    def __init__(
        self,
        exchange: object,
        tensor_type: type,
        is_neg: Callable[[Tensor], bool],
        lists: tuple[Sequence[Tensor | None], ...],
        deciding: int,
    ) -> None: ...
    def match(self, lists: tuple[Sequence[Tensor | None], ...]) -> Addresses | None: ...

class TensorReader:
    def __init__(self, tensor_type: type, grad: object, version: object, quiet: Callable[[], object]) -> None: ...
    def gradients(self, tensors: list[Tensor]) -> list[Tensor | None]: ...
    def versions(self, tensors: list[Tensor | None]) -> list[int] | None: ...
    def have_versions(self, tensors: list[Tensor | None], then: list[int]) -> bool: ...
    def hold_gradients(self, tensors: list[Tensor], grads: list[Tensor | None], then: list[int]) -> bool: ...

class Table:
    def __init__(self, numels: list[int], rows: list[int], dtypes: list[list[int]], places: list[int]) -> None: ...

Lists = Addresses | list[list[int]]
Flags = bool | Sequence[bool]
Options = list[tuple[float | bool, ...]]

def put_addresses(source: Lists, first: int, count: int, places: list[int] | None, to: int, stride: int) -> bool: ...
def unscale(
    table: Table,
    lists: Lists,
    threads: int,
    n: int,
    inv_scale: int,
    nonfinite: int,
    sumsq: int,
    norm: int,
    found_inf: int,
    writes: bool,
    accumulate: Flags,
) -> None: ...
def unscale_clipped(table: Table, lists: Lists, threads: int, n: int, inv_scale: int, factor: int) -> None: ...
def l2norm(table: Table, lists: Lists, threads: int, n: int, sumsq: int, norm: int, norms: int) -> None: ...
def scale(table: Table, lists: Lists, threads: int, n: int, factor: int) -> None: ...
def lerp(table: Table, lists: Lists, threads: int, n: int, part: float, from_average: bool) -> None: ...
def axpby(table: Table, lists: Lists, threads: int, n: int, a: float, b: float, check: int, found_inf: int) -> None: ...
def cast(table: Table, lists: Lists, threads: int, n: int, overflow: int) -> None: ...
def sample(table: Table, lists: Lists, threads: int, n: int, samples: int) -> None: ...
def measure(table: Table, lists: Lists, threads: int, n: int, numbers: int) -> None: ...
def compare(table: Table, lists: Lists, threads: int, n: int, before: int, offsets: int, numbers: int) -> None: ...
def split(table: Table, lists: Lists, threads: int, n: int, overflow: int) -> None: ...
def join(table: Table, lists: Lists, threads: int, n: int) -> None: ...
def adam(
    table: Table,
    lists: Lists,
    threads: int,
    n: int,
    inv_scale: int,
    coefficient: int,
    overflow: int,
    has_models: bool,
    group_of: Sequence[int],
    options: Options,
    number: int,
) -> None: ...
def sgd(
    table: Table,
    lists: Lists,
    threads: int,
    n: int,
    inv_scale: int,
    coefficient: int,
    overflow: int,
    has_models: bool,
    group_of: Sequence[int],
    options: Options,
    number: int,
    first: Flags,
) -> None: ...
def lion(
    table: Table,
    lists: Lists,
    threads: int,
    n: int,
    inv_scale: int,
    coefficient: int,
    overflow: int,
    has_models: bool,
    group_of: Sequence[int],
    options: Options,
    number: int,
) -> None: ...
def adam8(
    table: Table,
    lists: Lists,
    threads: int,
    n: int,
    inv_scale: int,
    coefficient: int,
    overflow: int,
    has_models: bool,
    group_of: Sequence[int],
    options: Options,
    limits: Sequence[float],
    number: int,
) -> None: ...
def sgd8(
    table: Table,
    lists: Lists,
    threads: int,
    n: int,
    inv_scale: int,
    coefficient: int,
    overflow: int,
    has_models: bool,
    group_of: Sequence[int],
    options: Options,
    number: int,
    first: Flags,
) -> None: ...
def clip_decision(norm: float, found_inf: float, only_finite: bool, max_norm: float) -> float: ...
def follow_scale(overflow: bool, scale: int, clean: int, skips: int, settings: int) -> None: ...
def simd_level() -> str: ...
def simd_levels() -> list[str]: ...
def use_simd_level(name: str) -> None: ...
