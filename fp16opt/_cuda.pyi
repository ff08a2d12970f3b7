"""The compiled CUDA module, built from csrc/ by setup.py. Only fp16opt/kernels/native.py imports it."""

from collections.abc import Callable, Sequence

from torch import Tensor

class Addresses: ...

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

Lists = Addresses | list[list[int]]

class Table:
    def __init__(self, numels: list[int], rows: list[int], dtypes: list[list[int]], places: list[int]) -> None: ...
    def point(self, lists: Lists, add: bool | Sequence[bool] | None) -> int: ...
    def fill(self, host: int) -> None: ...
    def keep(self, device: int) -> Kept: ...
    def all_bytes(self) -> int: ...
    def chunks(self) -> int: ...

class Kept:
    def memory(self) -> int: ...
    def forever(self) -> None: ...

class Where:
    def __init__(self, memory: int, device: int, stream: int) -> None: ...

architectures: str

def runs_on(device: int) -> bool: ...
def kept_tables() -> int: ...
def unscale(
    table: Table,
    where: Where,
    n: int,
    inv_scale: int,
    nonfinite: int,
    sumsq: int,
    norm: int,
    found_inf: int,
    write: bool,
) -> None: ...
def unscale_clipped(table: Table, where: Where, n: int, inv_scale: int, factor: int) -> None: ...
def l2norm(table: Table, where: Where, n: int, sumsq: int, norm: int, norms: int) -> None: ...
def cast(table: Table, where: Where, n: int, overflow: int) -> None: ...
def sample(table: Table, where: Where, n: int, samples: int) -> None: ...
def scale(table: Table, where: Where, n: int, factor: int) -> None: ...
def axpby(table: Table, where: Where, n: int, a: float, b: float, check: int, found_inf: int) -> None: ...
def take(
    table: Table,
    where: Where,
    n: int,
    now: int,
    then: int,
    taken: int,
) -> None: ...
def capture_scale(where: Where, scale: int, pair: int) -> None: ...
def decide_clip(
    where: Where, norm: int, found_inf: int, max_norm: float, only_finite: bool, single: int, factor: int
) -> None: ...
def close_step(
    where: Where,
    found_inf: int,
    last: int,
    skipped: int,
    scale: int,
    clean: int,
    skips: int,
    settings: int,
    flags: int,
    kept: int,
    n: int,
    cleared: int,
    words: int,
) -> None: ...

class Numbers:
    def __init__(self, places: list[int], kind: int, groups: int) -> None: ...
    def point(self, given: list[object], unused: None) -> int: ...
    def fill(self, host: int) -> None: ...
    def keep(self, device: int) -> Kept: ...
    def all_bytes(self) -> int: ...

def adam(
    table: Table,
    where: Where,
    n: int,
    numbers: Numbers,
    numbers_where: Where,
    inv_scale: int,
    coefficient: int,
    found_inf: int,
    has_models: bool,
    overflow: int,
    amsgrad: bool,
) -> None: ...
def sgd(
    table: Table,
    where: Where,
    n: int,
    numbers: Numbers,
    numbers_where: Where,
    inv_scale: int,
    coefficient: int,
    found_inf: int,
    has_models: bool,
    overflow: int,
    has_momentum: bool,
) -> None: ...
def lion(
    table: Table,
    where: Where,
    n: int,
    numbers: Numbers,
    numbers_where: Where,
    inv_scale: int,
    coefficient: int,
    found_inf: int,
    has_models: bool,
    overflow: int,
    unused: bool,
) -> None: ...
def split(table: Table, where: Where, n: int, overflow: int) -> None: ...
def join(table: Table, where: Where, n: int) -> None: ...
def renew(table: Table, where: Where, n: int, now: int, then: int, taken: int) -> None: ...
