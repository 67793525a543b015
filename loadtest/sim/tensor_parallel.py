"""Owns what a step takes that several GPUs compute together: weights, KV and products by parts, and sums of the parts.
Never measures: rates are a card's data sheet, and the shares of them that were reached on one. The rest is arithmetic.

Each rank has some of the attention heads, of the MLP's columns and of the vocabulary. All norms, and the rest of a
layer's small work, are every rank's. After attention, after the MLP and after the embedding, the ranks' parts of all
tokens are added up, and logits are gathered by the rank that samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.protocol import num_pairs
from engine.step import StepPlan

GIB = 2**30
WIDTH = 2
"""Bytes of a number in bfloat16: KV, and what ranks add up."""
LOGIT = 4
"""Bytes of a logit, which ranks gather in float32."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A dense decoder, with an MLP of three matrices. Sizes are numbers, not bytes."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    bytes_a_weight: float = 2.0
    """Bytes of each weight of a matrix."""
    tied: bool = False
    """Whether the LM head is the embedding."""

    @property
    def layer_weights(self) -> int:
        """Weights of a layer's matrices."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim * self.hidden
        return attention + 3 * self.hidden * self.intermediate

    @property
    def head_weights(self) -> int:
        """Weights of the LM head."""
        return self.vocab * self.hidden

    @property
    def matrix_weights(self) -> int:
        """All weights that ranks share out."""
        return self.layers * self.layer_weights + self.head_weights * (1 if self.tied else 2)

    @property
    def norm_weights(self) -> int:
        return (2 * self.layers + 1) * self.hidden

    @property
    def kv_bytes_a_token(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        return 2 * WIDTH * self.kv_heads * self.head_dim * self.layers


@dataclass(frozen=True, slots=True)
class Device:
    """What a card's data sheet says, in bytes, and in bytes or operations a second."""

    name: str
    memory: float
    bandwidth: float
    rate: float
    """Dense matrix products in bfloat16."""


@dataclass(frozen=True, slots=True)
class Link:
    """What connects the ranks."""

    name: str
    rate: float
    """Bytes a second that one rank sends, while it receives as many."""
    round_s: float
    """Seconds from the moment at which all ranks have their parts until each could have read the others': the least
    time of an exchange, however small it is."""


@dataclass(frozen=True, slots=True)
class Reached:
    """The shares of a data sheet's rates that steps reach, and what a layer takes besides."""

    weights: float = 0.88
    keys: float = 0.78
    products: float = 0.62
    attention: float = 0.45
    """Share of the rate of matrix products that attention of a prompt reaches."""
    link: float = 0.8
    layer_s: float = 24e-6
    """Launches, norms and all else of a layer that no rank is spared."""


H200 = Device("H200", memory=139 * GIB, bandwidth=4.8e12, rate=989e12)
"""NVIDIA's data sheet of the H200 (SXM): 4.8 TB/s, 989 TFLOP/s of dense bfloat16 (1,979 with sparsity), and 141 GB, of
which CUDA shows 139 GiB."""
NVLINK = Link("NVLink", rate=450e9, round_s=10e-6)
"""The same data sheet: 900 GB/s both ways together. That a round takes 10 µs inside a captured step is an assumption:
what is known of such kernels on eight cards of a node lies between 5 and 20 µs."""
INFINIBAND = Link("InfiniBand", rate=50e9, round_s=25e-6)
"""NDR: 400 Gbit/s each way, with an adapter for each card. The 25 µs are an assumption."""
MEASURED = Reached()
"""From loadtest/results/gpu.json: of an H200, a copy moved 4.22 of 4.8 TB/s, attention of 64 rows read 3.7, a prompt's
products did 0.62 of the rate and its attention 0.45; a decode step of one row took 24 µs a layer more than its reading.
The share of a link is an assumption. A test compares steps of one card with those that were measured."""

LLAMA_70B = Shape(8192, 80, 64, 8, 128, 28672, 128256)
"""Llama 3.1 70B."""
LLAMA_8B = Shape(4096, 32, 32, 8, 128, 14336, 128256)
QWEN3_06B = Shape(1024, 28, 16, 8, 128, 3072, 151936, tied=True)

UTILISATION = 0.9
"""The engine's share of a card's memory, as by default."""
STEP_MEMORY = 4 * GIB
"""What the largest step and the captured ones take of it: an assumption."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a step: `count` tokens after `start` others."""

    start: int
    count: int


