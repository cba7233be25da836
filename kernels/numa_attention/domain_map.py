"""Which NUMA domain each SM of a device belongs to, measured once and kept in the user's cache folder.

NVIDIA's L2 is two partitions, and SMs reach the lines of their own one sooner. Nothing says which SM is where, so it is
measured (`domains_probe.py`): over many addresses, the latencies of two SMs of one domain go up and down together.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

log = logging.getLogger(__name__)

SM_IDS = 512  # more than any device has; ids need not be consecutive
FORMAT = 1  # of the file: another one is measured anew
MOST_ROUNDS = 20  # of the clustering, which takes two or three
# two classes explain 0.64 of the variance of normal numbers and 0.75 of uniform ones: less than this is not two kinds
LEAST_TWO_KINDS = 0.78
LEAST_CERTAINTY = 0.3


class NoDomainMap(RuntimeError):
    """The domains of a device cannot be told; the message says why and what to do."""


@dataclass(frozen=True)
class DomainMap:
    """The domain of each SM of one device.

    domain_of_sm: by SM id, -1 for ids that no SM has. near_cycles, far_cycles: median latency of an L2 hit in the SM's
    own domain and in the other one. certainty: of the least certain SM, 1 where it is as far from the other domain as
    the mean of its own, 0 in the middle between both. method: of `domains_probe.METHODS`.
    """

    name: str
    uuid: str
    method: str
    domain_of_sm: tuple[int, ...]
    near_cycles: float
    far_cycles: float
    certainty: float

    def count(self) -> list[int]:
        """SMs of each domain."""
        return [self.domain_of_sm.count(domain) for domain in range(max(self.domain_of_sm) + 1)]


@dataclass(frozen=True)
class Clusters:
    """What latencies say of SMs and addresses; see DomainMap. home: the domain of each address, int64 [addresses]."""

    domain_of_sm: tuple[int, ...]
    home: torch.Tensor
    near_cycles: float
    far_cycles: float
    certainty: float


def cluster(latencies: torch.Tensor) -> Clusters:
    """Two domains from latencies [SM ids, addresses], NaN in the rows of ids that no SM has.

    Domain 0 is that of the lowest id. Raises NoDomainMap where the latencies do not fall into two kinds.
    """
    ids = (~latencies.isnan().any(1)).nonzero()[:, 0]
    found = latencies[ids].double()
    if len(ids) < 2:
        raise NoDomainMap(f"latencies of {len(ids)} SMs say nothing of domains: measure a whole device")
    # what an SM adds everywhere, and an address from everywhere, is of no interest; nor how late a disturbed one is
    centred = found - found.median(1, keepdim=True).values
    limit = 4 * centred.abs().median()
    centred = centred.clamp(-limit, limit)
    centred = centred - centred.mean(0, keepdim=True)
    centred = centred - centred.mean(1, keepdim=True)
    leading = torch.linalg.svd(centred, full_matrices=False).U[:, 0]
    domain = leading > leading.mean()
    for _ in range(MOST_ROUNDS):
        scores = _scores(centred, domain)
        nearer = torch.where(domain, -scores, scores) < 0
        if torch.equal(nearer, domain) or nearer.all() or not nearer.any():
            break
        domain = nearer
    if domain[0]:
        domain = ~domain
    difference = centred[domain].mean(0) - centred[~domain].mean(0)  # below the mean: at home in domain 1
    home = (difference < difference.mean()).long()
    share = home.double().mean()
    between = share * (1 - share) * (difference[home == 0].mean() - difference[home == 1].mean()) ** 2
    two_kinds = float(between / difference.var(correction=0).clamp(min=1e-9))
    certainty = float(_scores(centred, domain).min())
    if not (two_kinds >= LEAST_TWO_KINDS and certainty >= LEAST_CERTAINTY):
        raise NoDomainMap(
            f"L2 hits of {len(ids)} SMs, of {found.min():.0f} to {found.max():.0f} cycles, do not fall into two kinds "
            f"(addresses {two_kinds:.2f} of at least {LEAST_TWO_KINDS}, SMs {certainty:.2f} of at least "
            f"{LEAST_CERTAINTY}): measure again while nothing else runs on the device"
        )
    near = domain.long()[:, None] == home
    places = [-1] * (int(ids[-1]) + 1)
    for sm, place in zip(ids.tolist(), domain.tolist(), strict=True):
        places[sm] = int(place)
    return Clusters(tuple(places), home, float(found[near].median()), float(found[~near].median()), certainty)


def _scores(centred: torch.Tensor, domain: torch.Tensor) -> torch.Tensor:
    """How clearly each SM is of its own domain: 1 like the mean of that domain's others, -1 like that of the other."""
    sums = torch.stack([centred[~domain].sum(0), centred[domain].sum(0)])
    counts = torch.stack([(~domain).sum(), domain.sum()])[:, None]
    own = domain.long()
    # without the SM itself, which is always like itself
    mine = (sums[own] - centred) / (counts[own] - 1).clamp(min=1)
    theirs = sums[1 - own] / counts[1 - own]
    middle, half = (mine + theirs) / 2, (mine - theirs) / 2
    return ((centred - middle) * half).sum(1) / half.square().sum(1).clamp(min=1e-9)


