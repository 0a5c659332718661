"""An emulated cluster on one Linux machine: a network namespace per node, links of limited rate between them.

    sudo python benchmarks/cluster.py up --nodes 2 --rate 200mbit --intra-rate 1600mbit
    sudo python benchmarks/cluster.py run -k 2 -- python script.py     2 ranks per node, one thread per rank
    sudo python benchmarks/cluster.py rate --rate 100mbit              other limits, while it is up
    sudo python benchmarks/cluster.py stats                            bytes that went through every link
    sudo python benchmarks/cluster.py down

Node i is the namespace <name><i>; its full-duplex link `eth0` leads to a bridge in the namespace <name>sw, and a token
bucket limits it in both directions. Ranks of one node reach each other through its loopback, which --intra-rate limits.
No traffic leaves the namespaces. Communication takes wall time and nearly no processor time, so overlap is real even on
two cores. Messages below some 100 KiB fit into the bucket and are faster than the rate. Wants root and iproute2.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TextIO

UNITS = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}
# Bytes. Small TCP buffers keep queues short and flows fair.
SEND_BUFFER = 262144
MTU = 9000


@dataclass(frozen=True)
class Cluster:
    """rate, intra_rate: of every node's link and of its loopback, as tc writes them ("200mbit"); "" is no limit."""

    name: str = "moe"
    nodes: int = 2
    rate: str = "200mbit"
    intra_rate: str = ""

    @property
    def file(self) -> Path:
        return Path(tempfile.gettempdir()) / f"{self.name}.cluster.json"

    @property
    def switch(self) -> str:
        return f"{self.name}sw"

    def node(self, number: int) -> str:
        return f"{self.name}{number}"

    @classmethod
    def load(cls, name: str) -> Cluster:
        file = cls(name).file
        if not file.is_file():
            sys.exit(f"no cluster {name!r} is up; bring one up first")
        return cls(**json.loads(file.read_text()))

    def up(self) -> None:
        """Build it; one of the same name goes first."""
        self.down()
        switch = self.switch
        call(f"ip netns add {switch}")
        call(f"ip -n {switch} link add br0 type bridge")
        for device in ("br0", "lo"):
            call(f"ip -n {switch} link set {device} up")
        for number in range(self.nodes):
            node, port = self.node(number), f"p{number}"
            call(f"ip netns add {node}")
            call(f"ip -n {node} link add eth0 type veth peer name {port} netns {switch}")
            call(f"ip -n {switch} link set {port} mtu {MTU} master br0 up")
            call(f"ip -n {node} addr add {address(number)}/24 dev eth0")
            call(f"ip -n {node} link set eth0 mtu {MTU} up")
            call(f"ip -n {node} link set lo up")
            call(f"ip netns exec {node} sysctl -qw net.ipv4.tcp_wmem='4096 65536 {SEND_BUFFER}'")
        self.limit()

    def limit(self) -> None:
        """Set the rates and remember them."""
        for number in range(self.nodes):
            _token_bucket(self.node(number), "eth0", self.rate)
            _token_bucket(self.switch, f"p{number}", self.rate)
            _token_bucket(self.node(number), "lo", self.intra_rate)
        self.file.write_text(json.dumps(asdict(self)))

    def down(self) -> None:
        """Remove it, and end what runs in it."""
        for line in call("ip netns list").splitlines():
            space = line.split(" ")[0]
            mine = space == self.switch or (space.startswith(self.name) and space[len(self.name) :].isdigit())
            if not mine:
                continue
            for pid in call(f"ip netns pids {space}", check=False).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            call(f"ip netns del {space}", check=False)
        self.file.unlink(missing_ok=True)

    def run(self, command: Sequence[str], ranks_per_node: int, *, timeout_s: float = 300, prefix: bool = False) -> int:
        """Start the command once per rank with the environment that torch.distributed reads; the worst exit status,
        124 when it took too long."""
        port = str(20000 + (os.getpid() * 7 + int(time.time())) % 20000)
        processes, pumps = [], []
        for rank in range(self.nodes * ranks_per_node):
            node, local = divmod(rank, ranks_per_node)
            env = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
            env |= {
                "MASTER_ADDR": address(0), "MASTER_PORT": port, "RANK": str(rank),
                "WORLD_SIZE": str(self.nodes * ranks_per_node), "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(ranks_per_node), "GROUP_RANK": str(node), "NNODES": str(self.nodes),
                "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
            }  # fmt: skip
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.node(node), *command], env=env, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, start_new_session=True,
            )  # fmt: skip
            pump = threading.Thread(target=_pump, args=(process.stdout, f"[{rank}] " if prefix else ""), daemon=True)
            pump.start()
            processes.append(process)
            pumps.append(pump)
        status = _wait(processes, timeout_s)
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for pump in pumps:
            pump.join(2)
        return status


