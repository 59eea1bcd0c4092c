"""What communication costs: the rule that chooses how states travel, and what a step on many ranks takes.

Numbers in, numbers out; knows no tensor. The model of a collective is that of a ring: a message of an all-gather passes
every other rank, each pass takes a hop, and all bytes come over one link. An all-to-all sends to all at once: one hop.
Through symmetric memory every rank pushes into all others at once, and the merge is part of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

STATE_BYTES = 4  # states travel in float32: in 16 bits they would be rounded once per rank and once more when merged
WAYS = ("all_gather", "reduce_scatter", "symmetric_memory")
GPUS_PER_HOST = 8
# A reduce kernel behind a collective, before whose end it cannot start; alone it takes 1.6 us on an H200
# (benchmarks/sweeps/nvidia-h200-pieces.json).
_MERGE_US = 1.5
# The exchange kernel behind the reduce kernel on two H200s, and the part of the link that many rows reach there
# (benchmarks/sweeps/nvidia-h200-x2-exchange.json). What every further rank adds is a guess: its states are waited for
# together with the others'.
_EXCHANGE_US, _EXCHANGE_RANK_US, _EXCHANGE_SHARE = 3.0, 0.2, 0.5
# Words carry 32 bits of a state and as many that say that they are there.
_WORD_BYTES = 2 * STATE_BYTES
# NCCL's overhead of every step of a ring that leaves the host, on hosts with AMD's CPUs; same source as the links.
_NETWORK_STEP_US = 2.0


@dataclass(frozen=True, slots=True)
class Link:
    """What connects ranks, as far as the time of a collective goes."""

    key: str
    name: str
    gb_per_s: float
    protocols: dict[str, tuple[float, float]]  # hop_us and gb_per_s by protocol
    compute_capability: str | None  # of the GPUs that come with it
    source: str

    @property
    def is_nvlink(self) -> bool:
        return self.key.startswith("nvlink")


@dataclass(frozen=True, slots=True)
class Network:
    """Hosts of some GPUs each: a link inside of a host, and another one between hosts."""

    inside: Link
    between: Link
    gpus_per_host: int = GPUS_PER_HOST


@lru_cache(maxsize=1)
def known_links() -> dict[str, Link]:
    """The links of data/links.json by key."""
    links = {}
    for facts in _read_data()["links"]:
        protocols = {name: tuple(numbers) for name, numbers in facts["protocols"].items()}
        links[facts["key"]] = Link(**facts | {"protocols": protocols})
    return links


def find_network(link: str | None = None, compute_capability: str | None = None, gpus_per_host: int = 8) -> Network:
    """The network of a link's name, or of the link that GPUs of a compute capability come with."""
    links = known_links()
    if link is None:
        fitting = [x for x in links.values() if compute_capability and x.compute_capability == compute_capability]
        inside = fitting[0] if fitting else links["pcie4"]
    elif link in links:
        inside = links[link]
    else:
        raise ValueError(f"link must be one of {', '.join(links)}, got {link!r}")
    return Network(inside, links["ndr"], gpus_per_host)


def state_bytes(rows: int, value_dim: int) -> int:
    """Bytes of an unfinished softmax: acc, m and l of so many rows."""
    return rows * (value_dim + 2) * STATE_BYTES


