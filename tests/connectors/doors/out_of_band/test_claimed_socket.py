"""One process at a time has a Unix socket's path, whatever became of the last one."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from connectors.plumbing.network.sockets import ClaimedSocket
from trunkline_agent.errors import TrunklineError
from trunkline_agent.sockets import address_of

pytestmark = pytest.mark.requirement("XP-11")


def connects(path: Path) -> bool:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with address_of(path) as address:
            client.connect(address)
    except OSError:
        return False
    finally:
        client.close()
    return True


@pytest.mark.parametrize("depth", [0, 12], ids=["short", "longer than an address may be"])
def test_the_path_is_given_to_one_at_a_time(tmp_path: Path, depth: int):
    path = tmp_path.joinpath(*["a-folder-with-a-name"] * depth, "run", "commands.sock")
    first, second = ClaimedSocket(path, tmp_path), ClaimedSocket(path, tmp_path)
    listener = first.claim()
    assert listener is not None
    assert first.claim() is listener
    assert second.claim() is None
    listener.listen()
    assert connects(path)
    second.release()
    assert connects(path)
    first.release()
    assert not path.exists()
    assert second.claim() is not None
    second.release()


def test_it_is_its_owners_alone_and_not_open_before_it_is_listened_on(tmp_path: Path):
    path = tmp_path / "run" / "commands.sock"
    path.parent.mkdir(mode=0o755)
    path.parent.chmod(0o755)
    claimed = ClaimedSocket(path, tmp_path)
    assert claimed.claim() is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not connects(path)
    claimed.release()


def test_a_socket_that_nobody_serves_any_more_is_replaced(tmp_path: Path):
    path = tmp_path / "commands.sock"
    left = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    left.bind(str(path))
    left.close()
    claimed = ClaimedSocket(path, tmp_path)
    listener = claimed.claim()
    assert listener is not None
    listener.listen()
    assert connects(path)
    claimed.release()


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path):
    path = tmp_path / "commands.sock"
    path.write_text("mine")
    with pytest.raises(TrunklineError, match=r"not a socket; choose another xml_pump\.command_socket"):
        ClaimedSocket(path, tmp_path).claim()
    assert path.read_text() == "mine"


def test_a_folder_that_others_may_enter_is_refused_unless_it_is_ours(tmp_path: Path):
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(TrunklineError, match="open to other users"):
        ClaimedSocket(folder / "commands.sock", tmp_path / "data").claim()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o777