@contextlib.contextmanager
def cluster(name: str, nodes: int, rate: str, intra_rate: str = "") -> Iterator[Cluster]:
    """A cluster for as long as the block runs, or until this process is told to end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that the block is left
    found = Cluster(name, nodes, rate, intra_rate)
    found.up()
    try:
        yield found
    finally:
        found.down()


def address(node: int) -> str:
    return f"10.77.0.{node + 1}"


def link_bytes(device: str) -> int:
    """Bytes that the node of this process has sent through `eth0` or `lo` since the cluster came up."""
    return int(Path(f"/sys/class/net/{device}/statistics/tx_bytes").read_text())


def call(command: str, *, check: bool = True) -> str:
    done = subprocess.run(shlex.split(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if check and done.returncode:
        sys.exit(f"failed: {command}\n{done.stdout}")
    return done.stdout


def bits_per_s(rate: str) -> float:
    """ "200mbit" -> 2e8. Exits with what is wrong for any other form."""
    for unit, factor in UNITS.items():
        number = rate.lower().removesuffix(unit)
        if number != rate.lower() and number.replace(".", "", 1).isdigit():
            return float(number) * factor
    sys.exit(f"{rate!r} is no rate; write 200mbit (units: {', '.join(UNITS)})")


def _token_bucket(space: str, device: str, rate: str) -> None:
    tc = f"ip netns exec {space} tc qdisc"
    call(f"{tc} del dev {device} root", check=False)
    if rate:
        per_s = bits_per_s(rate) / 8
        burst = max(96 * 1024, int(per_s * 0.002))  # one 64 KiB segment at least
        limit = max(4 << 20, int(per_s * 0.2))
        call(f"{tc} add dev {device} root handle 1: tbf rate {rate} burst {burst} limit {limit}")


def _pump(lines: TextIO, prefix: str) -> None:
    for line in lines:
        sys.stdout.write(prefix + line)
        sys.stdout.flush()


def _wait(processes: list[subprocess.Popen], timeout_s: float) -> int:
    start = time.monotonic()
    while time.monotonic() - start < timeout_s:
        codes = [process.poll() for process in processes]
        bad = [code for code in codes if code]
        if bad:
            time.sleep(1.5)  # the others may say why
            return bad[0]
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.05)
    print(f"the ranks took longer than {timeout_s:g} s", file=sys.stderr)
    return 124


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("up", "run", "rate", "stats", "down"))
    parser.add_argument("--name", default="moe")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rate")
    parser.add_argument("--intra-rate")
    parser.add_argument("--ranks-per-node", "-k", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=300)
    given, command = sys.argv[1:], []
    if "--" in given:
        given, command = given[: given.index("--")], given[given.index("--") + 1 :]
    args = parser.parse_args(given)
    rates = {key: value for key in ("rate", "intra_rate") if (value := getattr(args, key)) is not None}
    if args.what == "up":
        replace(Cluster(args.name, args.nodes), **rates).up()
    elif args.what == "down":
        Cluster(args.name).down()
    elif args.what == "rate":
        replace(Cluster.load(args.name), **rates).limit()
    elif args.what == "stats":
        _print_stats(Cluster.load(args.name))
    elif not command:
        parser.error("run what? python benchmarks/cluster.py run -k 2 -- python script.py")
    else:
        found = Cluster.load(args.name)
        sys.exit(found.run(command, args.ranks_per_node, timeout_s=args.timeout, prefix=True))


def _print_stats(found: Cluster) -> None:
    for number in range(found.nodes):
        for device in ("eth0", "lo"):
            sent = call(f"ip netns exec {found.node(number)} cat /sys/class/net/{device}/statistics/tx_bytes")
            print(f"node {number} {device}: {int(sent) / 1e6:.1f} MB sent")


if __name__ == "__main__":
    main()