def received_bytes(way: str, output: str, ranks: int, rows: int, value_dim: int, itemsize: int) -> list[int]:
    """Bytes that a rank receives in each collective of a call.

    Args:
        way: one of WAYS.
        output: "replicated" or "heads".
        rows: query rows in all, B * Hq * Lq.
        itemsize: bytes per element of the finished output.
    """
    state = state_bytes(rows, value_dim)
    if way == "symmetric_memory":
        return [(ranks - 1) * state * _WORD_BYTES // STATE_BYTES // (ranks if output == "heads" else 1)]
    if way == "all_gather":
        return [(ranks - 1) * state]
    scattered = [(ranks - 1) * state // ranks]
    return scattered if output == "heads" else [*scattered, (ranks - 1) * rows * value_dim * itemsize // ranks]


def collective_us(ranks: int, received: int, network: Network, ring: bool = True) -> float:
    """Time of one collective, by the protocol that is fastest for it.

    Args:
        ring: an all-gather, whose messages pass every rank; otherwise an all-to-all.
    """
    hosts = -(-ranks // network.gpus_per_host)
    times = []
    for protocol, base_us in _read_data()["base_us"].items():
        hop_us, gb_per_s = network.inside.protocols[protocol]
        passes, crossings = (ranks - hosts, hosts - 1) if ring else (1, 0)
        crossing_us = 0.0
        if hosts > 1:
            crossing_us, between_gb_per_s = network.between.protocols[protocol]
            hop_us, gb_per_s = max(hop_us, _NETWORK_STEP_US), min(gb_per_s, between_gb_per_s)
            passes, crossings = (passes, crossings) if ring else (0, 1)
        times.append(base_us + passes * hop_us + crossings * crossing_us + received / (gb_per_s * 1e3))
    return min(times)


def communication_us(
    way: str, output: str, ranks: int, rows: int, value_dim: int, itemsize: int, network: Network
) -> float:
    """Time of all collectives of a call, or of the exchange kernel, which merges as well."""
    if ranks == 1:
        return 0.0
    received = received_bytes(way, output, ranks, rows, value_dim, itemsize)
    if way == "symmetric_memory":
        gb_per_s = network.inside.gb_per_s * _EXCHANGE_SHARE
        return _EXCHANGE_US + (ranks - 2) * _EXCHANGE_RANK_US + received[0] / (gb_per_s * 1e3)
    first = collective_us(ranks, received[0], network, ring=way == "all_gather")
    return first + sum(collective_us(ranks, more, network) for more in received[1:])


def merge_us(way: str, output: str, ranks: int, rows: int, value_dim: int, gb_per_s: float) -> float:
    """Time of the merge behind a collective; the exchange kernel has merged already."""
    if way == "symmetric_memory":
        return 0.0
    read = ranks * state_bytes(rows, value_dim) // (ranks if way == "reduce_scatter" or output == "heads" else 1)
    return _MERGE_US + read / (gb_per_s * 1e3)


def choose_way(
    output: str, ranks: int, heads_q: int, rows: int, value_dim: int, itemsize: int, network: Network | None = None,
    *, reach: bool = False, gb_per_s: float = 3000.0,
) -> str:  # fmt: skip
    """The rule: of the ways that there are, the one with the shorter predicted communication, merge included.

    An all-gather is one collective, in which every rank receives the states of all rows from all others. A
    reduce-scatter over heads moves 1 / ranks as much, but for a replicated output the merged heads must then be
    gathered, by a second collective. So small messages go the first way and large ones, or any for output="heads", the
    second. Symmetric memory has no collective at all, but twice the bytes, and every rank receives from all others.

    Args:
        heads_q: must be a multiple of ranks for the second way.
        network: what connects the ranks; None: NVLink 4, and InfiniBand beyond 8 ranks.
        reach: whether the ranks of a host reach each other's memory, as GPUs do through NVLink.
        gb_per_s: at which the states are read from memory by the merge.
    """
    used = find_network("nvlink4") if network is None else network
    ways = ["all_gather"]
    if heads_q % ranks == 0:
        ways.append("reduce_scatter")
    if reach and ranks <= used.gpus_per_host and used.inside.is_nvlink:
        ways.append("symmetric_memory")

    def predict(way: str) -> float:
        travel = communication_us(way, output, ranks, rows, value_dim, itemsize, used)
        return travel + merge_us(way, output, ranks, rows, value_dim, gb_per_s)

    return min(ways, key=predict)


@dataclass(frozen=True, slots=True)
class RankPrediction:
    """One decode step on so many ranks."""

    ranks: int
    keys: int  # per rank and sequence, of the fullest rank
    decode_us: float
    way: str
    communication_us: float
    merge_us: float

    @property
    def total_us(self) -> float:
        return self.decode_us + self.communication_us + self.merge_us


def predict_ranks(
    ranks: int, keys: int, decode_us: float, heads_q: int, rows: int, value_dim: int, itemsize: int, network: Network,
    gb_per_s: float,
) -> RankPrediction:  # fmt: skip
    """A step whose cache is spread over ranks, every one of which wants all heads.

    Args:
        keys, decode_us: of one rank's shard, and the time to decode it.
        gb_per_s: at which the states are read from memory by the merge.
    """
    if ranks == 1:
        return RankPrediction(1, keys, decode_us, "none", 0.0, 0.0)
    sizes = "replicated", ranks, rows, value_dim
    way = choose_way(*sizes[:2], heads_q, *sizes[2:], itemsize, network, reach=True, gb_per_s=gb_per_s)
    travel = communication_us(way, *sizes, itemsize, network)
    return RankPrediction(ranks, keys, decode_us, way, travel, merge_us(way, *sizes, gb_per_s))


def find_turning_point(predictions: list[RankPrediction]) -> RankPrediction:
    """The fewest ranks with the shortest step: from there on, more ranks stop paying."""
    return min(predictions, key=lambda prediction: (prediction.total_us, prediction.ranks))


@lru_cache(maxsize=1)
def _read_data() -> dict:
    return json.loads(resources.files("flash_decoding").joinpath("data/links.json").read_text())
