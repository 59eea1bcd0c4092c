"""The peers, one adapter file each. Order here is order in the tables and in a run."""

from __future__ import annotations

from flash_decoding.bench.peers import flash_attn, flashinfer, flex, ours, sdpa, xformers
from flash_decoding.bench.peers.base import Peer, Prepared, one_line
from flash_decoding.bench.peers.ours import OURS, OURS_UNSPLIT
from flash_decoding.bench.workloads import Case

__all__ = ["OURS", "OURS_UNSPLIT", "Peer", "Prepared", "label_of", "one_line", "peers_for", "peers_on"]

_ALL = (*ours.PEERS, *sdpa.PEERS, *flex.PEERS, *flash_attn.PEERS, *xformers.PEERS, *flashinfer.PEERS)


def peers_for(device: str, names: list[str] | None = None) -> list[Peer]:
    """The adapters of a device ("cuda" or "cpu"), ours first; with names, ours and the named ones."""
    peers = [peer for peer in _ALL if peer.device == device]
    if names is None:
        return peers
    known = [peer.name for peer in _ALL]
    for name in names:
        if name not in known:
            raise ValueError(f"peer must be one of {', '.join(dict.fromkeys(known))}, got {name!r}")
    return [peer for peer in peers if peer.name == OURS or peer.name in names]


def peers_on(case: Case, names: list[str] | None = None) -> list[Peer]:
    """The adapters that a case gets rows of."""
    return peers_for(case.device, [] if case.ours_only else names)


def label_of(name: str) -> str:
    """A peer's name as the tables and plots show it."""
    return next((peer.label for peer in _ALL if peer.name == name), name)