def measure(
    device: torch.device, latencies: dict[str, torch.Tensor] | None = None
) -> tuple[DomainMap, Clusters]:
    """The map of an NVIDIA device, and what it is made of. latencies: gets [SM ids, addresses] of each method tried.

    Reads are tried first; where lines are copied into the other partition, they are near everywhere, and additions,
    which are made at home, tell. Raises NoDomainMap.
    """
    from numa_attention import domains_probe

    properties = torch.cuda.get_device_properties(device)
    latencies = {} if latencies is None else latencies
    reasons = []
    for method in domains_probe.METHODS:
        latencies[method] = domains_probe.probe_latencies(device, method)
        answered = int((~latencies[method].isnan().any(1)).sum())
        try:
            if answered != properties.multi_processor_count:
                raise NoDomainMap(
                    f"{answered} of {properties.multi_processor_count} SMs answered: measure again while nothing else "
                    "runs on the device"
                )
            found = cluster(latencies[method])
        except NoDomainMap as error:
            reasons.append(f"{method}: {error}")
            continue
        return DomainMap(
            properties.name, str(properties.uuid), method, found.domain_of_sm,
            found.near_cycles, found.far_cycles, found.certainty,
        ), found  # fmt: skip
    raise NoDomainMap(f"the NUMA domains of {properties.name} cannot be told; {'; '.join(reasons)}.")


def of_device(device: torch.device | str, *, fresh: bool = False) -> DomainMap:
    """The map of an NVIDIA device: from the cache folder, or measured and put there. fresh: measured in any case.

    Raises NoDomainMap.
    """
    device = torch.device(device)
    if not fresh and (known := read(uuid_of(device))) is not None:
        return known
    found, _ = measure(device)
    write(found)
    return found


def uuid_of(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def cache_folder() -> Path:
    """The folder of maps, as the XDG base directory specification has it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numa-swizzle"


def file_of(uuid: str) -> Path:
    return cache_folder() / f"domains-{uuid}.json"


def read(uuid: str) -> DomainMap | None:
    """The map in the cache folder, None where there is none that can be used."""
    path = file_of(uuid)
    try:
        found = json.loads(path.read_text())
        if found.pop("format") != FORMAT:
            return None
        places = tuple(found.pop("domain_of_sm"))
        known = DomainMap(domain_of_sm=places, **found)
        if known.uuid != uuid or not {0, 1} <= set(places) <= {-1, 0, 1}:
            raise ValueError("it is of another device, or no map")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s cannot be used (%s): the domains are measured anew", path, error)
        return None
    return known


def write(found: DomainMap) -> None:
    """Put a map into the cache folder, as a whole; where that cannot be written, the log says so."""
    path = file_of(found.uuid)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({"format": FORMAT} | asdict(found)) + "\n")
        part.replace(path)
    except OSError as error:
        log.warning("%s cannot be written (%s): every process will measure the domains", path, error)


def table(device: torch.device) -> torch.Tensor:
    """The domain of each SM id, int32 on the device, as kernels read it: 0 where no SM has the id. Do not write to it.

    Raises NoDomainMap.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return _table(device)


@cache
def _table(device: torch.device) -> torch.Tensor:
    places = of_device(device).domain_of_sm
    filled = [max(place, 0) for place in places] + [0] * (SM_IDS - len(places))
    return torch.tensor(filled, dtype=torch.int32, device=device)
