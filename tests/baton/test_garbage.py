import subprocess
import sys

PROGRAM = """
import gc
from baton.garbage import freeze_loaded_objects

class Node:
    pass

node = Node()
node.itself = node
del node
freeze_loaded_objects()
assert gc.get_freeze_count() > 1000
assert gc.get_threshold()[0] > 700
gc.unfreeze()  # what is frozen is not listed
assert not any(isinstance(thing, Node) for thing in gc.get_objects())
"""


def test_what_is_loaded_is_frozen_and_what_is_garbage_is_gone():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
