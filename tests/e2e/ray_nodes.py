"""Two nodes of Ray on this machine, with one CPU each, until standard input ends. Prints the address of the head.

A line on standard input, `kill head` or `start head`, ends the head's server or starts it again at the same port, and
is answered by a line with its pid.
"""

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
        for line in sys.stdin:
            processes = cluster.head_node.all_processes
            if line.strip() == "start head":
                cluster.head_node.start_gcs_server()
                print(processes["gcs_server"][0].process.pid, flush=True)
            else:
                print(processes["gcs_server"][0].process.pid, flush=True)
                cluster.head_node.kill_gcs_server()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
