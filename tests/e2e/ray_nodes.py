"""Two nodes of Ray on this machine, with one CPU each, until standard input ends. Prints the address of the head."""

import importlib
import sys

_STORE_BYTES = 80 << 20  # the least that Ray takes


def main() -> None:
    cluster_utils = importlib.import_module("ray.cluster_utils")
    node = {"num_cpus": 1, "object_store_memory": _STORE_BYTES}
    cluster = cluster_utils.Cluster(
        initialize_head=True, head_node_args={**node, "include_dashboard": False}
    )
    try:
        cluster.add_node(**node)
        print(cluster.address, flush=True)
        sys.stdin.read()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
