"""A cluster: hosts of devices, and the network between them."""

from dataclasses import dataclass

from plait.planner.hardware import Device


@dataclass(frozen=True)
class Cluster:
    """Hosts of equal devices. Bandwidths are per direction, data-sheet figures; efficiencies are the communication
    model's.

    domain_size         devices that share one switched link, `device.link_bytes_per_s` each (8 in a DGX, 72 in an
                        NVL72): a multiple of `host_size`, or equal to it
    network_bytes_per_s of one host to the network: all its network cards together
    rails               network cards per host; card i of every host is on leaf switch i of its pod
    oversubscription    1: full bisection; r: traffic that leaves a leaf gets 1/r of the bandwidth
    leaf_hosts          hosts below one leaf switch, or one rail group of leaves
    """

    name: str
    device: Device
    num_hosts: int
    host_size: int
    domain_size: int
    network_bytes_per_s: float
    rails: int
    oversubscription: float
    leaf_hosts: int

    @property
    def num_devices(self) -> int:
        return self.num_hosts * self.host_size
