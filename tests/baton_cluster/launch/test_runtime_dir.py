import os
import socket

import pytest

from baton.errors import ConfigError
from baton_cluster.launch.runtime_dir import RuntimeDir, is_alive, kv_socket, leave, pool_address


def leave_a_socket(path):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


def test_a_claimed_directory_is_private_and_gone_when_released(home):
    runtime = RuntimeDir.claim(home / "run")
    assert (home / "run").stat().st_mode & 0o777 == 0o700
    assert is_alive(home / "run")
    runtime.release()
    assert not (home / "run").exists()
    assert not is_alive(home / "run")


def test_a_directory_in_use_is_refused(home):
    runtime = RuntimeDir.claim(home / "run")
    with pytest.raises(ConfigError, match="another cluster is running there"):
        RuntimeDir.claim(home / "run")
    runtime.release()


def test_the_leavings_of_a_dead_cluster_are_replaced(home):
    dead = RuntimeDir.claim(home / "run")
    leave_a_socket(dead.path / "decode-0.sock")
    os.close(dead.lock_fd)  # As the kernel does when the last process dies.
    runtime = RuntimeDir.claim(home / "run")
    assert not (home / "run" / "decode-0.sock").exists()
    runtime.release()


def test_the_directory_stays_until_the_last_holder_has_left(home):
    runtime = RuntimeDir.claim(home / "run")
    child_fd = os.dup(runtime.lock_fd)  # One open file description, as a child inherits it.
    runtime.release()
    assert is_alive(home / "run")
    leave(home / "run", child_fd)
    assert not (home / "run").exists()


def test_what_an_operator_keeps_in_the_directory_is_left_alone(home):
    runtime = RuntimeDir.claim(home / "run")
    (home / "run" / "notes.txt").write_text("mine")
    leave_a_socket(home / "run" / "router.sock")
    runtime.release()
    assert [file.name for file in (home / "run").iterdir()] == ["notes.txt"]


def test_a_directory_that_others_may_write_to_is_refused(home):
    (home / "run").mkdir()
    (home / "run").chmod(0o777)
    with pytest.raises(ConfigError, match="other users may write there"):
        RuntimeDir.claim(home / "run")


def test_a_link_in_place_of_the_directory_is_refused(home):
    (home / "elsewhere").mkdir()
    (home / "run").symlink_to(home / "elsewhere")
    with pytest.raises(ConfigError, match="not a directory of this user's own"):
        RuntimeDir.claim(home / "run")


def test_a_file_in_place_of_the_directory_is_refused(home):
    (home / "run").write_text("")
    with pytest.raises(ConfigError, match="file exists"):
        RuntimeDir.claim(home / "run")


def test_a_path_that_no_unix_socket_can_have_is_refused_before_it_is_made(home):
    with pytest.raises(ConfigError, match="too long for a Unix socket"):
        RuntimeDir.claim(home / ("x" * 100))
    assert not list(home.iterdir())


def test_the_sockets_of_a_dead_child_are_forgotten(home):
    runtime = RuntimeDir.claim(home / "run")
    leave_a_socket(home / "run" / "decode-1.sock")
    leave_a_socket(kv_socket(home / "run", "decode-1"))
    leave_a_socket(home / "run" / "decode-10.sock")
    runtime.forget("decode-1")
    assert [file.name for file in (home / "run").glob("*.sock")] == ["decode-10.sock"]
    runtime.release()


def test_where_the_pool_is_is_forgotten_with_the_cluster(home):
    dead = RuntimeDir.claim(home / "run")
    dead.note_pool("10.0.0.7:9100")
    assert pool_address(home / "run") == "10.0.0.7:9100"
    os.close(dead.lock_fd)
    runtime = RuntimeDir.claim(home / "run")
    assert pool_address(home / "run") == ""
    runtime.note_pool("10.0.0.7:9100")
    runtime.release()
    assert not (home / "run").exists()
