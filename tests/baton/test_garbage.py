import gc
import subprocess
import sys

import pytest

from baton.garbage import importing

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


def test_nothing_is_searched_while_modules_are_imported_also_where_one_fails():
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ModuleNotFoundError), importing():
        raise ModuleNotFoundError
    assert gc.isenabled()
