"""The compiled CUDA module, built from csrc/ by setup.py. Only fp16opt/kernels/native.py imports it."""

from torch import Tensor

class Addresses: ...

class Column:
    def __init__(self, exchange: object, tensor_type: type, tensors: list[Tensor]) -> None: ...
    def match(self, tensors: list[Tensor]) -> Addresses | None: ...

List = Addresses | list[int]

class Table:
    def __init__(self, numels: list[int], rows: list[int], dtypes: list[list[int]], places: list[int]) -> None: ...
    def watch(self, numels: list[int], rows: list[int], places: list[int]) -> None: ...
    def point(self, lists: list[List], add: bool | list[bool] | None) -> int: ...
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
    inv_scale: int,
    nonfinite: int,
    sumsq: int,
    n: int,
    norm: int,
    found_inf: int,
    hashes: int,
    samples: int,
    write: bool,
) -> None: ...
def unscale_clipped(
    table: Table, where: Where, inv_scale: int, factor: int, hashes: int, samples: int, n: int
) -> None: ...
def l2norm(table: Table, where: Where, sumsq: int, n: int, norm: int, norms: int) -> None: ...
def cast(table: Table, where: Where, overflow: int, hashes: int, n: int) -> None: ...
def content_hash(table: Table, where: Where, hashes: int, n: int) -> None: ...
def content_sample(table: Table, where: Where, samples: int, n: int) -> None: ...
def scale(table: Table, where: Where, factor: int) -> None: ...
def axpby(table: Table, where: Where, a: float, b: float, check: int, found_inf: int) -> None: ...
def take(
    table: Table,
    where: Where,
    now: int,
    then: int,
    now_sample: int,
    then_sample: int,
    places: int,
    taken: int,
    n: int,
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
    def __init__(self, places: list[int], is_adam: bool, groups: int) -> None: ...
    def point(self, given: list[object], unused: None) -> int: ...
    def fill(self, host: int) -> None: ...
    def keep(self, device: int) -> Kept: ...
    def all_bytes(self) -> int: ...

def adam(
    table: Table,
    where: Where,
    numbers: Numbers,
    numbers_where: Where,
    inv_scale: int,
    coefficient: int,
    found_inf: int,
    has_models: bool,
    overflow: int,
    hashes: int,
    n: int,
    amsgrad: bool,
) -> None: ...
def sgd(
    table: Table,
    where: Where,
    numbers: Numbers,
    numbers_where: Where,
    inv_scale: int,
    coefficient: int,
    found_inf: int,
    has_models: bool,
    overflow: int,
    hashes: int,
    n: int,
    has_momentum: bool,
) -> None: ...
def split(table: Table, where: Where, overflow: int, hashes: int, n: int) -> None: ...
def join(table: Table, where: Where) -> None: ...
def renew(
    table: Table, where: Where, now: int, then: int, now_sample: int, then_sample: int, taken: int, n: int
) -> None: ...