@dataclass(frozen=True, slots=True)
class AllReduce:
    """How the ranks' parts of one tensor are added up."""

    way: str
    """`one-shot`: each rank reads all parts of all others, and adds them up itself. `two-shot`: each adds up its share
    of the tensor, and reads the other shares' sums. In both, the order of the sum can be that of the ranks."""
    sent: float
    """Bytes that each rank sends, and receives."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Ranks:
    """So many ranks, each with a card of its own. A step time for the simulator.

    Raises:
        ValueError: heads, KV heads or the MLP's columns cannot be shared out equally.
    """

    shape: Shape
    size: int = 1
    device: Device = H200
    link: Link = NVLINK
    reached: Reached = MEASURED

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a size of {self.size}: expected 1 rank or more")
        for name in ("heads", "kv_heads", "intermediate"):
            if (number := getattr(self.shape, name)) % self.size:
                raise ValueError(f"{name} is {number}, which {self.size} ranks cannot share equally")

    # --- memory -----------------------------------------------------------------------------------------------------

    @property
    def weight_bytes(self) -> float:
        """Bytes of a rank's weights."""
        shape = self.shape
        return shape.matrix_weights * shape.bytes_a_weight / self.size + shape.norm_weights * WIDTH

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV caches of all ranks hold, each its heads of all of them. 0: the weights leave no room."""
        left = UTILISATION * self.device.memory - STEP_MEMORY - self.weight_bytes
        return max(0, int(left / (self.shape.kv_bytes_a_token / self.size)))

    # --- what ranks exchange ----------------------------------------------------------------------------------------

    @property
    def num_sums(self) -> int:
        """All-reduces of a step: two a layer, and the embedding's."""
        return 2 * self.shape.layers + 1 if self.size > 1 else 0

    def all_reduce(self, tokens: int) -> AllReduce:
        """Return the faster way to add up the ranks' parts of so many tokens' hidden states."""
        others, size = self.size - 1, tokens * self.shape.hidden * WIDTH
        rate, round_s = self.link.rate * self.reached.link, self.link.round_s
        whole, shares = others * size, 2 * others / self.size * size
        ways = (
            AllReduce("one-shot", whole, round_s + whole / rate),
            AllReduce("two-shot", shares, 2 * round_s + shares / rate),
        )
        return min(ways, key=lambda way: way.seconds) if others else AllReduce("none", 0.0, 0.0)

    def sums_s(self, tokens: int) -> float:
        """Return the seconds of a step's all-reduces."""
        return self.num_sums * self.all_reduce(tokens).seconds if self.size > 1 else 0.0

    def gather_s(self, samples: int) -> float:
        """Return the seconds until one rank has so many rows of logits."""
        if self.size == 1 or not samples:
            return 0.0
        received = samples * self.shape.vocab * LOGIT * (self.size - 1) / self.size
        return self.link.round_s + received / (self.link.rate * self.reached.link)

    # --- steps ------------------------------------------------------------------------------------------------------

    def seconds(self, plan: StepPlan) -> float:
        """Return the duration of a planned step. The host's own work is hidden behind the step before."""
        rows = [Row(row.start, len(row.token_ids)) for row in plan.rows]
        return self.step_s(rows, samples=sum(row.sampling is not None for row in plan.rows))

    def decode_s(self, streams: int, context: int) -> float:
        """Return the duration of a step of so many streams, each with `context` cached tokens."""
        return self.step_s([Row(context, 1)] * streams, samples=streams)

    def prefill_s(self, tokens: int) -> float:
        """Return the duration of a step with a whole prompt."""
        return self.step_s([Row(0, tokens)], samples=1)

    def step_s(self, rows: Iterable[Row], samples: int) -> float:
        rows = list(rows)
        tokens = sum(row.count for row in rows)
        return self.computing_s(rows, samples) + self.sums_s(tokens) + self.gather_s(samples)

    def computing_s(self, rows: Iterable[Row], samples: int) -> float:
        """Return a step's duration without what the ranks exchange."""
        rows = list(rows)
        tokens = sum(row.count for row in rows)
        layers = self.shape.layers * (self._products_s(self.shape.layer_weights, tokens) + self.reached.layer_s)
        head = self._products_s(self.shape.head_weights, samples) if samples else 0.0
        return layers + head + sum(map(self._attention_s, rows))

    def _products_s(self, weights: int, tokens: int) -> float:
        """Return the time of products with a rank's part of these weights: it either reads or computes."""
        reading = weights * self.shape.bytes_a_weight / (self.device.bandwidth * self.reached.weights)
        computing = 2 * weights * tokens / (self.device.rate * self.reached.products)
        return max(reading, computing) / self.size

    def _attention_s(self, row: Row) -> float:
        """Return the time of a row's attention in all layers, over a rank's heads."""
        shape, end = self.shape, row.start + row.count
        reading = end * shape.kv_bytes_a_token / (self.device.bandwidth * self.reached.keys)
        pairs = num_pairs(row.start, end) * shape.heads * shape.head_dim * shape.layers
        return max(reading, 4 * pairs / (self.device.rate * self.reached.attention)) / self.size
